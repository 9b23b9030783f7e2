"""Recommends a batch size: by throughput, within the limits of memory and the data set."""

from __future__ import annotations

import dataclasses
import math

from trainfit.plan.sizing.effective_batch import EffectiveBatch
from trainfit.plan.steps.curve import Curve, saturation_batch
from trainfit.results.plan.configuration import FEW_STEPS, BatchLimits


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
    """The saturation batch size within the bounds.

    ``curve`` has the steps up to ``bounds.most``. Where it is empty the ``present`` batch size
    stays, if that fits, and ``without_curve`` says why there is none. ``unfit`` says why no batch
    size at all is to be recommended (memory grows). ``effective`` says how many samples an
    optimizer step has, and keeps (``None``: one batch). Where accumulation keeps them, the noise
    scale has no say: every micro-batch learns the same from a step, and the fastest is best.
    Nor has it where they are not known.
    """
    most = bounds.most
    knee = saturation_batch(curve) if most else None
    are_known = all(each.samples_per_s is not None for each in curve.steps)
    has_say = noise_scale and are_known and not (effective is not None and effective.is_kept)
    trains = saturation_batch(curve, noise_scale) if most and has_say else None
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
    if most == 0:
        return Recommendation(0, limits)
    wanted = trains or knee
    best: int | None
    if most is not None and wanted is not None:
        best = min(most, wanted)
    else:
        best, reason = _present(present, most, without_curve, curve.tile)
        limits = dataclasses.replace(limits, reason=reason)
    if best and effective is not None:
        effective = dataclasses.replace(effective, by_noise=limits.by_noise)
        if effective.most is not None and best > effective.most:
            best, samples = effective.most, effective.samples_at(effective.most)
            reason = f"{effective.keeper} keeps the effective batch size of {samples}"
            limits = dataclasses.replace(limits, reason=reason)
        few = _few_steps(bounds, effective.samples_at(best))
    else:
        few = _few_steps(bounds, best or 0)
    return Recommendation(best, dataclasses.replace(limits, epoch_steps=few))


def rounded(batch: int, tile: int) -> int:
    """Down to a multiple of ``tile`` (:func:`tile_of`), where one is left: a batch of round size
    has at most 7 samples less."""
    return batch - batch % tile if batch > tile else batch


def _present(present: int | None, most: int | None, why: str, tile: int) -> tuple[int | None, str]:
    """The present batch size or, where that is too large, the largest that is possible."""
    if present is None or (most is not None and present > most):
        found = rounded(most, tile) if most is not None else None
        what = "the largest that memory and the data set allow"
        return found, f"{why}: {what}" if found is not None else why
    return present, f"{why}: keeping {present}"


def _few_steps(bounds: Bounds, of_step: int) -> int | None:
    """Optimizer steps of an epoch with so many samples each, where they are fewer than
    :data:`FEW_STEPS`."""
    samples = bounds.data_set
    if not of_step or samples is None or of_step * FEW_STEPS <= samples:
        return None
    steps = samples / of_step
    return max(1, math.floor(steps) if bounds.drops_last else math.ceil(steps))
