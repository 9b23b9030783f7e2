"""The memory figures of one recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainfit.results.plan import MemoryFigures


@dataclasses.dataclass(frozen=True)
class RecordingSummary:
    """What one simulated run needed; all figures in bytes.

    ``timeline`` holds allocated memory at evenly spaced events of the last whole step.
    ``out_of_memory`` is the message of the simulated GPU where the run ended by it.
    """

    file: str
    gpu: str
    gpu_memory_bytes: int
    torch: str
    steps: int
    operators: int
    memory: MemoryFigures
    by_kind: Mapping[str, int]
    by_module: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    timeline: tuple[int, ...]
    assumptions: Mapping[str, int]
    out_of_memory: str | None = None
