"""The life of a storage on the simulated device: from its allocation to its free."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from trainfit.simgpu.allocator import Block, CachingAllocator, OutOfDeviceMemory
from trainfit.simgpu.location import place_of_user
from trainfit.simgpu.recorder import Recorder


class Life(weakref.ref):  # type: ignore[type-arg]
    """The allocation behind one storage; a weak reference whose callback frees it.

    ``value`` is the storage's real content on the CPU where it is known (small integer
    tensors that came from the host, scalars), else ``None``. ``fill`` is a single value
    that every element is *assumed* to have (the result of ``isnan``, say), else ``None``.
    """

    __slots__ = ("block", "fill", "key", "nbytes", "number", "value")

    block: Block | None
    number: int
    nbytes: int
    key: int
    value: torch.Tensor | None
    fill: bool | float | None


class _CurrentStream(threading.local):
    number = 0


class DeviceMemory:
    """Allocates for storages, records it, and frees when a storage dies.

    A storage can die at any bytecode, through the garbage collector also in the middle of
    an allocation. Such frees wait in ``_pending`` until the allocator is consistent again.
    """

    def __init__(self, allocator: CachingAllocator, recorder: Recorder) -> None:
        self.allocator = allocator
        self.recorder = recorder
        self.lives: dict[int, Life] = {}
        self._streams = _CurrentStream()
        self._lock = threading.Lock()
        self._pending: list[Life] = []
        self._lines: dict[tuple[str, int] | None, int] = {None: -1}

    @property
    def stream(self) -> int:
        """The calling thread's current stream."""
        return self._streams.number

    @stream.setter
    def stream(self, number: int) -> None:
        self._streams.number = number

    def adopt(self, meta: torch.Tensor) -> Life:
        """The life of ``meta``'s storage, allocated now if the storage is new."""
        storage = meta.untyped_storage()
        key = storage._cdata
        life = self.lives.get(key)
        if life is not None:
            return life
        life = Life(storage, self._on_death)
        life.key = key
        life.value = None
        life.fill = None
        life.nbytes = storage.nbytes()
        life.block = None
        life.number = -1
        if life.nbytes:
            self._malloc(life)
        self.lives[key] = life
        return life

    def _malloc(self, life: Life) -> None:
        with self._lock:
            life.block = self.allocator.malloc(life.nbytes, self.stream)
            life.number = self.recorder.malloc(life.nbytes, self.stream, self._line())
        if self._pending:
            self.flush()

    def _line(self) -> int:
        """The string index of the user's line that is being executed."""
        place = place_of_user()
        line = self._lines.get(place)
        if line is None:
            assert place is not None
            line = self._lines[place] = self.recorder.string("{}:{}".format(*place))
        return line

    def resize(self, life: Life, nbytes: int) -> None:
        """The storage was resized: the new block is taken before the old one is freed."""
        old, number = life.block, life.number
        life.nbytes, life.block, life.value = nbytes, None, None
        if nbytes:
            self._malloc(life)
        if old is not None:
            with self._lock:
                self.allocator.free(old)
                self.recorder.free(number)

    def transient(self, sizes: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Allocate workspaces ``(bytes, model, arguments)`` together, then free them."""
        held: list[tuple[Block, int]] = []
        with self._lock:
            try:
                for nbytes, model, arguments in sizes:
                    if nbytes <= 0:
                        continue
                    held.append((self.allocator.malloc(nbytes, self.stream), -1))
                    number = self.recorder.malloc(nbytes, self.stream)
                    self.recorder.workspace(number, model, arguments)
                    held[-1] = (held[-1][0], number)
            finally:
                for block, number in reversed(held):
                    self.allocator.free(block)
                    if number >= 0:
                        self.recorder.free(number)
        if self._pending:
            self.flush()

    def persistent(self, nbytes: int, model: int, arguments: tuple[int, ...]) -> None:
        """Allocate a workspace that a library keeps for the life of the process."""
        with self._lock:
            self.allocator.malloc(nbytes, self.stream)
            number = self.recorder.malloc(nbytes, self.stream)
            self.recorder.workspace(number, model, arguments)

    def _on_death(self, life: Any) -> None:
        key: int = life.key
        if self.lives.get(key) is life:
            del self.lives[key]
        if life.block is None:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._free(life)
            finally:
                self._lock.release()
        else:
            self._pending.append(life)

    def _free(self, life: Life) -> None:
        assert life.block is not None
        self.allocator.free(life.block)
        self.recorder.free(life.number)
        life.block = None

    def flush(self) -> None:
        """Carry out the frees that had to wait."""
        while self._pending:
            with self._lock:
                self._free(self._pending.pop())

    def empty_cache(self) -> None:
        self.flush()
        with self._lock:
            self.allocator.empty_cache()
            self.recorder.empty_cache()


__all__ = ["DeviceMemory", "Life", "OutOfDeviceMemory"]
