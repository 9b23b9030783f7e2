"""The step from which a run's memory is steady, and the step that represents it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trainfit.results.runs.recording import FREE, MALLOC, STEP_END, IntArray
from trainfit.results.runs.steps import Course
from trainfit.simgpu.allocator.settings import MIN_BLOCK

#: Steps that are simulated at least, and at most where memory does not settle.
LEAST_STEPS = 3
MOST_STEPS = 12
#: So many steps tell growth (:func:`judge`), the first left out.
_TELLING_STEPS = 7
#: Longest period in steps that is looked for: an epoch of a few batches, say.
_LONGEST_PERIOD = 5
#: Steps that must be alike where not all after the first are: batches of a few different
#: shapes (buckets) are alike two by two by chance.
_ALIKE = 4
#: Equal growths in a row that are taken for a law, and growths of any size that are.
_EQUAL_GROWTHS = 4
_GROWTHS = 5


@dataclasses.dataclass(frozen=True)
class StepUse:
    """What one optimizer step did: bytes rounded up to 512 as the allocator does.

    ``peak_bytes`` and ``end_bytes`` are of everything alive, ``allocated_bytes`` and
    ``allocations`` of what the step itself allocated.
    """

    peak_bytes: int
    end_bytes: int
    allocated_bytes: int
    allocations: int


_Same = Callable[[StepUse, StepUse], bool]


@dataclasses.dataclass(frozen=True)
class CourseFinding:
    """A course, with ``first`` (step from which it holds, from 1), ``period`` in steps and
    ``growth_bytes`` per step where it has them."""

    course: Course
    first: int | None = None
    period: int | None = None
    growth_bytes: int | None = None


def enough_steps(most: int, passes: int) -> int:
    """Steps to simulate where memory does not settle, of ``most`` with one backward pass each:
    where a step accumulates several ``passes``, fewer steps see as many batches."""
    return min(most, max(_TELLING_STEPS, -(-most // max(1, passes))))


def step_uses(events: IntArray, alloc_bytes: IntArray) -> list[StepUse]:
    """The whole optimizer steps of a stream of events."""
    values, codes = events >> 2, events & 3
    ends = np.flatnonzero(codes == STEP_END)
    if not len(ends):
        return []
    mallocs = codes == MALLOC
    taken = np.zeros(len(events), dtype=np.int64)
    taken[mallocs] = rounded(alloc_bytes)[values[mallocs]]
    live = in_use(events, alloc_bytes)
    starts = np.concatenate(([0], ends[:-1] + 1))
    whole = slice(0, ends[-1] + 1)
    columns = (
        np.maximum.reduceat(live[whole], starts),
        live[ends],
        np.add.reduceat(taken[whole], starts),
        np.add.reduceat(mallocs[whole].astype(np.int64), starts),
    )
    return [StepUse(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def rounded(nbytes: IntArray) -> IntArray:
    """Sizes as the allocator rounds them at its default settings: multiples of 512 bytes."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def in_use(events: IntArray, alloc_bytes: IntArray) -> IntArray:
    """Bytes that are in use after each event, as the allocator rounds them (:func:`rounded`)."""
    values, codes = events >> 2, events & 3
    sizes = rounded(alloc_bytes)
    moved = np.zeros(len(events), dtype=np.int64)
    for code, sign in ((MALLOC, 1), (FREE, -1)):
        moved[codes == code] = sign * sizes[values[codes == code]]
    return np.cumsum(moved)


def judge(uses: Sequence[StepUse], parts: Iterable[Sequence[int]] = ()) -> CourseFinding:
    """The course of memory over ``uses``.

    ``parts``, where known, are the bytes at the end of each step but the first, by where they
    come from. They tell growth from the mere variation of batches of variable shape.
    """
    if len(uses) < LEAST_STEPS:
        return CourseFinding("unknown")
    finding = _settled(uses, _same_work, 2) or _settled(uses, _same_outline, _ALIKE, longest=1)
    if finding is not None:
        return finding
    growth = _growth([use.end_bytes for use in uses[1:]]) or sum(map(_growth, parts))
    if growth:
        return CourseFinding("growing", growth_bytes=growth)
    # Three steps that differ say that more are needed, no more.
    return CourseFinding("irregular" if len(uses) > LEAST_STEPS else "unknown")


def _settled(
    uses: Sequence[StepUse], same: _Same, least: int, longest: int = _LONGEST_PERIOD
) -> CourseFinding | None:
    """The shortest period with which the last steps repeat, the first step left out."""
    for period in range(1, longest + 1):
        start = len(uses) - period
        while start > 1 and _repeats(uses, start - 1, period, same):
            start -= 1
        repeated = len(uses) - period - start
        target = max(2 * period, least if start == 1 else _ALIKE)
        if repeated and repeated + period >= target:
            return CourseFinding("settled", first=start + 1, period=period)
    return None


def _repeats(uses: Sequence[StepUse], index: int, period: int, same: _Same) -> bool:
    """Is step ``index`` (from 0) like the one a period later?

    The second step's peak is left out: it stands on what the first one left.
    """
    one, two = uses[index], uses[index + period]
    return same(one, two) and (index == 1 or one.peak_bytes == two.peak_bytes)


def _same_work(one: StepUse, two: StepUse) -> bool:
    return (one.end_bytes, one.allocated_bytes, one.allocations) == (
        two.end_bytes,
        two.allocated_bytes,
        two.allocations,
    )


def _same_outline(one: StepUse, two: StepUse) -> bool:
    return one.end_bytes == two.end_bytes


def _growth(ends: Sequence[int]) -> int:
    """Bytes by which the memory at the end of a step grows, 0 unless it does so all along."""
    growths = [after - before for before, after in pairwise(ends)]
    last = growths[-_EQUAL_GROWTHS:]
    if len(last) == _EQUAL_GROWTHS and len(set(last)) == 1 and last[0] > 0:
        return last[0]
    up = sum(growth > 0 for growth in growths)
    steady = min(growths, default=-1) >= 0 and growths[-2:] != [0, 0]
    if steady and up >= max(_GROWTHS, len(growths) / 2):
        return round((ends[-1] - ends[0]) / len(growths))
    return 0


# ---
# Selects the step of a run that represents the others.
#
# The first one differs: it uploads what the others find there, makes the optimizer's state, and has
# what the script did before. The last one of an epoch may be shorter; some evaluate or write a
# checkpoint.


def steady_step(
    operators: Sequence[int],
    work: Sequence[Any],
    micro_batches: Sequence[int] = (),
    accumulation: int | None = None,
    among: Collection[int] = (),
) -> int:
    """The number (from 0) of the typical step after the first; 0 where that is the only one.

    Of the steps with as many ``micro_batches`` as ``accumulation`` (all, where that is not
    known; and of those ``among`` these, if any is), those with the most frequent number of
    ``operators``, or the least of several: an evaluation or a checkpoint adds some; of these the
    one whose ``work`` (values that can be compared) is the median, the last of equal ones.
    """
    every = range(1, len(operators)) or range(len(operators))
    steps = [step for step in every if step in among] or list(every)
    visited = dict(enumerate(micro_batches))
    usual = [step for step in steps if step in visited and visited[step] == accumulation]
    found = usual or steps
    counted = Counter(operators[step] for step in found)
    maximum = max(counted.values())
    shape = min(number for number, times in counted.items() if times == maximum)
    alike = sorted((step for step in found if operators[step] == shape), key=lambda s: work[s])
    median = work[alike[(len(alike) - 1) // 2]]
    return max(step for step in alike if work[step] == median)
