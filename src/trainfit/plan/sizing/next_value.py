"""Where a search for the largest value that fits looks next, by what the values so far need.

A parabola through the nearest of them says where (what is materialised for each pair of positions
grows with the square); whether a value fits is known of those alone that were simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

#: A bracket no wider than this share of the value is sufficiently narrow.
NARROW: Final = 1 / 64


def next_value(
    needs: Mapping[int, int], budget: int, low: int, high: int | None, step: int, furthest: int
) -> int | None:
    """A multiple of ``step`` between ``low``, the largest value that is good (0: none is), and
    ``high``, the smallest that is not (``None``: none yet); ``None``: these are close enough.

    ``needs`` are the bytes of each value that was looked at, and ``budget`` what they may be; no
    value beyond ``furthest`` times ``low`` is looked at.
    """
    if high is not None and high - low <= max(step, int(low * NARROW)):
        return None
    guess = predicted(needs, budget, low)
    if high is None:
        least = max(step, int(low * NARROW))
        if guess <= low:  # it was to be too large: further by more each time
            before = max((value for value in needs if value < low), default=0)
            least = max(least, low - before)
        guess = min(max(guess, low + least), furthest * max(low, 1))
    else:
        least = max(step, (high - low) // 8)
        if not low < guess < high:
            guess = (low + high) // 2
        guess = min(max(guess, low + least), high - min(least, (high - low) // 2))
    return max(guess // step * step, low + step)


def predicted(needs: Mapping[int, int], budget: int, near: int) -> int:
    """The value at which memory is about ``budget``: on the parabola through the three values of
    ``needs`` that come next to it (a line through two, in proportion from one)."""
    values = around(needs, budget)
    if len(values) == 1:
        return 2 * values[0] if needs[values[0]] <= budget else max(values[0] // 2, 1)
    if len(values) == 2 or _is_line(values, needs):
        one, two = values[0], values[-1]
        slope = (needs[two] - needs[one]) / (two - one)
        if slope <= 0:
            return 2 * max(values)
        return max(int(one + (budget - needs[one]) / slope), 1)
    square, line, base = np.polyfit(values, [needs[each] for each in values], 2)
    found = line * line - 4 * square * (base - budget)
    if found < 0:
        return max(near, 1)
    return max(int((-line + math.sqrt(found)) / (2 * square)), 1)


def bracket(needs: Mapping[int, int], budget: int) -> tuple[int, int]:
    """The largest value within the budget, and the smallest beyond it."""
    below = max(each for each in needs if needs[each] <= budget)
    return below, min(each for each in needs if needs[each] > budget)


def around(needs: Mapping[int, int], budget: int) -> list[int]:
    """The values next to the budget, up to three, in order: one on either side of it, and the next
    one."""
    below = [each for each in sorted(needs) if needs[each] <= budget]
    above = [each for each in sorted(needs) if needs[each] > budget]
    pair = [*below[-1:], *above[:1]]
    rest = sorted((each for each in needs if each not in pair),
                  key=lambda each: abs(needs[each] - budget))  # fmt: skip
    return sorted([*pair, *rest[: 3 - len(pair)]])


def _is_line(values: Sequence[int], needs: Mapping[int, int]) -> bool:
    """Do three values lie on a line, or below one (what the allocator rounds)?"""
    low, middle, high = (needs[each] for each in values)
    share = (values[1] - values[0]) / (values[2] - values[0])
    on_line = low + share * (high - low)
    return middle >= on_line * (1 - 1e-3)
