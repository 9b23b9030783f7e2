"""Memory model: recorded allocations on the GPU of a plan.

Where memory grows from step to step, it says when that is too much for a recommended batch size.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.memory import capacity
from trainfit.memory.affine import AffineStream
from trainfit.memory.capacity import Device, bounds_of, largest_batch
from trainfit.memory.replay import Replay, Stream
from trainfit.results.gpus import Constant, total
from trainfit.results.memory import MemoryFigures
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import StepPattern
from trainfit.results.text import size
from trainfit.simgpu.allocator.settings import AllocatorSettings


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """A GPU, the allocator's settings, and the share of memory to leave free.

    ``context`` are the parts of its memory outside the allocator, by library;
    ``other_processes_bytes`` of the GPU are held by others.
    """

    gpu: GpuSpec
    settings: AllocatorSettings
    headroom: float
    context: tuple[Constant, ...]
    other_processes_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """What the GPU has for this process."""
        return self.gpu.memory_bytes - self.other_processes_bytes

    @property
    def context_bytes(self) -> int:
        """Memory of the process outside PyTorch's allocator, in bytes."""
        return total(self.context)[0]

    @property
    def usable_bytes(self) -> int:
        """Memory that the job may use, without the headroom, in bytes."""
        return int(self.gpu.memory_bytes * (1 - self.headroom)) - self.other_processes_bytes

    def margin(self, recording: Recording) -> float:
        """The share of the GPU to leave free so that the upper bound still fits a full one.

        The excess of reserved memory over its figure is scaled from the recorded job; the context
        is not scaled.
        """
        outcome = self.unlimited(Stream.of(recording))
        _, reserved = bounds_of(outcome)
        context, _, most = total(self.context)
        room = self.capacity_bytes - most
        if room <= 0 or not outcome.peak_reserved:
            return 0.0
        usable = room * outcome.peak_reserved / reserved.high + context
        return 1 - min(usable / self.capacity_bytes, 1.0)

    @property
    def device(self) -> Device:
        """The GPU as far as a replay asks for it."""
        return Device(self.capacity_bytes, self.context_bytes, self.settings)

    def limited(self, stream: Stream) -> Replay:
        """At the GPU's capacity."""
        return self.device.replay(stream)

    def unlimited(self, stream: Stream) -> Replay:
        """As if memory had no end."""
        return self.device.unlimited(stream)

    def shown(self, stream: Stream) -> tuple[Replay, bool]:
        """At the capacity, or without it where that is too small; does it fit?"""
        limited = self.limited(stream)
        return (limited if limited.fits else self.unlimited(stream)), limited.fits

    def figures(
        self, outcome: Replay, context: tuple[Constant, ...] | None = None
    ) -> MemoryFigures:
        """The three quantities; ``context`` is that of another run than the job's own."""
        return capacity.figures(outcome, self.context if context is None else context)

    def largest(self, law: AffineStream, within_bytes: int | None = None) -> int:
        """The largest batch that fits within ``within_bytes``."""
        return largest_batch(
            law,
            self.capacity_bytes,
            self.context_bytes,
            self.settings,
            within_bytes=within_bytes,
        )

    def with_settings(self, settings: AllocatorSettings) -> MemoryModel:
        """The same with another allocator."""
        return dataclasses.replace(self, settings=settings)


# ---
# Memory that grows from step to step: when it is too much for a batch size to be recommended.


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
