"""Recommends a batch size: by throughput, within the limits of memory and the data set.

What becomes of the effective batch size with another micro-batch is here, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from trainfit.batch.advice import family, learning_rate
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import FRAMEWORKS
from trainfit.plan.sizing.curve import Curve, Grain, rate_at, saturation_batch
from trainfit.results.configuration import FEW_STEPS, BatchLimits, BatchOption
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.text import percent

# ---
# What becomes of the effective batch size when the launch command has another micro-batch.


_NAME: Final = "grad_accum"
#: By how much the ratio of two rates on one curve may be wrong, though both steps may be wrong by
#: far more: ResNet-50's images/s on a T4, measured from 4 to 256 a batch, lie between 4% below and
#: 2% above the curve (docs/figures.md). Below 4 the curve was up to three
#: times too fast.
CURVE_ERROR: Final = 0.06
#: Steps of an epoch that a larger batch leaves at least.
LEAST_STEPS: Final = 50
#: Below this share a gain is none.
_NOTHING: Final = 0.005


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """``values`` for the command's placeholder (none without one), what the user is to do or to
    decide, and what else is to be said; empty: nothing."""

    values: Mapping[str, str]
    action: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class EffectiveBatch:
    """The samples of an optimizer step of ``command``, whose step at batch size ``present`` is made
    up as in ``makeup`` (``None``: not known; a step is one batch then).

    ``by_noise`` is the batch size that the noise scale asks for, as of :func:`accumulation_for`.
    ``is_summed``: the losses of a step's micro-batches are added, not averaged, so that another
    number of them is another learning rate. ``optimizer`` is the class of the optimizer, by name
    (empty: not known). ``infers``: nothing is learned. Of the job's ``replicas`` each has these
    samples.
    """

    command: Command
    makeup: StepMakeup | None
    present: int | None
    by_noise: int | None = None
    is_summed: bool = False
    optimizer: str = ""
    infers: bool = False
    replicas: int = 1

    @property
    def may_change(self) -> bool:
        """May the launch line change the samples of a step: nothing learns from them, or the user
        has marked the batch size as one to choose?"""
        marked = self.command.present.keys() - self.command.supposed
        return self.infers or "batch_size" in marked

    def samples_at(self, batch: int) -> int:
        """The samples of a step of the launch command at ``batch``, its placeholder for
        accumulation filled in."""
        makeup = self.makeup
        if makeup is None or not self.present:
            return batch
        if makeup.is_kept and makeup.effective_batch:
            return makeup.effective_batch
        seen = makeup.accumulation or 1
        if makeup.effective_batch is None:
            return batch * (makeup.loader_batches or seen)
        kept = accumulation_for(self.command, makeup, self.present, batch, self.by_noise)
        target = int(kept.values.get(_NAME, seen))
        return round(makeup.effective_batch * batch / self.present * target / seen)

    def words(self, batch: int) -> str:
        """The job's effective batch size at ``batch``, in words."""
        rounds = self.makeup.rounds if self.makeup is not None else 1
        return effective_words(self.samples_at(batch) // rounds, self.replicas)

    @property
    def keeper(self) -> str:
        """What keeps the samples of a step, in words: the script, the user's placeholder, or an
        option."""
        if self.makeup is not None and self.makeup.is_kept:
            return "the script"
        return "accumulation" if _NAME in self.command.supposed else f"{{{_NAME}}}"

    @property
    def is_kept(self) -> bool:
        """Do the samples of a step stay whatever the batch size, by accumulation or the script's
        own doing?"""
        return self.most is not None

    @property
    def most(self) -> int | None:
        """The largest batch size with which the placeholder for accumulation, or the script, keeps
        the samples of a step; ``None`` without one that has an effect."""
        makeup, stated = self.makeup, self.command.present.get(_NAME)
        if makeup is not None and makeup.is_kept and self.present:
            return self.present * (makeup.accumulation or 1)
        if makeup is None or stated is None or not self.present:
            return None
        samples, seen = makeup.effective_batch, makeup.accumulation
        if samples is None or seen is None or int(stated) != seen:
            return None
        if _is_whole(samples, seen, self.present) or _may_grow(self.command, seen):
            return None
        return max(1, self.present * seen)


def effective_words(samples: int, replicas: int) -> str:
    """The effective batch size of a job whose ``replicas`` have so many samples a step each."""
    words = f"the effective batch size of {samples * replicas}"
    return words if replicas < 2 else f"{words} ({samples} on each of {replicas} GPUs)"


def _may_grow(command: Command, seen: int) -> bool:
    """Does nothing say that the effective batch is to stay? Of a script that does not accumulate,
    with an option for it that the user has not marked."""
    return seen == 1 and _NAME in command.supposed


def _is_whole(samples: int, seen: int, present: int) -> bool:
    """Is the batch size that of the whole step, which is cut up into micro-batches?"""
    return seen > 1 and samples <= present


def accumulation_for(
    command: Command,
    makeup: StepMakeup | None,
    present: int | None,
    chosen: int | None,
    by_noise: int | None = None,
    replicas: int = 1,
) -> Accumulation:
    """What keeps the effective batch size at the batch size ``chosen`` instead of ``present``.

    The number of micro-batches that comes next to it, where the command has a placeholder for it;
    otherwise a note that says what the effective batch becomes. Nothing is kept where a noise scale
    that the user gave asks for the smaller batch (``by_noise``), and not memory: unless the user
    has marked the accumulation, a step is then to have fewer samples.
    """
    if makeup is None or makeup.is_kept or not chosen or not present:
        return Accumulation({})
    stated = command.present.get(_NAME)
    samples, seen = makeup.effective_batch, makeup.accumulation
    if samples is None or seen is None:
        if stated is None:
            return Accumulation({})
        note = f"{{{_NAME}}} stays {stated}: the samples of an optimizer step are not known"
        return Accumulation({}, note)
    if _is_whole(samples, seen, present):
        return Accumulation({})
    if _may_grow(command, seen) and (chosen >= present or chosen == by_noise):
        return Accumulation({})
    if stated is None:
        if chosen == by_noise:
            return Accumulation({})
        said = _without_placeholder(makeup, samples, seen, present, chosen, replicas)
        return Accumulation({}, said)
    if int(stated) != seen:
        note = (
            f"the command says {_NAME} {stated}, the script accumulates {seen}: {{{_NAME}}} is "
            "left as it is; put it into the option that sets it"
        )
        return Accumulation({}, note)
    micro = samples / seen * chosen / present
    target = max(1, round(samples / micro))
    values = {_NAME: str(target)} if target != seen else {}
    becomes, note = round(micro * target), ""
    if values:
        note = f"Launch has accumulation {target}; step times at other batch sizes are " + (
            f"with the current {seen} micro-batches" if seen > 1 else "without accumulation"
        )
    if becomes == samples:
        return Accumulation(values, note=note)
    action = (
        f"the effective batch size changes from {samples * replicas} to {becomes * replicas}: "
        f"micro-batch {round(micro)} × accumulation {target} is the nearest; to keep it, choose a "
        "batch size that divides it"
    )
    return Accumulation(values, action, note)


def _without_placeholder(
    makeup: StepMakeup, samples: int, seen: int, present: int, chosen: int, replicas: int
) -> str:
    """A sentence on a command that sets the micro-batch alone; empty where a larger one is what was
    asked for, without accumulation."""
    becomes = round(samples * chosen / present)
    if becomes == samples or (seen == 1 and chosen > present):
        return ""
    keeps = max(1, round(seen * present / chosen))
    framework = FRAMEWORKS.get(makeup.loop)
    if framework is not None:
        option = framework.with_accumulation
    else:
        where = f" at {makeup.where}" if makeup.where else ""
        option = f"the number of micro-batches before the optimizer's step{where}"
    before, after = (each * replicas // makeup.rounds for each in (samples, becomes))
    changes = f"with batch size {chosen} the effective one changes from {before} to {after}"
    if chosen > present * seen:
        return f"{changes}: only a batch size of at most {present * seen} keeps it"
    if seen == 1 and framework is None:
        return (
            f"{changes}: to keep it, call the optimizer's step() and zero_grad() after every "
            f"{keeps} batches only, and divide the loss by {keeps}"
        )
    nearest = round(becomes * keeps / seen)
    aim = "to keep it" if nearest == samples else f"to come nearest to it ({nearest * replicas})"
    return (
        f"{changes}: {aim}, set {option} to {keeps} instead of {seen}, or write that option into "
        f"the command as {{{_NAME}:{seen}}}"
    )


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What bounds a batch size from above, in samples.

    ``memory`` is the largest that leaves the headroom (0: none does; ``None``: not known),
    ``at_least`` says that memory may allow more: no larger batch was simulated.
    ``data_set`` are the samples of an epoch (``None``: not known), of which those after the last
    full batch are left out where it ``drops_last``.
    """

    memory: int | None
    data_set: int | None = None
    at_least: bool = False
    drops_last: bool = False

    @property
    def most(self) -> int | None:
        """The largest batch that may be recommended; ``None`` where memory's is not known."""
        if self.memory is None:
            return None
        return self.memory if self.data_set is None else min(self.memory, self.data_set)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The batch size (0: none leaves the headroom, ``None``: none is recommended), and why."""

    batch: int | None
    limits: BatchLimits

    @property
    def furthest(self) -> int | None:
        """The batch size that anything is said of: the option's, where there is one."""
        return self.limits.option.batch_size if self.limits.option is not None else self.batch


def recommend(
    bounds: Bounds,
    curve: Curve,
    present: int | None,
    *,
    noise_scale: float | None = None,
    without_curve: str = "",
    unfit: str = "",
    effective: EffectiveBatch | None = None,
) -> Recommendation:
    """The saturation batch size within the bounds; the ``present`` one where that is not faster
    by more than the curve may be wrong, or where that would change the samples of an optimizer
    step and the user has not marked the batch size: it is an option next to the present one then.

    ``curve`` has the steps up to ``bounds.most``. Where it is empty the ``present`` batch size
    stays, if that fits, and ``without_curve`` says why there is none. ``unfit`` says why no batch
    size at all is to be recommended (memory grows). ``effective`` says how many samples an
    optimizer step has, and keeps (``None``: one batch). Where accumulation keeps them, the noise
    scale has no say: every micro-batch learns the same from a step, and the fastest is best.
    Nor has it where they are not known.
    """
    maximum = bounds.most
    knee = saturation_batch(curve) if maximum else None
    are_known = all(step.samples_per_s is not None for step in curve.steps)
    has_say = noise_scale and are_known and not (effective is not None and effective.is_kept)
    trains = saturation_batch(curve, noise_scale) if maximum and has_say else None
    limits = BatchLimits(
        bounds.memory,
        knee,
        noise_scale,
        trains,
        data_set=bounds.data_set,
        at_least=bounds.at_least,
        reason=unfit,
    )
    if unfit:
        return Recommendation(None, limits)
    if maximum == 0:
        return Recommendation(0, limits)
    wanted = trains or knee
    best: int | None
    if maximum is not None and wanted is not None:
        best = min(maximum, wanted)
        if (
            present is not None
            and present <= maximum
            and present != best
            and trains is None
            and (reason := _no_clear_gain(curve, present, best))
        ):
            best, limits = present, dataclasses.replace(limits, reason=reason)
    else:
        best, reason = _present(present, maximum, without_curve, curve.grain)
        limits = dataclasses.replace(limits, reason=reason)
    if best and effective is not None and effective.is_summed and effective.present:
        stays = min(effective.present, maximum or effective.present)
        if best != stays:
            reason = (
                f"keeping {stays}: the losses of a step's micro-batches are added, not averaged"
            )
            best, limits = stays, dataclasses.replace(limits, reason=reason)
    if best and effective is not None:
        effective = dataclasses.replace(effective, by_noise=limits.by_noise)
        fastest = best
        by_script = effective.makeup is not None and effective.makeup.is_kept
        if effective.most is not None and (
            best > effective.most or (by_script and best == effective.most != effective.present)
        ):
            best = effective.most
            reason = f"{effective.keeper} keeps {effective.words(best)}"
            limits = dataclasses.replace(limits, reason=reason)
        elif maximum is not None and not effective.is_kept:
            if limits.trains is None and not effective.may_change:
                best, limits = _learning_kept(effective, best, maximum, limits, curve)
            best, limits = _with_steps_left(bounds, effective, best, limits, curve.grain)
        best, limits = _dividing(effective, best, bounds.memory, limits, curve.grain.unit)
        if fastest != best and not effective.infers:
            option = _option(bounds, curve, effective, best, fastest)
            limits = dataclasses.replace(limits, option=option)
        few = _few_steps(bounds, effective.samples_at(best))
    else:
        few = _few_steps(bounds, best or 0)
    return Recommendation(best, dataclasses.replace(limits, epoch_steps=few))


def _learning_kept(
    effective: EffectiveBatch, best: int, limit: int, limits: BatchLimits, curve: Curve
) -> tuple[int, BatchLimits]:
    """The present batch size, where ``best`` changes the samples of a step, which nobody asked for;
    where that does not fit, the nearest to it, if that is no slower."""
    present = effective.present
    if not present or best == present:
        return best, limits
    if present > limit:
        nearest = curve.grain.rounded(limit)
        rates = rate_at(curve, nearest), rate_at(curve, best)
        is_slower = None in rates or (rates[0] or 0) < (1 - CURVE_ERROR) * (rates[1] or 0)
        return (best if nearest < best or is_slower else nearest), limits
    if effective.samples_at(best) == effective.samples_at(present):
        return best, limits
    reason = f"keeps {effective.words(present)}"
    return present, dataclasses.replace(limits, reason=reason)


def _dividing(
    effective: EffectiveBatch, best: int, memory: int | None, limits: BatchLimits, unit: int
) -> tuple[int, BatchLimits]:
    """A micro-batch of which a whole number makes the samples of a step, where accumulation keeps
    those, or has to, as the present batch size does not fit; no less than half of ``best``."""
    present, makeup = effective.present, effective.makeup
    if not present or limits.by_noise is not None or effective.infers:
        return best, limits
    too_large = memory is not None and present > memory and not effective.may_change
    if not effective.is_kept and not too_large:
        return best, limits
    total = present * ((makeup.accumulation if makeup is not None else None) or 1)
    whole = (index for index in range(best, best // 2, -1) if not (total % index or index % unit))
    number = next(whole, best)
    if number == best or total % best == 0:
        return best, limits
    reason = f"the largest that divides {effective.words(number)}"
    if effective.samples_at(number) != effective.samples_at(present):
        reason = f"the largest of which {total // number} make the {total} samples of a step"
    return number, dataclasses.replace(limits, reason=reason)


def _option(
    bounds: Bounds, curve: Curve, effective: EffectiveBatch, best: int, fastest: int
) -> BatchOption | None:
    """What is clearly faster than ``best``, next to it; ``None``: nothing that leaves an epoch its
    steps."""
    size, _ = _with_steps_left(bounds, effective, fastest, BatchLimits(None, None), curve.grain)
    before, after = effective.samples_at(best), effective.samples_at(size)
    now, then = rate_at(curve, best), rate_at(curve, size)
    if before == after or not now or not then or _no_clear_gain(curve, best, size):
        return None
    optimizer = family(effective.optimizer)
    rate = learning_rate(optimizer, before, after, None)
    return BatchOption(
        batch_size=size,
        samples=after * effective.replicas,
        samples_now=before * effective.replicas,
        gain=then / now,
        steps=_epoch_steps(bounds, after),
        steps_now=_epoch_steps(bounds, before),
        optimizer=effective.optimizer,
        rate_factor=rate.factor,
        rate_rule=rate.rule if rate.factor is not None else "",
        rate_source=rate.sources[0].work if rate.factor is not None else "",
    )


def _with_steps_left(
    bounds: Bounds, effective: EffectiveBatch, best: int, limits: BatchLimits, grain: Grain
) -> tuple[int, BatchLimits]:
    """No more than leaves an epoch :data:`LEAST_STEPS` steps, or as many as it has now: with a few
    large ones a script learns something else, or nothing."""
    present, samples = effective.present, bounds.data_set
    if not present or not samples or best <= present or limits.by_noise is not None:
        return best, limits
    least = min(LEAST_STEPS, samples / max(1, effective.samples_at(present)))
    maximum = max(present, grain.rounded(int(best * samples / least / effective.samples_at(best))))
    if maximum >= best:
        return best, limits
    reason = f"leaves an epoch of {samples} samples {LEAST_STEPS} steps ({best} would be faster)"
    if maximum == present:
        reason = f"keeping {present}: an epoch of {samples} samples has few steps as it is"
    return maximum, dataclasses.replace(limits, reason=reason)


def _no_clear_gain(curve: Curve, present: int, best: int) -> str:
    """Why the ``present`` batch size stays: ``best`` is not faster by more than the curve may be
    wrong; empty where it is, or where that is not known.

    That is :data:`CURVE_ERROR` for a larger one. The steps of small batches are predicted too fast
    at times, so that a smaller one has to gain more than its own step may be wrong.
    """
    now, then = rate_at(curve, present), rate_at(curve, best)
    if now is None or then is None:
        return ""
    error, what = CURVE_ERROR, "curve's"
    if best < present:
        fast = min(curve.steps, key=lambda each: abs((each.batch_size or 0) - best))
        error, what = max(error, fast.range_s[1] / fast.seconds - 1), "step's"
    if then > now * (1 + error):
        return ""
    gain = then / now - 1
    if gain < _NOTHING:
        which = "the smaller " if best < present else ""
        return f"keeping {present}: {which}{best} is no faster"
    return (
        f"keeping {present}: {percent(gain)} more samples/s at {best} is less than the "
        f"{what} own error of {percent(error)}"
    )


def _present(
    present: int | None, limit: int | None, why: str, grain: Grain
) -> tuple[int | None, str]:
    """The present batch size or, where that is too large, the largest that is possible."""
    if present is None or (limit is not None and present > limit):
        found = grain.rounded(limit) if limit is not None else None
        what = "the largest that memory and the data set allow"
        return found, f"{why}: {what}" if found is not None else why
    return present, f"{why}: keeping {present}"


def _few_steps(bounds: Bounds, of_step: int) -> int | None:
    """Optimizer steps of an epoch with so many samples each, where they are fewer than
    :data:`FEW_STEPS`."""
    samples = bounds.data_set
    if not of_step or samples is None or of_step * FEW_STEPS <= samples:
        return None
    return _epoch_steps(bounds, of_step)


def _epoch_steps(bounds: Bounds, of_step: int) -> int | None:
    """Optimizer steps of an epoch with so many samples each; ``None``: not known."""
    if bounds.data_set is None:
        return None
    steps = bounds.data_set / of_step
    return max(1, math.floor(steps) if bounds.drops_last else math.ceil(steps))
