"""The lifetime of a storage on the simulated device, from its allocation to its free."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trainfit.results.runs.recording import FREE, MALLOC, gpu_of, stream_on
from trainfit.results.runs.steps import LAUNCH_QUEUE
from trainfit.simgpu.allocator.blocks import Block, private_pool, stream_of
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.device.recorder import RecordingBuilder
from trainfit.simgpu.device.user_location import place_of_user
from trainfit.torch_private.operators import storage_key

#: The machine's clock, whatever ``time`` shows scripts.
_now = time.perf_counter


class StorageRecord(weakref.ref):  # type: ignore[type-arg]
    """The allocation behind one storage; a weak reference whose callback frees it.

    ``value`` is the storage's real content on the CPU where it is known (small integer tensors that
    came from the host, scalars), else ``None``. ``fill`` is a single value that every element is
    *assumed* to have (the result of ``isnan``, say), else ``None``. ``nonzeros`` is how many
    elements are not zero at most, where that is all that is known (a mask of zeros with ones
    written at so many unknown places), else ``None``. ``below`` is what all elements, whole numbers
    from 0 on, are below, where that is all that is known (the places that argmax gives), else
    ``None``. ``placeholder`` makes what the host is told of an unknown content where zeros cannot
    be (places are different), laid out as the storage is, else ``None``. ``gpu`` is the number of
    the GPU that it is on.
    """

    __slots__ = (
        *("below", "block", "fill", "gpu", "key", "nbytes", "nonzeros", "number", "placeholder"),
        "value",
    )

    block: Block | None
    gpu: int
    number: int
    nbytes: int
    key: int
    value: torch.Tensor | None
    fill: bool | float | None
    nonzeros: int | None
    below: int | None
    placeholder: Callable[[], torch.Tensor] | None


class _Wait(NamedTuple):
    """A freed block that other streams use: it may be handed out again when they are done."""

    block: Block
    number: int
    streams: set[int]
    #: Operators submitted before the free: when the streams have come so far, they are done.
    submitted: int


class _Current(threading.local):
    """A thread's GPU and the stream of it that is current; those of other GPUs by their number."""

    gpu = 0
    stream = 0

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}


