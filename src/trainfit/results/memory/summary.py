"""The memory figures of one recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from trainfit.results.files.metrics import Metered
from trainfit.results.files.notes import Note
from trainfit.results.memory.figures import METRICS, MemoryFigures
from trainfit.results.runs.coverage import Coverage
from trainfit.results.runs.sandbox import Protection
from trainfit.results.runs.steps import StepMakeup, StepPattern


@dataclasses.dataclass(frozen=True)
class RecordingSummary(Metered):
    """What one simulated run needed.

    ``timeline_bytes`` holds allocated memory at evenly spaced events of the last whole step.
    ``out_of_memory`` is the message of the simulated GPU where the run ended by it.
    ``protection`` is what kept the script from changing files (``None``: not known any more).
    ``pattern`` says how memory goes on from step to step, ``notes`` what the figures rest on,
    ``step`` what an optimizer step consists of.
    ``structured_notes`` both with ``assumptions`` as data, ``coverage`` what was simulated.
    """

    METRICS: ClassVar = METRICS

    file: str
    gpu: str
    gpu_memory_bytes: int
    torch: str
    steps: int
    operators: int
    memory: MemoryFigures
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    timeline_bytes: tuple[int, ...]
    assumptions: Mapping[str, int]
    out_of_memory: str | None = None
    pattern: StepPattern | None = None
    other_processes_bytes: int = 0
    profile: str = ""
    notes: tuple[str, ...] = ()
    protection: Protection | None = None
    step: StepMakeup | None = None
    structured_notes: tuple[Note, ...] = ()
    coverage: Coverage | None = None

    def quantities(self) -> Mapping[str, float | None]:
        """As of :class:`Metered`."""
        return self.memory.quantities()
