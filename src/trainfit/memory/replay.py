"""Plays a recorded stream of allocations through the model of the caching allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainfit.results.runs.continuation import calls_in
from trainfit.results.runs.recording import (
    FREE,
    MALLOC,
    STEP_END,
    USED,
    IntArray,
    Recording,
    gpu_of,
)
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.allocator.workspaces import ESTIMATED

#: Stands for "no limit"; no job reaches it.
UNLIMITED = 1 << 50


@dataclasses.dataclass(frozen=True)
class Stream:
    """What the allocator sees: events and, per allocation, bytes and CUDA stream.

    ``estimated`` marks the workspaces whose size a library decides and we estimate;
    ``uncertain`` is the largest share of one of them that may be wrong. ``calls`` are those of a
    continued text, of which a step has many (0: its steps are what they are).
    """

    events: IntArray
    alloc_bytes: IntArray
    alloc_stream: IntArray
    estimated: npt.NDArray[np.bool_]
    uncertain: float = 1.0
    calls: int = 0

    @classmethod
    def of(cls, recording: Recording) -> Stream:
        return cls.with_bytes(recording, recording.alloc_bytes)

    @classmethod
    def with_bytes(cls, recording: Recording, alloc_bytes: IntArray) -> Stream:
        """A recording's stream with other sizes."""
        names = recording.strings
        models = [names[index] in ESTIMATED for index in recording.workspace_model.tolist()]
        estimated = np.zeros(len(alloc_bytes), dtype=bool)
        estimated[recording.workspace_alloc[np.array(models, dtype=bool)]] = True
        used = {names[index] for index in np.unique(recording.workspace_model)}
        uncertain = max((ESTIMATED[name] for name in used & ESTIMATED.keys()), default=0.0)
        return cls(
            recording.events,
            alloc_bytes,
            recording.alloc_stream,
            estimated,
            uncertain,
            calls_in(recording),
        )

    def without(self, dropped: npt.NDArray[np.bool_]) -> Stream:
        """The stream as if the allocations marked in ``dropped`` were never made."""
        codes = self.events & 3
        of_allocation = (codes == MALLOC) | (codes == FREE)
        numbers = np.where(of_allocation, self.events >> 2, 0)
        gone = of_allocation & dropped[numbers] if len(dropped) else of_allocation
        return dataclasses.replace(self, events=self.events[~gone])

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs that something is allocated on, at least one."""
        on = gpu_of(self.alloc_stream)
        return tuple(np.unique(on[self.alloc_bytes > 0]).tolist()) if on.any() else (0,)

    def on(self, gpu: int) -> Stream:
        """What the allocator of one GPU sees: of other GPUs' allocations, that nothing is asked."""
        others = gpu_of(self.alloc_stream) != gpu
        return dataclasses.replace(self, alloc_bytes=np.where(others, 0, self.alloc_bytes))


@dataclasses.dataclass(frozen=True)
class Replay:
    """Outcome of a replay; all figures in bytes.

    ``granted`` is what each allocation was charged (its block), 0 for those that were never
    made. ``peak_event`` is the event at which allocated memory was at its peak, and
    ``step_peaks`` the peak of allocated and of reserved memory within each optimizer step.
    ``step_device_allocations`` counts the memory taken from the device (cudaMalloc) until the
    end of each step, ``retries`` how often all blocks that nothing uses were returned to it, as it
    was full, and ``free_bytes`` what it has for the allocator. ``failed`` is the event at which the
    device was out of memory, or ``None``. ``stats`` are of the allocator after the last event.
    ``stream`` and ``settings`` are what was replayed. ``gpu`` is the number of the GPU that all of
    this is of.
    """

    stream: Stream
    settings: AllocatorSettings

    peak_allocated: int
    peak_reserved: int
    peak_event: int
    granted: IntArray
    allocated_after: IntArray
    step_peaks: tuple[tuple[int, int], ...]
    retries: int
    failed: int | None
    stats: Mapping[str, Any]
    step_device_allocations: tuple[int, ...] = ()
    free_bytes: int = UNLIMITED
    gpu: int = 0

    @property
    def fits(self) -> bool:
        return self.failed is None


def replay(
    stream: Stream,
    *,
    capacity_bytes: int = UNLIMITED,
    context_bytes: int = 0,
    settings: AllocatorSettings | None = None,
) -> Replay:
    """Run the allocator over ``stream`` on a device of ``capacity_bytes``.

    Stops at the first allocation that fails even after the caches were released. Of a process with
    several GPUs, each of which has so much, the one that fails first decides, else the fullest.
    """
    outcomes = of_each_gpu(
        stream, capacity_bytes=capacity_bytes, context_bytes=context_bytes, settings=settings
    )
    failed = [
        (outcome.failed, outcome.gpu, outcome) for outcome in outcomes if outcome.failed is not None
    ]
    return min(failed)[-1] if failed else max(outcomes, key=_fullness)


def _fullness(outcome: Replay) -> tuple[int, int]:
    return outcome.peak_reserved, outcome.peak_allocated


