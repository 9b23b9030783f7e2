"""Choice of the mixed precision of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.changes.amp_hazards import is_bearable, line_for, of_gpu
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.memory_model import Batches
from trainfit.results.configuration import (
    AmpAsked,
    AmpCandidate,
    AmpChoice,
    Configuration,
)
from trainfit.results.findings import Finding
from trainfit.results.runs.spec import RunSpec
from trainfit.results.text import size, times

#: Gain in samples/s that another setting must reach: the model does not resolve less.
LEAST_GAIN: Final = 0.05
#: The hazard of a GPU that computes no faster in a half precision.
_NO_CORES: Final = "no tensor cores"


@dataclasses.dataclass(frozen=True)
class AmpSetting:
    """One setting of AMP: ``value`` is for the placeholder, ``variable`` for Accelerate's variable
    (both ``None``: the command cannot say it), ``spec`` its runs, ``trace`` that at the present
    batch size, with what follows from it. ``hazards`` are those that were seen.

    ``samples_per_s`` are those at the batch size that is recommended for the current setting, where
    it was simulated there because nothing tells its own (``None``: it was not). ``as_of`` is the
    dtype of the run, where it is another's (see :class:`AmpCandidate`).
    """

    value: str | None
    spec: RunSpec
    trace: Trace
    configuration: Configuration
    batches: Batches
    samples_per_s: float | None = None
    variable: str | None = None
    hazards: tuple[Finding, ...] = ()
    as_of: str = ""

    @property
    def dtype(self) -> str:
        """What autocast computes in, or "off"."""
        return self.configuration.amp

    @property
    def runs(self) -> bool:
        """Does the job fit, at its current batch size or another?"""
        return self.configuration.fits or bool(self.configuration.recommended_batch)

    @property
    def can_be_said(self) -> bool:
        """Does the launch command have a word for it?"""
        return self.value is not None or self.variable is not None

    def has(self, *kinds: str) -> bool:
        """Is one of these hazards its?"""
        return any(hazard.kind in kinds for hazard in self.hazards)


def choose_amp(
    present: AmpSetting,
    others: Sequence[AmpSetting],
    gpu: GpuSpec,
    failed: Sequence[Finding] = (),
) -> AmpChoice | None:
    """The setting with clearly the most samples a second; the current one where none has, unless a
    hazard speaks against it; of one without Tensor cores the figures decide. ``failed`` are dtypes
    whose runs failed.

    Never one that the GPU emulates or has no Tensor cores for, nor float16 without a scaler, nor
    one that does not fit, except the current one where nothing else can be asked for. ``None``
    where no other is known.
    """
    present = _with_gpu(present, gpu)
    others = [_with_gpu(setting, gpu) for setting in others]
    if not others and not failed:
        return None
    choosing = _Choosing(present, others, gpu, failed)
    chosen, why = choosing.best()
    hazards = (*(hazard for setting in (present, *others) for hazard in setting.hazards), *failed)
    by_hand = choosing.by_hand(chosen)
    place, line = choosing.line(by_hand[0], chosen) if by_hand is not None else ("", "")
    return AmpChoice(
        chosen.value,
        chosen.dtype,
        why,
        None if chosen is present else chosen.configuration,
        choosing.rates,
        by_hand[1] if by_hand is not None else "",
        variable=chosen.variable or "",
        by_hand_dtype=by_hand[0].dtype if by_hand is not None else "",
        line=line,
        place=place,
        hazards=tuple(
            hazard for index, hazard in enumerate(hazards) if hazard not in hazards[:index]
        ),
        candidates=tuple(_candidate(setting, present) for setting in (present, *others)),
    )


def _with_gpu(setting: AmpSetting, gpu: GpuSpec) -> AmpSetting:
    """The same setting with what the GPU does with its dtype."""
    return dataclasses.replace(setting, hazards=(*of_gpu(setting.dtype, gpu), *setting.hazards))


def _candidate(setting: AmpSetting, present: AmpSetting) -> AmpCandidate:
    asked: AmpAsked = "by hand"
    if setting is present:
        asked = "present"
    elif setting.can_be_said:
        asked = "placeholder" if setting.value is not None else "variable"
    value = setting.value or setting.variable or ""
    return AmpCandidate(setting.dtype, asked, value, setting.as_of)


class _Choosing:
    """The comparison of ``present`` with ``others``; ``rates`` are samples a second by dtype."""

    def __init__(
        self,
        present: AmpSetting,
        others: Sequence[AmpSetting],
        gpu: GpuSpec,
        failed: Sequence[Finding],
    ) -> None:
        self._present, self._others, self._gpu, self._failed = present, others, gpu, failed
        self.rates, self._where = _rates(present, others)

    def best(self) -> tuple[AmpSetting, str]:
        """The chosen setting, and why."""
        present, rates = self._present, self.rates
        able = [each for each in self._others if self._is_able(each)]
        against = [hazard for hazard in present.hazards if hazard.is_critical]
        # Without Tensor cores it is neither wrong nor emulated: figures say whether it goes.
        against.sort(key=lambda each: each.kind == _NO_CORES)
        wrong = against[0] if against else None
        is_wrong = wrong is not None and wrong.kind != _NO_CORES
        if not is_wrong and present.runs:
            able = [each for each in able if not self._is_kept_for(each)]
        best = max(able, key=self._rank, default=None)
        if best is None:
            return present, self._kept(wrong)
        if not present.runs:
            return best, f"AMP {present.dtype} does not fit"
        gain = rates[best.dtype] / rates[present.dtype] if rates else None
        is_faster = gain is not None and gain > 1 + LEAST_GAIN
        if wrong is not None and (self._gives_way(wrong, best, gain) if is_wrong else is_faster):
            than = "" if gain is None else f"; {self._compared(best, present)}{self._where}"
            return best, wrong.title + than
        if gain is None:
            return present, "no throughput prediction tells the settings apart"
        if is_faster:
            return best, self._compared(best, present) + self._where
        return present, self._kept(wrong)

    def by_hand(self, chosen: AmpSetting) -> tuple[AmpSetting, str] | None:
        """A clearly faster setting that only a change of the script would give, in words."""
        hidden = [
            each
            for each in (self._present, *self._others)
            if (not each.can_be_said or each.has("no scaler"))
            and not each.has("emulated", _NO_CORES, "fails", "overflow", "float16 weights")
            and (each is not chosen or each.has("no scaler"))
        ]
        best = max(hidden, key=self._rank, default=None)
        if best is None:
            return None
        if chosen.has("no scaler") and best.dtype in (chosen.dtype, "bfloat16"):
            return best, f"{self._named_with(best)}: {self._written(best, chosen)}"
        if not self.rates:
            return None
        gain = self.rates[best.dtype] / self.rates[chosen.dtype]
        if gain <= 1 + LEAST_GAIN or (chosen is self._present and self._is_kept_for(best)):
            return None
        text = f"{self._named_with(best)} would give {times(gain)} the samples/s"
        return best, f"{text}{self._where} (predicted): {self._written(best, chosen)}"

    def line(self, setting: AmpSetting, chosen: AmpSetting) -> tuple[str, str]:
        """The place to write a setting that the command alone cannot give, and what to write; it
        may need another value than that of ``chosen``, too."""
        outcomes = [
            each.trace.outcome
            for each in (self._present, *self._others)
            if each.spec.force is None and each.trace.outcome.autocast_at is not None
        ]
        # What the script itself has says more than a run in which autocast was forced.
        source = outcomes[0] if outcomes else setting.trace.outcome
        has = source.autocast if outcomes else None
        place, written = line_for(setting.dtype, source, has=has)
        value = setting.spec.values.get("amp") or self._present.value
        if value not in (None, chosen.value):
            # A line's place is not the value's; without one the value is first, as a screen cuts.
            other = f"amp={value}"
            written = f"{written}; and {other}" if place else f"{other}, and {written}"
        return place, written

    def _written(self, setting: AmpSetting, chosen: AmpSetting) -> str:
        return ": ".join(filter(None, self.line(setting, chosen)))

    def _is_able(self, setting: AmpSetting) -> bool:
        if not setting.can_be_said or not setting.runs:
            return False
        blocks = [hazard.kind for hazard in setting.hazards if hazard.is_critical]
        if blocks == [_NO_CORES] and not self._present.runs:
            return is_bearable(setting.dtype, self._gpu)
        return not blocks

    def _rank(self, setting: AmpSetting) -> tuple[float, bool, bool]:
        """The order of a setting, by samples/s; of two that are alike bfloat16, which needs no
        scaler."""
        rate = self.rates.get(setting.dtype, 0.0)
        return rate, setting.dtype == "bfloat16", not setting.as_of

    def _gives_way(self, wrong: Finding, best: AmpSetting, gain: float | None) -> bool:
        """Does the current setting with its hazard give way to ``best``?"""
        as_fast = gain is not None and gain >= 1 - LEAST_GAIN
        if wrong.kind == "no scaler":
            return as_fast or best.dtype == "bfloat16"
        return as_fast or not is_bearable(wrong.subject, self._gpu)

    def _is_kept_for(self, fast: AmpSetting) -> bool:
        """Does the script's own AMP save memory, or is it slower than none by less than both steps
        may be wrong? It is not taken out for ``fast`` then."""
        present = self._present
        if fast.dtype != "off" or present.dtype == "off" or not self.rates:
            return False
        return self._saves(fast) > 0 or self._may_be_wrong(fast, present)

    def _saves(self, without: AmpSetting) -> int:
        """Bytes of the GPU that the script's own AMP saves, by blocks that hold something."""
        one, other = (each.configuration.memory for each in (self._present, without))
        return other.allocated_bytes - one.allocated_bytes

    def _may_be_wrong(self, fast: AmpSetting, present: AmpSetting) -> bool:
        fast_s, present_s = (1 / self.rates[each.dtype] for each in (fast, present))
        of_fast, of_present = _spread(fast), _spread(present)
        if of_fast is None or of_present is None:
            return False
        return fast_s * of_fast[1] >= present_s * of_present[0]

    def _compared(self, one: AmpSetting, other: AmpSetting) -> str:
        gain = self.rates[one.dtype] / self.rates[other.dtype]
        return f"{times(gain)} the samples/s of {_named(other.dtype)} (predicted)"

    def _kept(self, wrong: Finding | None) -> str:
        present, rates = self._present, self.rates
        before = f"{wrong.title}; " if wrong is not None else ""
        if not self._others:
            failure = self._failed[0]
            remedy = f" ({failure.fix.action})" if failure.fixes else ""
            return f"{before}kept; {failure.subject} was tried: {failure.title}{remedy}"
        # What has the figures of the current one says nothing of it.
        comparable = [
            each for each in self._others if each.dtype in rates and each.as_of != present.dtype
        ]
        if not comparable:
            return f"{before}no throughput prediction tells the settings apart"
        rival = max(comparable, key=self._rank)
        gain = rates[present.dtype] / rates[rival.dtype]
        if gain > 1 + LEAST_GAIN:
            return before + self._compared(present, rival) + self._where
        if gain < 1 - LEAST_GAIN:
            return before + self._why_not(rival) + self._where
        about = f"kept, {_named(rival.dtype)} gives about as many samples/s (predicted)"
        return before + about + self._where

    def _why_not(self, rival: AmpSetting) -> str:
        """A faster one that is not asked for."""
        block = next((hazard for hazard in rival.hazards if hazard.is_critical), None)
        if not rival.runs:
            return f"kept, {_named(rival.dtype)} does not fit"
        if block is None and self._is_kept_for(rival):
            compared, saved = self._compared(rival, self._present), self._saves(rival)
            why = (
                f"but allocates {size(saved)} more"
                if saved > 0
                else "less than the figures' own error"
            )
            return f"kept; {_named(rival.dtype)} has {compared}, {why}"
        if block is None or not (rival.can_be_said or block.kind == "float16 weights"):
            return "kept; what is faster needs a change of the script"
        return f"kept; {block.title}"

    @staticmethod
    def _named_with(setting: AmpSetting) -> str:
        scaler = " with a GradScaler" if setting.has("no scaler") else ""
        return _named(setting.dtype) + scaler


