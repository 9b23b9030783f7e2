"""Memory model: recorded allocations on the GPU of a plan."""

from __future__ import annotations

import dataclasses

from trainfit.hardware import GpuSpec
from trainfit.memory.stream import device
from trainfit.memory.stream.affine import AffineStream
from trainfit.memory.stream.fit import largest_batch
from trainfit.memory.stream.interval import bounds_of
from trainfit.memory.stream.replay import Replay, Stream, replay
from trainfit.results.machine.constants import Constant, total
from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.runs.recording import Recording
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

    def limited(self, stream: Stream) -> Replay:
        """At the GPU's capacity."""
        return replay(
            stream,
            capacity_bytes=self.capacity_bytes,
            context_bytes=self.context_bytes,
            settings=self.settings,
        )

    def unlimited(self, stream: Stream) -> Replay:
        """As if memory had no end."""
        return replay(stream, settings=self.settings)

    def shown(self, stream: Stream) -> tuple[Replay, bool]:
        """At the capacity, or without it where that is too small; does it fit?"""
        limited = self.limited(stream)
        return (limited if limited.fits else self.unlimited(stream)), limited.fits

    def figures(
        self, outcome: Replay, context: tuple[Constant, ...] | None = None
    ) -> MemoryFigures:
        """The three quantities; ``context`` is that of another run than the job's own."""
        return device.figures(outcome, self.context if context is None else context)

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
