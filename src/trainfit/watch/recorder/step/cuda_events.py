"""The GPU's side of a step: CUDA events and single numbers that are read when they are there.

Nothing here waits for the GPU. An event is asked whether it was reached; numbers (the loss, a
gradient's norm) are copied into pinned memory by the stream itself and read after an event that
was recorded behind the copy.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch

#: Numbers of one type that may be on their way.
_SLOTS: Final = 1024

#: An event, as who keeps it sees it.
Mark = Any


class Memory(NamedTuple):
    """Bytes of PyTorch's allocator, and how often it had to free its cache and try again."""

    allocated: int
    peak_allocated: int
    reserved: int
    retries: int


#: Not looked at.
NO_MEMORY: Final = Memory(-1, -1, -1, -1)


class Kept(NamedTuple):
    """A number on its way from the GPU."""

    values: torch.Tensor
    slot: int


class Device(Protocol):
    """What a step asks of the GPU."""

    def mark(self) -> Mark | None:
        """Record an event on the current stream; ``None`` while a CUDA graph is captured."""

    def mark_again(self, mark: Mark) -> None:
        """Record an event a second time; its first time is forgotten."""

    def reached(self, mark: Mark) -> bool:
        """Has the GPU come to it?"""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Between two events that were reached; raises ``RuntimeError`` where that is not known
        (events of two GPUs)."""

    def release(self, mark: Mark) -> None:
        """Nobody asks for this event any more."""

    def keep(self, number: torch.Tensor) -> Kept | None:
        """Have a tensor of one element copied to the host; ``None`` where there is no room."""

    def value(self, kept: Kept) -> float:
        """The number, after a mark behind it was reached; frees its room."""

    def memory(self) -> Memory:
        """Of the current device, now."""


class CudaDevice:
    """:class:`Device` by ``torch.cuda``, as it is when this is made."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event
        self._capturing = torch.cuda.is_current_stream_capturing
        self._unused: list[Any] = []
        self._numbers: dict[torch.dtype, tuple[torch.Tensor, list[int]]] = {}

    def mark(self) -> Mark | None:
        if self._capturing():
            return None
        event = self._unused.pop() if self._unused else self._event(enable_timing=True)
        event.record()
        return event

    def mark_again(self, mark: Mark) -> None:
        if not self._capturing():
            mark.record()

    def reached(self, mark: Mark) -> bool:
        return bool(mark.query())

    def seconds(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def release(self, mark: Mark) -> None:
        self._unused.append(mark)

    def keep(self, number: torch.Tensor) -> Kept | None:
        if self._capturing():
            return None
        if number.dtype not in self._numbers:
            pinned = torch.empty(_SLOTS, dtype=number.dtype, device="cpu", pin_memory=True)
            self._numbers[number.dtype] = pinned, list(range(_SLOTS))
        values, free = self._numbers[number.dtype]
        if not free:
            return None
        kept = Kept(values, free.pop())
        values[kept.slot].copy_(number.detach().reshape(()), non_blocking=True)
        return kept

    def value(self, kept: Kept) -> float:
        self._numbers[kept.values.dtype][1].append(kept.slot)
        return float(kept.values[kept.slot])

    def memory(self) -> Memory:
        stats = torch.cuda.memory.memory_stats_as_nested_dict()
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        retries = stats["num_alloc_retries"]
        return Memory(allocated["current"], allocated["peak"], reserved, retries)
