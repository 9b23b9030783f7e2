"""Selects the step of a run that represents the others.

The first one differs: it uploads what the others find there, makes the optimizer's state, and has
what the script did before. The last one of an epoch may be shorter; some evaluate or write a
checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any


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
    seen = dict(enumerate(micro_batches))
    usual = [step for step in steps if step in seen and seen[step] == accumulation]
    found = usual or steps
    counted = Counter(operators[step] for step in found)
    most = max(counted.values())
    shape = min(number for number, times in counted.items() if times == most)
    alike = sorted((step for step in found if operators[step] == shape), key=lambda s: work[s])
    median = work[alike[(len(alike) - 1) // 2]]
    return max(step for step in alike if work[step] == median)
