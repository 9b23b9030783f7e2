"""Batch sizes with which the evaluation fits: no larger one is recommended than it allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from trainfit.memory.capacity import largest_by_line
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.tracing import recording_of
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.configuration import BatchCheck, BatchLimits, EpochEnd
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec

#: Memory that differs by less is that of training.
ALIKE: Final = 0.02
#: Power of the batch size that memory grows with at the most: that of a batch's samples times one
#: another, as in a contrastive loss.
_STEEPEST: Final = 2
#: Batch sizes that are simulated until one fits where the rule says that it does.
_TRIALS: Final = 3


def within_evaluation(
    job: PlannedJob,
    chosen: AmpSetting,
    present: EpochEnd,
    there: EpochEnd | None,
    evaluated: Callable[[int, RunSpec], EpochEnd],
) -> tuple[AmpSetting, EpochEnd | None]:
    """``chosen`` with no batch size beyond what the evaluation allows, and the evaluation at the
    recommended one; ``there`` is that of ``chosen`` as it is given (``None``: ``present``).
    ``evaluated`` simulates it at a batch size."""
    seen, model = there or present, job.memory_model
    what = "evaluation" if seen.evaluation == "simulated" and seen.is_of_epoch else seen.title
    best, peak = chosen.batches.recommended, chosen.batches.recommended_peak
    if seen.device_bytes is None or best is None or peak is None:
        return chosen, there
    fits = seen.device_bytes <= model.usable_bytes
    if fits and seen.device_bytes <= (1 + ALIKE) * (peak.peak_reserved + model.context_bytes):
        return chosen, there  # training is what limits
    trained = chosen.batches.largest
    if fits and trained and _fits_anyway(seen.device_bytes, best, trained, model.capacity_bytes):
        return chosen, there
    other = present if there is not None and chosen.spec == AS_WRITTEN else None
    if other is None:
        size = best // 2 or 2
        other = evaluated(size, chosen.spec)
    largest = _largest(seen, other, model.capacity_bytes)
    allowed = _largest(seen, other, model.usable_bytes) or 0
    if largest is None and seen.fits is False:
        return _unknown(job, chosen, what), there
    if largest is None or (fits and trained is not None and largest >= (1 - ALIKE) * trained):
        return chosen, there
    if fits or (allowed == 0 and seen.fits):
        return _with(job, chosen, best, (largest, allowed or best), what), there
    for _ in range(_TRIALS if allowed else 0):
        at = _recommended(chosen, allowed)
        end = evaluated(at, chosen.spec)
        if end.fits:
            return _with(job, chosen, at, (largest, allowed), what), end
        allowed = at // 2
        if not allowed:
            break
    return _with(job, chosen, None, (0, 0), what), there


def _fits_anyway(device_bytes: int, best: int, largest: int, capacity_bytes: int) -> bool:
    """Is what needs ``device_bytes`` at batch size ``best`` sure to fit at the ``largest`` that
    training was seen to fit at, however it grows? Then no runs at other batch sizes are made."""
    return device_bytes * max(1.0, largest / best) ** _STEEPEST <= capacity_bytes


def _largest(one: EpochEnd, two: EpochEnd, within_bytes: int) -> int | None:
    """The largest batch size (:func:`largest_by_line`); ``None`` also where one of the ends is
    not known."""
    if None in (one.device_bytes, two.device_bytes, one.batch_size, two.batch_size):
        return None
    points = [(end.batch_size or 0, end.device_bytes or 0) for end in (one, two)]
    return largest_by_line((points[0], points[1]), within_bytes)


def _unknown(job: PlannedJob, chosen: AmpSetting, what: str) -> AmpSetting:
    """``chosen`` without a batch size, as ``what`` does not fit and was not simulated at a smaller
    one."""
    limits = chosen.batches.limits or BatchLimits(None, None)
    batches = dataclasses.replace(
        chosen.batches,
        largest=None,
        recommended=None,
        recommended_peak=None,
        limits=dataclasses.replace(limits, reason=f"the {what} does not fit", epoch_steps=None),
        check=None,
    )
    configuration = job.configuration(chosen.trace, batches, chosen.spec)
    return dataclasses.replace(chosen, batches=batches, configuration=configuration)


def _recommended(chosen: AmpSetting, allowed: int) -> int:
    """The largest batch size up to ``allowed`` of which the step's time is known, else itself."""
    known = [step.batch_size or 0 for step in chosen.batches.curve.steps]
    grain = chosen.batches.curve.grain
    return max((size for size in known if size <= allowed and size % grain.samples == 0),
               default=grain.rounded(allowed))  # fmt: skip


def _with(
    job: PlannedJob, chosen: AmpSetting, best: int | None, most: tuple[int, int], what: str
) -> AmpSetting:
    """``chosen`` with another batch size; of ``most`` samples ``what`` limits it (the evaluation)
    fits, and with the safety margin."""
    largest, memory = most
    batches = chosen.batches
    limits = batches.limits or BatchLimits(None, None)
    peak, check = batches.recommended_peak, batches.check
    if best != batches.recommended:
        why = f"the {what} fits up to {largest}" if best else f"the {what} does not fit"
        limits = dataclasses.replace(limits, reason=why, epoch_steps=None)
        peak, check = _peak(job, chosen, best)
    if limits.memory is not None:
        limits = dataclasses.replace(limits, memory=min(limits.memory, memory))
    if batches.largest is not None and batches.largest <= largest:
        limits = dataclasses.replace(limits, evaluation=None)
    else:
        limits = dataclasses.replace(limits, evaluation=largest)
        batches = dataclasses.replace(batches, largest=largest)
    batches = dataclasses.replace(
        batches,
        recommended=best,
        recommended_peak=peak,
        limits=limits,
        check=check,
    )
    configuration = job.configuration(chosen.trace, batches, chosen.spec)
    return dataclasses.replace(chosen, batches=batches, configuration=configuration)


def _peak(
    job: PlannedJob, chosen: AmpSetting, best: int | None
) -> tuple[Replay | None, BatchCheck | None]:
    """The peak of training at another batch size, and how it was checked."""
    if best is None:
        return None, None
    try:
        run = job.runs.trace(best, job.sized(chosen.spec))
    except ScriptError as error:
        law = chosen.batches.law
        peak = job.memory_model.limited(law.at(best)) if law is not None else None
        return peak, BatchCheck(best, error.in_note)
    return job.memory_model.limited(Stream.of(recording_of(run))), BatchCheck(best)
