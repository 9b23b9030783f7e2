"""Prediction interval of a memory figure.

What PyTorch's own code decides is exact. Three things are not: the workspaces that cuDNN takes
(modelled, and its choice among algorithms changes with version and GPU), the fragmentation of
the reserved memory (the real order of frees differs in details), and the CUDA context (given as
a range with the GPU). How often the bounds hold is in :mod:`trainfit.results.plan.result`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.memory.stream.replay import Replay, replay

#: Margins as shares: of the reserved memory (fragmentation), and of what the estimated
#: workspaces add to it. Quantiles of the errors of every second model of that table.
LOW_OF_RESERVED: Final = 0.07
HIGH_OF_RESERVED: Final = 0.10
OF_WORKSPACES: Final = 0.3


@dataclasses.dataclass(frozen=True)
class PredictionInterval:
    """Bytes of a figure's 90% prediction interval."""

    low: int
    high: int


def reserved_bounds(peak_reserved: int, without_workspaces: int) -> PredictionInterval:
    """Bounds of reserved memory, from the peaks with and without estimated workspaces."""
    added = max(peak_reserved - without_workspaces, 0)
    low = peak_reserved * (1 - LOW_OF_RESERVED) - added * OF_WORKSPACES
    high = peak_reserved * (1 + HIGH_OF_RESERVED) + added * OF_WORKSPACES
    return PredictionInterval(int(low), int(high))


def bounds_of(outcome: Replay) -> tuple[PredictionInterval, PredictionInterval]:
    """Bounds of allocated and of reserved memory of a replay.

    Allocated memory is exact but for the workspaces: at least what it is without them, at
    most as much above the figure as below it.
    """
    stream = outcome.stream
    allocated, reserved = outcome.peak_allocated, outcome.peak_reserved
    if stream.estimated.any():
        bare = replay(stream.without(stream.estimated), settings=outcome.settings)
        allocated, reserved = bare.peak_allocated, bare.peak_reserved
    added = max(outcome.peak_allocated - allocated, 0)
    return (
        PredictionInterval(outcome.peak_allocated - added, outcome.peak_allocated + added),
        reserved_bounds(outcome.peak_reserved, reserved),
    )