def of_each_gpu(
    stream: Stream,
    *,
    capacity_bytes: int = UNLIMITED,
    context_bytes: int = 0,
    settings: AllocatorSettings | None = None,
) -> tuple[Replay, ...]:
    """A replay as :func:`replay` has it of each GPU that the process uses, by their numbers."""
    settings = settings or AllocatorSettings()
    gpus = stream.gpus
    if len(gpus) == 1:
        return (_of_one(stream, gpus[0], capacity_bytes, context_bytes, settings),)
    return tuple(
        _of_one(stream.on(gpu), gpu, capacity_bytes, context_bytes, settings) for gpu in gpus
    )


def _of_one(
    stream: Stream, gpu: int, capacity_bytes: int, context_bytes: int, settings: AllocatorSettings
) -> Replay:
    allocator = CachingAllocator(capacity_bytes, context_bytes=context_bytes, settings=settings)
    allocator.defers_events = True
    granted = np.zeros(len(stream.alloc_bytes), dtype=np.int64)
    after = np.zeros(len(stream.events), dtype=np.int64)
    run = _Run(allocator, stream, granted, after)
    failed = run.play()
    return Replay(
        stream=stream,
        settings=allocator.settings,
        peak_allocated=run.peak,
        peak_reserved=allocator.peak_reserved_bytes,
        peak_event=run.peak_event,
        granted=granted,
        allocated_after=after,
        step_peaks=tuple(run.step_peaks),
        retries=allocator.num_alloc_retries,
        failed=failed,
        stats={
            "largest_free_block_bytes": allocator.largest_free_block_bytes(),
            "reserved_bytes": allocator.reserved_bytes,
            "allocated_bytes": allocator.allocated_bytes,
            "inactive_split_bytes": allocator.inactive_split_bytes,
            "segments": allocator.segments,
        },
        step_device_allocations=tuple(run.device_allocations),
        free_bytes=capacity_bytes - context_bytes,
        gpu=gpu,
    )


class _Run:
    """The loop over the events, with what it keeps track of."""

    def __init__(
        self, allocator: CachingAllocator, stream: Stream, granted: IntArray, after: IntArray
    ) -> None:
        self._allocator = allocator
        self._stream = stream
        self._granted = granted
        self._after = after
        self.peak = 0
        self.peak_event = 0
        self.step_peaks: list[tuple[int, int]] = []
        self.device_allocations: list[int] = []
        self._blocks: dict[int, Any] = {}
        #: Freed blocks that wait for other streams.
        self._waiting: dict[int, Any] = {}

    def play(self) -> int | None:
        """Returns the event that failed, or ``None``."""
        allocator, stream = self._allocator, self._stream
        malloc, free = allocator.malloc, allocator.free
        sizes, streams = stream.alloc_bytes.tolist(), stream.alloc_stream.tolist()
        granted, after = [0] * len(sizes), [0] * len(stream.events)
        blocks = self._blocks
        peak = step_peak = 0
        failed = None
        for index, event in enumerate(stream.events.tolist()):
            code, number = event & 3, event >> 2
            if code == MALLOC:
                if not sizes[number]:  # nothing is asked of the allocator
                    after[index] = allocator.allocated_bytes
                    continue
                try:
                    block = malloc(sizes[number], streams[number])
                except OutOfDeviceMemory:
                    failed = index
                    break
                blocks[number] = block
                granted[number] = block.size
                now = allocator.allocated_bytes
                if now > step_peak:
                    step_peak = now
                    if now > peak:
                        peak, self.peak_event = now, index
            elif code == FREE:
                block = blocks.pop(number, None)
                if block is not None:
                    free(block)
                    if block.waits:
                        self._waiting[number] = block
            elif code == STEP_END:
                self.step_peaks.append((step_peak, allocator.reserved_bytes))
                self.device_allocations.append(allocator.num_device_alloc)
                step_peak = allocator.allocated_bytes
            elif number:
                self._other(number)
            else:
                allocator.empty_cache()
            after[index] = allocator.allocated_bytes
        self.peak = peak
        self._granted[:] = granted
        self._after[:] = after
        return failed

    def _other(self, value: int) -> None:
        """Another stream uses an allocation, or is done with it."""
        number = (value - 1) >> 1
        if value == number * 2 + USED:
            if number in self._blocks:  # else of another GPU
                self._allocator.record_stream(self._blocks[number], -1)
            return
        if not self._allocator.waits:  # it ran out of memory, and waited for them itself
            self._waiting.clear()
        block = self._waiting.pop(number, None)
        if block is not None:
            self._allocator.complete(block)


def live_at(stream: Stream, event: int) -> IntArray:
    """Numbers of the allocations that are alive right after ``event``."""
    values, codes = stream.events[: event + 1] >> 2, stream.events[: event + 1] & 3
    alive = np.zeros(len(stream.alloc_bytes), dtype=bool)
    alive[values[codes == MALLOC]] = True
    alive[values[codes == FREE]] = False
    return np.flatnonzero(alive)