def _rates(present: AmpSetting, others: Sequence[AmpSetting]) -> tuple[Mapping[str, float], str]:
    """Samples a second of each dtype, at the batch size that is recommended for it.

    Where one of them is not known there, all at the current batch size, which is told in words
    where it is not the recommended one; empty where that is not known.
    """
    settings, batch = [present, *others], present.configuration.batch_size
    elsewhere = batch is not None and present.batches.recommended not in (None, 0, batch)
    text = f" at batch size {batch}" if elsewhere else ""
    for of, where in ((_at_recommended, ""), (_at_present, text)):
        rates = {setting.dtype: of(setting) for setting in settings}
        found = {dtype: rate for dtype, rate in rates.items() if rate is not None}
        if len(found) == len(rates):
            return found, where
    return {}, ""


def _at_recommended(setting: AmpSetting) -> float | None:
    best = setting.batches.recommended
    steps = (step for step in setting.batches.curve.steps if step.batch_size == best)
    return next((step.samples_per_s for step in steps), setting.samples_per_s)


def _spread(setting: AmpSetting) -> tuple[float, float] | None:
    """The ends of a step's prediction interval, as shares of its time; ``None``: not known."""
    batch, steps = setting.configuration.batch_size, setting.batches.curve.steps
    near = min(steps, key=lambda step: abs((step.batch_size or 0) - (batch or 0)), default=None)
    if near is None or near.seconds <= 0:
        return None
    return near.range_s[0] / near.seconds, near.range_s[1] / near.seconds


def _at_present(setting: AmpSetting) -> float | None:
    batch, seconds = setting.configuration.batch_size, setting.configuration.step_s
    # Where the batch size is not known it is the same for all.
    return (batch or 1) / seconds if seconds else None


def _named(dtype: str) -> str:
    return "no AMP" if dtype == "off" else dtype
