"""The GPU's side of a step: CUDA events, and numbers that are read once they are there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch

from trainfit.hooks.values import steep_in
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import nodes_of
from trainfit.torch_private.operators import item
from trainfit.watch.recorder.job import script_place
from trainfit.watch.recorder.looks.not_finite import Origins
from trainfit.watch.recorder.phases import BACKWARD, COPY, FORWARD, OPTIMIZER

# ---
# The GPU's side of a step: CUDA events and single numbers that are read when they are there.
#
# Nothing here waits for the GPU. An event is asked whether it was reached; numbers (the loss, a
# gradient's norm) are copied into pinned memory by the stream itself and read after an event that
# was recorded behind the copy.


#: Numbers of one type that may be on their way.
_SLOTS: Final = 1024

#: An event, as who keeps it sees it.
Mark = Any


class AllocatorMemory(NamedTuple):
    """Bytes of PyTorch's allocator, and how often it had to free its cache and try again."""

    allocated: int
    peak_allocated: int
    reserved: int
    retries: int


#: Not looked at.
NO_MEMORY: Final = AllocatorMemory(-1, -1, -1, -1)


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
        """Seconds between two events that were reached; raises ``RuntimeError`` where that is not
        known (events of two GPUs)."""

    def release(self, mark: Mark) -> None:
        """Nobody asks for this event any more."""

    def keep(self, number: torch.Tensor) -> Kept | None:
        """Have a tensor of one element copied to the host; ``None`` where there is no room."""

    def value(self, kept: Kept) -> float:
        """The number, after a mark behind it was reached; frees its room."""

    def memory(self) -> AllocatorMemory:
        """The memory of the current device, now."""


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

    def memory(self) -> AllocatorMemory:
        stats = torch.cuda.memory.memory_stats_as_nested_dict()
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        retries = stats["num_alloc_retries"]
        return AllocatorMemory(allocated["current"], allocated["peak"], reserved, retries)


#: Phases that have events, and their columns.
PHASE_COLUMNS: Final = {
    COPY: "gpu_copy_s",
    FORWARD: "gpu_forward_s",
    BACKWARD: "gpu_backward_s",
    OPTIMIZER: "gpu_optimizer_s",
}
#: Spans of a step at most: one of thousands of micro-batches is not followed to its end.
_MOST_SPANS: Final = 512


class GpuStep:
    """Spans of the phases on the current stream, from the ``before`` that ended the last step.

    ``numbers`` are the loss and the like, by name, on their way to the host.
    """

    def __init__(self, device: Device, before: Mark | None) -> None:
        self._device = device
        self._before = before
        self._spans: list[tuple[int, Mark, Mark]] = []
        self._open: tuple[int, Mark] | None = None
        self._overflow = False
        self._is_last = False
        self.first: Mark | None = None
        self.end: Mark | None = None
        self.numbers: dict[str, Kept] = {}

    def begin(self, phase: int) -> None:
        """A phase begins; two copies with nothing between are one."""
        if phase not in PHASE_COLUMNS or self._open is not None:
            return
        if len(self._spans) >= _MOST_SPANS:
            self._overflow = True
            return
        if phase == COPY and self._spans and self._spans[-1][0] == COPY:
            self._open = COPY, self._spans[-1][1]
            return
        mark = self._device.mark()
        if mark is not None:
            self.first = self.first or mark
            self._open = phase, mark

    def finish(self, phase: int) -> None:
        """A phase ends."""
        if self._open is None or self._open[0] != phase:
            return
        _, first = self._open
        self._open = None
        if phase == COPY and self._spans and self._spans[-1][1] is first:
            self._device.mark_again(self._spans[-1][2])
        elif (last := self._device.mark()) is not None:
            self._spans.append((phase, first, last))

    @property
    def spans(self) -> int:
        """Spans that are complete."""
        return len(self._spans)

    def forget(self, spans: int) -> None:
        """All spans but the first ``spans`` were an evaluation's."""
        for _, first, last in self._spans[spans:]:
            if first is not self._before:
                self._device.release(first)
            self._device.release(last)
        del self._spans[spans:]
        if not spans and self._open is None:
            self.first = None

    def close(self) -> GpuStep:
        """The step is over: a last event, which the next step (returned) begins with; a phase
        that is open goes on in that."""
        self.end = self._device.mark()
        following = GpuStep(self._device, self.end)
        if self._open is not None and self.end is not None:
            phase, first = self._open
            self._spans.append((phase, first, self.end))
            following._open = phase, self.end
            following.first = self.end
        self._open = None
        return following

    def close_alone(self) -> None:
        """The step is over, where no phase is open and the next step has no events."""
        self.end = self._device.mark()
        self._is_last = True

    @property
    def reached(self) -> bool:
        """Is the GPU done with the step? Also where there is nothing to wait for."""
        return self.end is None or self._device.reached(self.end)

    def seconds(self) -> dict[str, float]:
        """Columns of the step's row by name; NaN where the events do not tell."""
        names = ("gpu_s", "gpu_gap_s", *PHASE_COLUMNS.values())
        unknown = dict.fromkeys(names, math.nan)
        if self.first is None or self.end is None:
            return unknown
        try:
            found = dict.fromkeys(PHASE_COLUMNS.values(), math.nan if self._overflow else 0.0)
            for phase, first, last in self._spans:
                found[PHASE_COLUMNS[phase]] += self._device.seconds(first, last)
            found["gpu_s"] = self._device.seconds(self.first, self.end)
            gap = math.nan
            if self._before is not None:
                gap = max(0.0, self._device.seconds(self._before, self.first))
            return {**found, "gpu_gap_s": gap}
        except RuntimeError:  # events of two GPUs, or of a stream that is not done
            return unknown

    def values(self) -> dict[str, float]:
        """The numbers; only once the step was :attr:`reached`."""
        return {name: self._device.value(kept) for name, kept in self.numbers.items()}

    def release(self) -> None:
        """Let the events be used again; the last one is the next step's to release, if it has
        any."""
        marks: dict[int, Any] = {id(self._before): self._before, id(self.first): self.first}
        for _, first, last in self._spans:
            marks[id(first)], marks[id(last)] = first, last
        marks.pop(id(self.end), None)
        if self._is_last:
            marks[id(self.end)] = self.end
        for mark in marks.values():
            if mark is not None:
                self._device.release(mark)


