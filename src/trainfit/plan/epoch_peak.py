"""Peak of what comes after an epoch's last step, carried on from short evaluations to a whole one.

Each line of the script has its own law: what an evaluation keeps grows with its batches, its
activations do not, and what is made of everything kept after its loop (``torch.cat``, a metric's
``compute()``) shows only there. The highest of them at the real length is the peak.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.findings.out_of_memory import FullMemory, HeldMemory
from trainfit.memory.held import full_memory
from trainfit.memory.replay import Replay, live_at
from trainfit.results.runs.recording import KINDS, MALLOC, Recording, step_ends
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
    most = (1 + _ODD) * long.batches / short.batches
    return all(
        size <= _SMALL or maker not in before or size <= most * before[maker]
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
        seen = [found[maker][0] for found in points.values() if maker in found]
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
    at = int(after[first:].argmax()) + first if first < len(after) else len(after) - 1
    found: dict[_Maker, tuple[int, int]] = {_ANY: (int(after[at]), at)}
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
    wanted, told = peak.allocated_bytes - memory.allocated_bytes, sum(more.values())
    share = wanted / told if told else 0.0
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
