"""Peak of what comes after an epoch's last step, carried on from short evaluations to a whole one,
and the batch sizes with which that fits.

Each line of the script has its own law: what an evaluation keeps grows with its batches, its
activations do not, and what is made of everything kept after its loop (``torch.cat``, a metric's
``compute()``) shows only there. The highest of them at the real length is the peak.

Batch sizes with which the evaluation fits: no larger one is recommended than it allows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.findings.out_of_memory import FullMemory, HeldMemory
from trainfit.memory.capacity import largest_by_line
from trainfit.memory.held import full_memory
from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.tracing import recording_of
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.configuration import BatchCheck, BatchLimits, EpochEnd
from trainfit.results.runs.recording import KINDS, MALLOC, Recording, step_ends
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.simgpu.device.settling import in_use

#: What makes an allocation: operator, module, line of the script.
_Maker = tuple[str, str, str]
#: The highest of all, which has no law of its own.
_ANY: Final = ("", "", "")
#: A share by which a size may lie above what is in proportion to the number of batches.
_ODD: Final = 0.1
#: No allocation is taken to grow with a higher power of the number of batches.
_STEEPEST: Final = 2.0
#: From this power on it is between all samples and all others.
_PAIRWISE: Final = 1.5
#: Sizes below this are of no account.
_SMALL: Final = 1 << 20


@dataclasses.dataclass(frozen=True)
class ShortRun:
    """A run whose evaluation had so many ``batches``, without a limit of memory."""

    recording: Recording
    outcome: Replay
    batches: int

    @functools.cached_property
    def highest(self) -> Mapping[_Maker, tuple[int, int]]:
        """The most that is in use when each maker allocates, and at which event."""
        return _highest(self)


@dataclasses.dataclass(frozen=True)
class CarriedPeak:
    """Bytes at the peak of an evaluation of the real length, of which each further batch adds
    ``batch_bytes`` (0: it does not grow). ``maker`` allocates then, and ``event`` is that of the
    longest run which stands for it."""

    allocated_bytes: int
    batch_bytes: int
    event: int
    maker: _Maker


def is_in_proportion(runs: Sequence[ShortRun]) -> bool:
    """Does no single allocation grow by more than in proportion to the batches? One between all
    samples and all others (a similarity matrix) does: then two lengths do not tell its law."""
    short, long = runs[0], runs[-1]
    before, after = _largest(short), _largest(long)
    maximum = (1 + _ODD) * long.batches / short.batches
    return all(
        size <= _SMALL or maker not in before or size <= maximum * before[maker]
        for maker, size in after.items()
    )


def carried_peak(runs: Sequence[ShortRun], length: int | None) -> CarriedPeak:
    """The peak, carried from ``runs``, the shortest evaluation first, to one of ``length`` batches
    (``None``: as many as the longest has).

    By a line through two lengths, by a parabola through three.
    """
    points = {run.batches: run.highest for run in runs}
    numbers = list(points)
    whole = max(length or 0, numbers[-1])
    longest = points[numbers[-1]]
    best = CarriedPeak(0, 0, 0, _ANY)
    for maker, (peak, event) in longest.items():
        seen = [point[maker][0] for point in points.values() if maker in point]
        at_end, growth = peak, 0.0
        if maker != _ANY and len(seen) == len(numbers) > 1:
            at_end, growth = _carried(numbers, seen, whole)
        at_end += int(runs[-1].outcome.allocated_after[event]) - peak
        if at_end >= best.allocated_bytes:
            best = CarriedPeak(at_end, round(growth), event, maker)
    return best


def _carried(numbers: Sequence[int], seen: Sequence[int], whole: int) -> tuple[int, float]:
    """Bytes at ``whole`` batches, and what one more adds then; never less than was seen."""
    slope = max(0.0, (seen[-1] - seen[-2]) / (numbers[-1] - numbers[-2]))
    at_end, growth = seen[-1] + slope * (whole - numbers[-1]), slope
    if len(numbers) > 2:
        before = (seen[-2] - seen[-3]) / (numbers[-2] - numbers[-3])
        bend = max(0.0, (slope - before) / (numbers[-1] - numbers[-3]))
        at_end += bend * (whole - numbers[-1]) * (whole - numbers[-2])
        growth += bend * (2 * whole - numbers[-1] - numbers[-2])
    return round(at_end), growth


def _after_steps(run: ShortRun) -> tuple[int, Sequence[tuple[int, _Maker]]]:
    """The first event after the last whole step, and from there on each allocation's event with
    what makes it."""
    recording, events = run.recording, run.outcome.stream.events
    ends = step_ends(events)
    first = int(ends[-1]) + 1 if len(ends) else 0
    made = first + np.flatnonzero(events[first:] % 4 == MALLOC)
    names: list[tuple[int, _Maker]] = []
    text = recording.strings
    for event, alloc in zip(made.tolist(), (events[made] >> 2).tolist(), strict=True):
        operator, line = int(recording.alloc_op[alloc]), int(recording.alloc_line[alloc])
        module = int(recording.alloc_module[alloc])
        maker = (
            text[int(recording.op_name[operator])] if operator >= 0 else "",
            text[module] if module >= 0 else "",
            text[line] if line >= 0 else "",
        )
        names.append((event, maker))
    return first, names


def _highest(run: ShortRun) -> Mapping[_Maker, tuple[int, int]]:
    """The most memory in use, and its event, for each maker, in bytes as they were asked for: what
    blocks are larger has no law."""
    first, made = _after_steps(run)
    stream = run.outcome.stream
    after = in_use(stream.events, stream.alloc_bytes)
    index = int(after[first:].argmax()) + first if first < len(after) else len(after) - 1
    found: dict[_Maker, tuple[int, int]] = {_ANY: (int(after[index]), index)}
    for event, maker in made:
        found[maker] = max(found.get(maker, (0, 0)), (int(after[event]), event))
    return found


def _largest(run: ShortRun) -> Mapping[_Maker, int]:
    found: dict[_Maker, int] = {}
    sizes, events = run.outcome.stream.alloc_bytes, run.outcome.stream.events
    for event, maker in _after_steps(run)[1]:
        found[maker] = max(found.get(maker, 0), int(sizes[int(events[event]) >> 2]))
    return found


# ---
# What fills the memory then.


def memory_at_the_end(runs: Sequence[ShortRun], peak: CarriedPeak, length: int) -> FullMemory:
    """The facts of the longest run at ``peak``, with what grows as large as it is after ``length``
    batches."""
    long, short = runs[-1], runs[0]
    memory = _memory(long, peak.event)
    before = {_origin(each): each.nbytes for each in _memory(short, peak.maker).held}
    times = max(1.0, length / long.batches)
    powers = {_origin(each): _power(each, before, short, long) for each in memory.held}
    more = {
        _origin(each): each.nbytes * (times ** powers[_origin(each)] - 1) for each in memory.held
    }
    target, told = peak.allocated_bytes - memory.allocated_bytes, sum(more.values())
    share = target / told if told else 0.0
    held = [
        dataclasses.replace(
            each,
            nbytes=round(each.nbytes + share * more[_origin(each)]),
            kept=round(each.kept * times),
            pairwise=powers[_origin(each)] > _PAIRWISE,
        )
        for each in memory.held
    ]
    held.sort(key=lambda each: -each.nbytes)
    return dataclasses.replace(memory, held=held, allocated_bytes=peak.allocated_bytes)


def what_grows(runs: Sequence[ShortRun], peak: CarriedPeak, memory: FullMemory) -> str | None:
    """The line ("file:line") that makes most of what is kept of each batch, by what ``memory`` has
    at the end; ``None``: it is not known."""
    before = {_origin(each): each.nbytes for each in _memory(runs[-1], peak.event).held}
    grown = [(each.nbytes - before.get(_origin(each), 0), str(each.place or ""))
             for each in memory.held]  # fmt: skip
    more, place = max(grown, default=(0, ""))
    return place or None if more > 0 else None


def _power(
    held: HeldMemory, before: Mapping[_Maker, int], short: ShortRun, long: ShortRun
) -> float:
    """The power of the number of batches with which these bytes grow: 1 what is kept of each, 2
    what is between all and all, 0 what does not grow."""
    if held.kept:
        return 1.0
    ratio = held.nbytes / max(1, before.get(_origin(held), held.nbytes))
    if ratio <= 1 + _ODD or long.batches <= short.batches:
        return 0.0
    return min(_STEEPEST, math.log(ratio) / math.log(long.batches / short.batches))


def _memory(run: ShortRun, at: int | _Maker) -> FullMemory:
    """The memory at an event, or where the maker's is at its highest."""
    event = at if isinstance(at, int) else run.highest.get(at, run.highest[_ANY])[1]
    outcome = dataclasses.replace(
        run.outcome, peak_event=event, peak_allocated=int(run.outcome.allocated_after[event])
    )
    return full_memory(run.recording, outcome)


