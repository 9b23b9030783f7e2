"""How sure a memory figure is: a low and a high bound around the predicted one.

What PyTorch's own code decides is exact. Three things are not: the workspaces that cuDNN takes
(modelled, and its choice among algorithms changes with version and GPU), the fragmentation of
the reserved memory (the real order of frees differs in details), and the CUDA context (given as
a range with the GPU). The bounds hold the truth in nine of ten measured jobs.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from trainfit.memory.replay import Replay, Stream, replay
from trainfit.results.recording import Recording
from trainfit.simgpu.allocator import AllocatorSettings
from trainfit.simgpu.workspaces import ESTIMATED

#: Share of jobs whose memory lies between the bounds, and above the upper one. Measured by
#: bench/memory_accuracy.py on models that the margins below were not derived from.
COVERAGE: Final = 0.90
UNDER_PREDICTION: Final = 0.05

#: Margins as shares: of the reserved memory (fragmentation), and of what the estimated
#: workspaces add to it. Quantiles of the errors of the published measurements of
#: bench/memory_accuracy.py, over every second model (docs/figures.md).
LOW_OF_RESERVED: Final = 0.04
HIGH_OF_RESERVED: Final = 0.04
LOW_OF_WORKSPACES: Final = 0.3
HIGH_OF_WORKSPACES: Final = 0.3


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bytes between which a figure lies in nine of ten jobs."""

    low: int
    high: int


def reserved_bounds(peak_reserved: int, without_workspaces: int) -> Bounds:
    """Bounds of reserved memory, from the peaks with and without estimated workspaces."""
    added = max(peak_reserved - without_workspaces, 0)
    low = peak_reserved * (1 - LOW_OF_RESERVED) - added * LOW_OF_WORKSPACES
    high = peak_reserved * (1 + HIGH_OF_RESERVED) + added * HIGH_OF_WORKSPACES
    return Bounds(int(low), int(high))


def without_workspaces(stream: Stream, recording: Recording) -> Stream:
    """``stream`` without the workspaces whose size is an estimate."""
    models = [recording.strings[index] in ESTIMATED for index in recording.workspace_model.tolist()]
    dropped = np.zeros(len(stream.alloc_bytes), dtype=bool)
    dropped[recording.workspace_alloc[np.array(models, dtype=bool)]] = True
    return stream.without(dropped)


def bounds_of(
    stream: Stream,
    recording: Recording,
    outcome: Replay,
    *,
    settings: AllocatorSettings | None = None,
) -> tuple[Bounds, Bounds]:
    """Bounds of allocated and of reserved memory for a stream whose replay is ``outcome``.

    Allocated memory is exact but for the workspaces: at least what it is without them, at
    most as much above the figure as below it.
    """
    bare = replay(without_workspaces(stream, recording), settings=settings)
    added = max(outcome.peak_allocated - bare.peak_allocated, 0)
    allocated = Bounds(outcome.peak_allocated - added, outcome.peak_allocated + added)
    return allocated, reserved_bounds(outcome.peak_reserved, bare.peak_reserved)