# ---
# The numbers of a step: its loss, its loss scale and its gradient's norm.


#: Losses that were finite, from which it is known whether they grew, and how many times: those of
#: batches differ, and of a step that is too large they become many times as large.
_LEAST_LOSSES: Final = 3
_GREW: Final = 2.0


class StepNumbers:
    """What is on a GPU comes with the step's row, without waiting for it."""

    __slots__ = (
        *("_finite", "_first", "_is_bad", "_last", "_origins"),
        *("loss", "loss_at", "loss_is_scaled", "made_by", "norm", "scale", "suspect"),
    )

    def __init__(self) -> None:
        self.loss_at = ""
        """The line of the first backward pass, or of the first from a loss that is not finite."""
        self.made_by: Misuse | None = None
        """The line that made that loss not finite, where it is known."""
        self.suspect: Callable[[], Misuse | None] = lambda: None
        """Asked once, of the first such loss: the sample that may have made it so."""
        self._origins = Origins()
        self._is_bad = False
        self._first = self._last = math.nan
        self._finite = 0
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.loss: float | None = None
        self.scale = self.norm = math.nan
        self.loss_is_scaled = False

    def note_loss(self, roots: Any, device: Device | None, gpu: GpuStep | None) -> None:
        """Note the loss of a backward pass from ``roots``. A loss that is not finite stays,
        whatever follows."""
        root = roots if isinstance(roots, torch.Tensor) else next(iter(roots), None)
        if root is None or root.numel() != 1 or root.is_complex():
            return
        value = number("loss", root, device, gpu)
        if value is not None and (self.loss is None or math.isfinite(self.loss)):
            self.loss = value
        is_bad = value is not None and not math.isfinite(value)
        if is_bad and not self._is_bad:
            sample = self.suspect()
            self.made_by = sample or self._origins.made_by() or self._by_slope(root)
        elif value is not None and not self.loss_at:
            self._origins.healthy()
        if not self.loss_at or (is_bad and not self._is_bad):
            self.loss_at, self._is_bad = script_place(), is_bad
        if value is not None and not is_bad:
            self._first, self._last = (value if not self._finite else self._first), value
            self._finite += 1

    def _by_slope(self, root: torch.Tensor) -> Misuse | None:
        """What made weights not finite after losses that were, and did not grow: no step was too
        large, a gradient was infinite."""
        if not self._origins.of_weights or self._finite < _LEAST_LOSSES:
            return None
        if self._last > self._first + (_GREW - 1) * abs(self._first):
            return None
        with contextlib.suppress(Exception):  # a graph may be of any kind
            steep = steep_in(nodes_of(root.grad_fn) or (), script_place())
            return steep or self._origins.may_be_made_by() or self._origins.held()
        return None


def number(
    name: str, tensor: torch.Tensor, device: Device | None, gpu: GpuStep | None
) -> float | None:
    """The value of a tensor of one element: now, or with the step's row if it is on a GPU."""
    if not tensor.is_cuda:
        return float(item(tensor)) if tensor.device.type == "cpu" else None
    if device is not None and gpu is not None:
        before = gpu.numbers.pop(name, None)
        kept = device.keep(tensor)
        if kept is not None:
            gpu.numbers[name] = kept
        if before is not None:
            device.value(before)  # frees its room; its copy is over before the new one
    return None
