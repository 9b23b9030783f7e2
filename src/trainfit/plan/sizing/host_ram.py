"""The RAM of runs at values of a tunable: which may be made without filling this machine's.

Tensors of the simulated GPU have no data, but a model that the script makes on the CPU has: at a
width that the GPU has no memory for, the RAM may be full first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import numpy as np

from trainfit.plan.runs.processes import available_ram
from trainfit.results.text import size

#: Share of the free RAM that a run may be expected to take; an expectation may be wrong.
_USABLE: Final = 0.8
#: Runs to tell growth from: with fewer, all that is seen to grow is taken for a square.
_CURVE: Final = 3


@dataclasses.dataclass(frozen=True)
class RamShortage:
    """A run at ``value`` would need about ``need_bytes`` of RAM; ``free_bytes`` can be taken."""

    value: int
    need_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"not looked at beyond: a run at {self.value:,} would need about "
            f"{size(self.need_bytes)} of RAM here, {size(self.free_bytes)} are free"
        )


class HostRam:
    """What runs at values took, and what others would: by the curve through the largest values.

    ``available``: bytes of RAM that can be taken now (``None``: not known, nothing is limited).
    """

    def __init__(self, available: Callable[[], int | None] = available_ram) -> None:
        self._available = available
        self._peaks: dict[int, int] = {}

    def learn(self, value: int, peak_bytes: int) -> None:
        """A run at ``value`` took so much at its peak (0: not known)."""
        if peak_bytes:
            self._peaks[value] = peak_bytes

    def shortage(self, value: int) -> RamShortage | None:
        """Why no run may be made at ``value``; ``None``: it may."""
        free = self._available()
        if free is None or not self._peaks or value <= max(self._peaks):
            return None
        need = self._need(value)
        return RamShortage(value, need, free) if need > _USABLE * free else None

    def most(self, value: int, step: int) -> int:
        """The largest value up to ``value`` that has room, by halves, of those that are multiples
        of ``step`` above the largest one known."""
        low, high = max(self._peaks, default=value), value
        while high - low > step:
            middle = (low + high) // 2
            low, high = (middle, high) if self.shortage(middle) is None else (low, middle)
        return low // step * step

    def _need(self, value: int) -> int:
        """At a larger value than those known: no less than in proportion to the last growth."""
        known = sorted(self._peaks.items())[-_CURVE:]
        last, peak = known[-1]
        if len(known) == 1:
            return int(peak * (value / last) ** 2)
        before, less = known[-2]
        grown = max(peak - less, 0)
        if len(known) < _CURVE:
            return int(peak + grown * (value**2 - last**2) / (last**2 - before**2))
        line = peak + grown * (value - last) / (last - before)
        places, peaks = zip(*known, strict=True)
        square = float(np.polyval(np.polyfit(places, peaks, 2), value))
        return int(max(line, square))
