"""Distinguishes calls that do the work from those that only pop a queued result.

A chunked policy (ACT) runs its network every n-th call and hands out the rest of the chunk in
between: the mean of all its calls describes neither kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.machine.pace import Block

#: Calls of two kinds differ by so many times at least.
_APART: Final = 4.0
#: Calls with work that are needed to see a period, and the share of the distances between them
#: that are whole periods.
_LEAST, _REGULAR = 3, 0.8
#: Of all calls, those that are surely of the fast kind where there are two.
_POPS: Final = 0.4


@dataclasses.dataclass(frozen=True)
class CallPattern:
    """The work is done in the calls ``phase``, ``phase`` + ``period``, …; in each, with 1."""

    period: int = 1
    phase: int = 0

    def has(self, numbers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Do the calls with these numbers do the work?"""
        return np.asarray(numbers % self.period == self.phase)

    def of(self, block: Block) -> NDArray[np.bool_]:
        """Does each call of a block?"""
        return self.has(_numbers(block))


def rhythm(blocks: Sequence[Block]) -> CallPattern:
    """Told from the times of all calls: slow ones that come by chance are not another kind, their
    distances differ. Calls between two blocks may have been made without being noted."""
    if not blocks:
        return CallPattern()
    numbers = np.concatenate([_numbers(block) for block in blocks])
    walls = np.concatenate([np.asarray(block.wall_s) for block in blocks])
    slow = numbers[_slow(walls)]
    if len(slow) < _LEAST:
        return CallPattern()
    distances = np.diff(slow)
    period = int(np.bincount(distances).argmax())
    if period < 2 or float((distances % period == 0).mean()) < _REGULAR:
        return CallPattern()
    found = CallPattern(period, int(np.bincount(slow % period).argmax()))
    # Slow calls by chance may have a common divisor; but not all calls in that rhythm are slow.
    due = numbers[found.has(numbers)]
    return found if len(np.intersect1d(due, slow)) >= _REGULAR * len(due) else CallPattern()


def are_mixed(walls: Sequence[float]) -> bool:
    """Are there calls of two kinds, too few of the slow ones to tell their period?"""
    return 0 < len(_slow(np.asarray(walls))) < _LEAST


def _numbers(block: Block) -> NDArray[np.intp]:
    return block.first_call + np.arange(len(block.wall_s))


def _slow(walls: NDArray[np.float64]) -> NDArray[np.intp]:
    """Calls beyond the widest gap between two times, if that is wide enough and most calls are
    below it; none otherwise."""
    if len(walls) < 2 * _LEAST:
        return np.zeros(0, np.intp)
    order = np.sort(np.log(np.maximum(walls, 1e-9)))
    # At least every second call only takes something.
    upper = order[int(_POPS * len(order)) :]
    gaps = np.diff(upper)
    if not len(gaps) or gaps.max() < np.log(_APART):
        return np.zeros(0, np.intp)
    at = int(gaps.argmax())
    edge = (upper[at] + upper[at + 1]) / 2
    return np.flatnonzero(np.log(np.maximum(walls, 1e-9)) > edge)
