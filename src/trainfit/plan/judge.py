"""What a recorded stream of allocations means on the GPU that is planned for."""

from __future__ import annotations

import dataclasses

from trainfit.hardware import GpuSpec
from trainfit.memory.affine import AffineStream
from trainfit.memory.fit import largest_batch
from trainfit.memory.replay import Replay, Stream, replay
from trainfit.results.plan import MemoryFigures
from trainfit.simgpu.allocator import AllocatorSettings


@dataclasses.dataclass(frozen=True)
class Judge:
    """A GPU, the allocator's settings, and the share of memory to leave free."""

    gpu: GpuSpec
    settings: AllocatorSettings
    headroom: float

    @property
    def usable_bytes(self) -> int:
        """What the job may take, headroom left free."""
        return int(self.gpu.memory_bytes * (1 - self.headroom))

    def limited(self, stream: Stream) -> Replay:
        """At the GPU's capacity."""
        return replay(
            stream,
            capacity_bytes=self.gpu.memory_bytes,
            context_bytes=self.gpu.context_bytes,
            settings=self.settings,
        )

    def unlimited(self, stream: Stream) -> Replay:
        """As if memory had no end."""
        return replay(stream, settings=self.settings)

    def shown(self, stream: Stream) -> tuple[Replay, bool]:
        """At the capacity, or without it where that is too small; does it fit?"""
        limited = self.limited(stream)
        return (limited if limited.fits else self.unlimited(stream)), limited.fits

    def figures(self, outcome: Replay) -> MemoryFigures:
        low, high = self.gpu.context_range_bytes
        return MemoryFigures(
            allocated_bytes=outcome.peak_allocated,
            reserved_bytes=outcome.peak_reserved,
            device_bytes=outcome.peak_reserved + self.gpu.context_bytes,
            context_bytes=self.gpu.context_bytes,
            context_range_bytes=(low, high),
        )

    def largest(self, law: AffineStream, within_bytes: int | None = None) -> int:
        """The largest batch that runs, and takes no more than ``within_bytes``."""
        return largest_batch(
            law,
            self.gpu.memory_bytes,
            self.gpu.context_bytes,
            self.settings,
            within_bytes=within_bytes,
        )

    def with_settings(self, settings: AllocatorSettings) -> Judge:
        """The same with another allocator."""
        return dataclasses.replace(self, settings=settings)
