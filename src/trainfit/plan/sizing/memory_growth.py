"""Memory that grows from step to step: when it is too much for a batch size to be recommended."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.memory.stream.replay import Replay
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.format import size
from trainfit.results.runs.steps import StepPattern

#: Optimizer steps of a long training. Over as many, growth must stay within what a recommendation
#: leaves free: a loss that is kept for each step of an epoch (512 bytes) does, a batch does not.
_LONG_TRAINING: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class Growth:
    """``bytes_per_step`` that stay behind with each optimizer step at the current batch size (0:
    memory does not grow), and ``spare_bytes``, what a recommendation leaves free of the GPU."""

    bytes_per_step: int = 0
    spare_bytes: int = 0

    @classmethod
    def of(cls, pattern: StepPattern, memory_model: MemoryModel) -> Growth:
        """What a run's steps showed. That of a model's calls (a KV cache) ends with the text."""
        if pattern.course != "growing" or pattern.unit == "model call":
            return cls()
        return cls(
            pattern.growth_bytes_per_step or 0,
            memory_model.capacity_bytes - memory_model.usable_bytes,
        )

    @classmethod
    def on(cls, pattern: StepPattern, free_bytes: int) -> Growth:
        """On another GPU, of which the job as it was simulated leaves ``free_bytes``."""
        if pattern.course != "growing" or pattern.unit == "model call":
            return cls()
        return cls(pattern.growth_bytes_per_step or 0, max(free_bytes, 0))

    @property
    def unfit(self) -> str:
        """Why no batch size at all is to be recommended; empty where one may be."""
        return self._reason(self.bytes_per_step)

    def unfit_at(self, replay: Replay) -> str:
        """The same at another batch size, from its ``replay``: what stays behind may be larger."""
        if not self.bytes_per_step:
            return ""
        peaks = [allocated for allocated, _ in replay.step_peaks[-2:]]
        return self._reason(max(self.bytes_per_step, peaks[-1] - peaks[0] if peaks else 0))

    def _reason(self, bytes_per_step: int) -> str:
        if not bytes_per_step or bytes_per_step * _LONG_TRAINING <= self.spare_bytes:
            return ""
        growth = size(bytes_per_step)
        return f"no batch size is recommended while memory grows ({growth} with each step)"