def _origin(held: HeldMemory) -> _Maker:
    return held.kind, held.operator, str(held.place)


#: What each step has of its own, and what is made once.
_NOT_LEFT: Final = [KINDS.index("input"), KINDS.index("workspace")]


def next_peak(run: ShortRun) -> int:
    """The peak of the steps of the next epoch: what was made since the last step and is still
    there, a copy of the model for one, comes on top of the steps' own peak."""
    recording, end = run.recording, run.outcome
    marks = step_ends(end.stream.events)
    if not len(marks):
        return 0
    before, after = (live_at(end.stream, int(at)) for at in (marks[-1], len(end.stream.events)))
    left = np.setdiff1d(after, before)
    left = left[~np.isin(recording.alloc_kind[left], _NOT_LEFT)]
    return max(step_peaks(end), default=0) + int(end.stream.alloc_bytes[left].sum())


def later_peak(run: ShortRun, steps: int, alike: float) -> int:
    """The peak of the steps after the first epoch's ``steps``, where that is more, by the share
    ``alike`` or above; else 0."""
    peaks = step_peaks(run.outcome)
    highest = max(peaks, default=0)
    return highest if highest > (1 + alike) * max(peaks[:steps], default=0) else 0


def step_peaks(outcome: Replay) -> list[int]:
    """Allocated bytes at the peak of each step."""
    return [allocated for allocated, _ in outcome.step_peaks]


#: Memory that differs by less is that of training.
ALIKE: Final = 0.02
#: Power of the batch size that memory grows with at the most: that of a batch's samples times one
#: another, as in a contrastive loss.
_STEEPEST_SAMPLES: Final = 2
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
    largest = _largest_evaluation(seen, other, model.capacity_bytes)
    allowed = _largest_evaluation(seen, other, model.usable_bytes) or 0
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
    return device_bytes * max(1.0, largest / best) ** _STEEPEST_SAMPLES <= capacity_bytes


def _largest_evaluation(one: EpochEnd, two: EpochEnd, within_bytes: int) -> int | None:
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