class DeviceMemory:
    """Allocates for storages, records it, and frees when a storage dies.

    Each GPU of the process has an allocator; the streams of all of them have different numbers
    (:func:`~trainfit.results.runs.recording.stream_on`).

    A storage can die at any bytecode, through the garbage collector also in the middle of
    an allocation. Such frees wait in ``_pending`` until the allocator is consistent again.
    """

    def __init__(self, allocators: Sequence[CachingAllocator], recorder: RecordingBuilder) -> None:
        self.allocators = allocators
        self.recorder = recorder
        self.lives: dict[int, StorageRecord] = {}
        #: Allocations that hold what was read from a file straight to a GPU.
        self.read: set[int] = set()
        self._current = _Current()
        #: GPUs that something was allocated on, or tried to be, in addition to the first.
        self.others: set[int] = set()
        #: Is told of each of them.
        self.on_other: Callable[[int], None] = lambda _: None
        self._lock = threading.Lock()
        self._pending: list[StorageRecord] = []
        self._lines: dict[tuple[str, int] | None, int] = {None: -1}
        #: By the time of the free.
        self._waits: deque[_Wait] = deque()
        #: What each stream comes after: of other streams the operators that were submitted by then.
        self._after: dict[int, dict[int, int]] = {}
        #: Is told when the host waits for all that was submitted (to a stream).
        self.on_wait: Callable[[int | None], None] = lambda _: None
        #: Is told of the seconds that a storage's death took here, which may be at any bytecode.
        self.on_death: Callable[[float], None] = lambda _: None
        for caching_allocator in allocators:
            caching_allocator.defers_events = True
        #: Streams that take part in the capture of a CUDA graph, and its private pool.
        self.capturing: set[int] = set()
        self._private = 0

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator of the current GPU."""
        return self.allocators[self._current.gpu]

    @property
    def gpu(self) -> int:
        """The calling thread's current GPU; while an operator runs, the one that it runs on."""
        return self._current.gpu

    @gpu.setter
    def gpu(self, number: int) -> None:
        current = self._current
        current.streams[current.gpu] = current.stream
        current.gpu, current.stream = number, self.stream_of(number)

    @property
    def stream(self) -> int:
        """The calling thread's current stream on its current GPU."""
        return self._current.stream

    @stream.setter
    def stream(self, number: int) -> None:
        """Set the stream; its GPU becomes the current one, too, as in ``torch.cuda.set_stream``."""
        gpu = gpu_of(number)
        if gpu != self._current.gpu:
            self.gpu = gpu
        self._current.stream = number

    def stream_of(self, gpu: int) -> int:
        """The calling thread's current stream on a GPU."""
        current = self._current
        if gpu == current.gpu:
            return current.stream
        return current.streams.get(gpu, stream_on(gpu, 0))

    @contextlib.contextmanager
    def on(self, gpu: int) -> Iterator[None]:
        """A GPU is the current one inside."""
        before, self.gpu = self.gpu, gpu
        try:
            yield
        finally:
            self.gpu = before

    def begin_capture(self, pool: int) -> None:
        """``beginAllocateToPool``: the current stream's allocations, and those of streams that
        join it, come from a private pool."""
        self.capturing, self._private = {self.stream}, pool

    def end_capture(self) -> None:
        """``endAllocateToPool``."""
        self.capturing = set()

    def _place(self) -> int:
        """The pool for an allocation now: the stream's own, or the capture's for this stream."""
        stream = self.stream
        return private_pool(stream, self._private) if stream in self.capturing else stream

    def adopt(self, meta: torch.Tensor) -> StorageRecord:
        """The life of ``meta``'s storage, allocated now if the storage is new."""
        storage = meta.untyped_storage()
        key = storage_key(storage)
        life = self.lives.get(key)
        if life is not None:
            return life
        life = StorageRecord(storage, self._on_death)
        life.key = key
        life.gpu = self._current.gpu
        life.value = None
        life.fill = None
        life.nonzeros = life.below = None
        life.placeholder = None
        life.nbytes = storage.nbytes()
        life.block = None
        life.number = -1
        if life.nbytes:
            self._malloc(life)
        self.lives[key] = life
        return life

    def _malloc(self, life: StorageRecord) -> None:
        if self._waits:
            self._settle_waits()
        if life.gpu:
            self._use(life.gpu)
        if life.gpu != self._current.gpu:
            place = self.stream_of(life.gpu)
        else:
            place = self._place() if self.capturing else self.stream
        with self._lock:
            life.block = self.allocators[life.gpu].malloc(life.nbytes, place)
            life.number = self.recorder.malloc(life.nbytes, place, self._line())
        if self._pending:
            self.flush()

    def _use(self, gpu: int) -> None:
        if gpu not in self.others:
            self.others.add(gpu)
            self.on_other(gpu)

    def _line(self) -> int:
        """The string index of the user's line that is being executed."""
        place = place_of_user()
        line = self._lines.get(place)
        if line is None:
            assert place is not None
            line = self._lines[place] = self.recorder.string("{}:{}".format(*place))
        return line

    def resize(self, life: StorageRecord, nbytes: int) -> None:
        """The storage was resized: the new block is allocated before the old one is freed."""
        old, number = life.block, life.number
        life.nbytes, life.block, life.value, life.nonzeros = nbytes, None, None, None
        life.below = None
        if nbytes:
            self._malloc(life)
        if old is not None:
            with self._lock:
                self._release(old, number)

    @contextlib.contextmanager
    def held(self, sizes: list[tuple[int, int, tuple[int, ...]]]) -> Iterator[None]:
        """Allocate workspaces ``(bytes, model, arguments)`` together, and free them at the end.

        Those of 0 bytes are recorded too: at another batch size they may be more.
        """
        held: list[tuple[Block | None, int]] = []
        if self._waits:
            self._settle_waits()
        place = self._place()
        try:
            with self._lock:
                for nbytes, model, arguments in sizes:
                    block = self.allocator.malloc(nbytes, place) if nbytes > 0 else None
                    held.append((block, -1))
                    number = self.recorder.malloc(max(nbytes, 0), place)
                    self.recorder.workspace(number, model, arguments)
                    held[-1] = (block, number)
            yield
        finally:
            with self._lock:
                for block, number in reversed(held):
                    if block is not None:
                        self.allocator.free(block)
                    if number >= 0:
                        self.recorder.free(number)
        if self._pending:
            self.flush()

    def repeat(
        self,
        events: Iterable[tuple[int, int]],
        held: dict[int, tuple[Block | None, int]],
        other: Mapping[int, Callable[[], None]],
    ) -> None:
        """Allocate and free once more as :meth:`RecordingBuilder.events` has it.

        ``held`` are blocks and numbers of what lives of an earlier part, by the number that it had
        first; what others made and hold is not freed. ``other`` are called in the place of their
        allocations.
        """
        recorder = self.recorder
        for code, number in events:
            if code == MALLOC and number in other:
                other[number]()
            elif code == MALLOC:
                nbytes, stream = recorder.requested(number)
                allocator = self.allocators[gpu_of(stream)]
                with self._lock:
                    block = allocator.malloc(nbytes, stream) if nbytes else None
                    held[number] = block, recorder.malloc_like(number)
            elif code == FREE and number in held:
                self._let_go(*held.pop(number))
        if self._pending:
            self.flush()

    def let_go(self, held: dict[int, tuple[Block | None, int]]) -> None:
        """Free what lives of that."""
        while held:
            self._let_go(*held.popitem()[1])

    def _let_go(self, block: Block | None, number: int) -> None:
        with self._lock:
            if block is not None:
                self.allocators[gpu_of(block.stream)].free(block)
            self.recorder.free(number)

    def persistent(self, nbytes: int, model: int, arguments: tuple[int, ...]) -> None:
        """Allocate a workspace that a library keeps for the life of the process."""
        place = self._place()
        with self._lock:
            self.allocator.malloc(nbytes, place)
            number = self.recorder.malloc(nbytes, place)
            self.recorder.workspace(number, model, arguments)

    def _on_death(self, life: Any) -> None:
        key: int = life.key
        if self.lives.get(key) is life:
            del self.lives[key]
        if life.block is None:
            return
        began = _now()
        if self._lock.acquire(blocking=False):
            try:
                self._free(life)
            finally:
                self._lock.release()
        else:
            self._pending.append(life)
        self.on_death(_now() - began)

    def _free(self, life: StorageRecord) -> None:
        assert life.block is not None
        self._release(life.block, life.number)
        life.block = None

    def _release(self, block: Block, number: int) -> None:
        uses = block.stream_uses
        self.allocators[gpu_of(block.stream)].free(block)
        self.recorder.free(number)
        if uses is not None:
            self._waits.append(_Wait(block, number, set(uses), self.recorder.op_count))

    def flush(self) -> None:
        """Carry out the frees that had to wait."""
        while self._pending:
            with self._lock:
                self._free(self._pending.pop())

    def empty_cache(self) -> None:
        self.on_wait(None)  # cudaFree waits for the device
        self.flush()
        with self._lock:
            for each in self.allocators:
                each.empty_cache()
            self.recorder.empty_cache()
            self._waits.clear()

    # -- other streams -------------------------------------------------------------------

    def record_stream(self, life: StorageRecord, stream: int) -> None:
        """``Tensor.record_stream``: work on ``stream`` uses the storage, too."""
        block = life.block
        if block is None or stream == stream_of(block.stream):
            return
        with self._lock:
            if block.stream_uses is None:
                self.recorder.used(life.number)
            self.allocators[life.gpu].record_stream(block, stream)

    def after(self, stream: int) -> dict[int, int]:
        """What the work that is submitted to ``stream`` from now on comes after, by the streams
        whose first so many operators it waits for."""
        return dict(self._after.get(stream, ()))

    def comes_after(self, stream: int, others: Mapping[int, int]) -> None:
        """``stream`` waits for the first so many operators of ``others``."""
        known = self._after.setdefault(stream, {})
        for other, submitted in others.items():
            if other != stream:
                known[other] = max(submitted, known.get(other, 0))

    def synchronize(
        self,
        stream: int | None = None,
        submitted: int | None = None,
        after: Mapping[int, int] | None = None,
    ) -> None:
        """The host waits for ``stream`` (``None``: all) to carry out its work.

        Of that the first ``submitted`` operators (``None``: all), and with them what they come
        ``after`` on other streams (``None``: all that the stream has waited for).
        """
        if self.stream in self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if submitted is None:
            self.on_wait(stream)
        if not self._waits:
            return
        if after is None:
            after = self._after.get(stream, {}) if stream is not None else {}
        farthest = None if submitted is None else max((submitted, *after.values()))
        with self._lock:
            for wait in list(self._waits):
                if farthest is not None and wait.submitted > farthest:
                    break
                if stream is None:
                    wait.streams.clear()
                elif submitted is None or wait.submitted <= submitted:
                    wait.streams.discard(stream)
                wait.streams.difference_update(
                    [other for other in wait.streams if wait.submitted <= after.get(other, -1)]
                )
                if not wait.streams:
                    self._waits.remove(wait)
                    self._complete(wait)

    def _settle_waits(self) -> None:
        """Waits that are over because the host cannot be that far ahead of the device."""
        if self.capturing:
            return  # nothing runs meanwhile
        # Operators count here, each of which launches at least one kernel.
        reached = self.recorder.op_count - LAUNCH_QUEUE
        with self._lock:
            # Where memory ran out, the allocator has waited for all of them.
            while self._waits and (
                not self._allocator_of(self._waits[0]).waits or self._waits[0].submitted <= reached
            ):
                self._complete(self._waits.popleft())

    def _allocator_of(self, wait: _Wait) -> CachingAllocator:
        return self.allocators[gpu_of(wait.block.stream)]

    def _complete(self, wait: _Wait) -> None:
        allocator = self._allocator_of(wait)
        if allocator.waits:
            allocator.complete(wait.block)
        self.recorder.done(wait.number)


__all__ = ["DeviceMemory", "OutOfDeviceMemory", "StorageRecord"]
