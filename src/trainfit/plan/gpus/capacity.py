"""Memory of a job on several GPUs, with shared replays."""

from __future__ import annotations

from trainfit.memory.stream.affine import AffineStream
from trainfit.memory.stream.fit import LARGEST
from trainfit.memory.stream.replay import Stream, replay
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.runs.recording import Recording
from trainfit.simgpu.allocator.settings import AllocatorSettings


class CapacitySearch:
    """A recorded job; ``law`` gives it at other batch sizes (``None``: they are not known)."""

    def __init__(
        self, recording: Recording, law: AffineStream | None, settings: AllocatorSettings
    ) -> None:
        self._stream, self._law, self._settings = Stream.of(recording), law, settings
        self._now = replay(self._stream, settings=settings).peak_reserved
        self._reserved: dict[int, int] = {}
        self._largest: dict[tuple[int, int], int] = {}

    def now(self, memory_model: MemoryModel) -> tuple[int, bool]:
        """Device memory of the job as it is, and whether that fits."""
        whole = self._now + memory_model.context_bytes
        if whole <= memory_model.capacity_bytes:
            return whole, True
        # The allocator may release what it keeps, and do with less.
        shown, fits = memory_model.shown(self._stream)
        return shown.peak_reserved + memory_model.context_bytes, fits

    def largest(self, memory_model: MemoryModel) -> int | None:
        """The largest batch size that runs (0: none)."""
        if self._law is None:
            return None
        room = memory_model.capacity_bytes, memory_model.context_bytes
        if room not in self._largest:
            self._largest[room] = memory_model.largest(self._law)
        return self._largest[room]

    def about(self, memory_model: MemoryModel) -> int | None:
        """About the largest, without a replay of its own: between batch sizes that are common to
        all GPUs, powers of two and the middles between them, by a line."""
        if self._law is None:
            return None
        free = memory_model.capacity_bytes - memory_model.context_bytes
        if self._at(1) > free:
            return 0
        low = 1
        while low < LARGEST and self._at(2 * low) <= free:
            low *= 2
        if low >= LARGEST:
            return LARGEST
        high = 2 * low
        middle = low + low // 2
        if low < middle:
            low, high = (middle, high) if self._at(middle) <= free else (low, middle)
        one, other = self._at(low), self._at(high)
        return low + (free - one) * (high - low) // max(1, other - one)

    def _at(self, batch: int) -> int:
        """Bytes reserved at a batch size, if memory had no end."""
        assert self._law is not None
        if batch not in self._reserved:
            stream = self._law.at(batch)
            self._reserved[batch] = replay(stream, settings=self._settings).peak_reserved
        return self._reserved[batch]
