"""Counts the backward passes of an optimizer step, and calls back at the end of each.

At that moment `.grad` is what autograd left there: nobody has clipped or unscaled it yet. The hooks
are on the parameters, not on modules or the loss: they run whatever way a script goes, and change
no value.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainfit.batch.estimate import Weights, mean_against_all
from trainfit.batch.norms import Cost, Records
from trainfit.torch_private.autograd import graph_task_id, queue_callback
from trainfit.torch_private.operators import version

#: Frames of a backward pass inside a custom function's backward pass: reentrant checkpointing.
_CUSTOM: Final = frozenset(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)


class BackwardPasses:
    """Hooks on ``parameters``; ``count`` is the number of backward passes since the last step.

    Args:
        on_begin: called in a backward pass after its first gradient was accumulated.
        on_gradient: called with each parameter whose gradient was accumulated, while
            ``wants_gradients`` is set.
        on_end: called at the end of each backward pass, after DDP's reduction if it has one.
        on_step: called after a step of an optimizer that has one of the parameters.
        on_fault: called with a reason why passes cannot be counted.
        after_reduction: gradients are reduced by DDP at the end of a pass, and its buckets share
            version counters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        on_begin: Callable[[], None],
        on_gradient: Callable[[Tensor], None],
        on_end: Callable[[], None],
        on_step: Callable[[], None],
        on_fault: Callable[[str], None],
        after_reduction: bool = False,
    ) -> None:
        self.count = 0
        #: Off, the hooks return at once; to remove them amid a step would break who iterates over
        #: them.
        self.is_on = True
        self.wants_gradients = False
        #: Were the gradients of the last step still there when this step's first pass ended?
        self.is_added_to_last = False
        self._begin, self._gradient, self._end = on_begin, on_gradient, on_end
        self._step, self._fault = on_step, on_fault
        self._after_reduction = after_reduction
        self._task: int | None = None
        self._has_stepped = True
        self._first: Tensor | None = None
        self._versions: dict[int, int] = {}
        self._ids = {id(parameter) for parameter in parameters}
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
        ]
        self._handles.append(_on_steps(self))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        if not self.is_on:
            return
        if graph_task_id() != self._task:
            self._new_pass(parameter)
        if self.wants_gradients:
            self._guarded(lambda: self._gradient(parameter))

    def _new_pass(self, parameter: Tensor) -> None:
        self._task = graph_task_id()
        self._first = parameter
        if _is_nested(sys._getframe(1)):
            self._fault(
                "reentrant checkpointing splits a backward pass; use "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
            return
        queue_callback(self._ended)
        self._guarded(self._begin)

    def _ended(self) -> None:
        if self._after_reduction:
            # DDP has queued its own end of a pass by now, which waits for the reduction.
            queue_callback(self._finished)
        else:
            self._finished()

    def _finished(self) -> None:
        self._task = None
        self._guarded(self._counted)

    def _counted(self) -> None:
        parameter = self._first
        self._first = None
        if parameter is None or parameter.grad is None:
            self._fault("gradients are gone at the end of a backward pass (freed in a hook)")
            return
        is_new = self._has_stepped or self._is_zeroed(parameter)
        self.is_added_to_last = (
            self._has_stepped and not self._after_reduction and self._continues(parameter)
        )
        self.count = 1 if is_new else self.count + 1
        self._has_stepped = False
        if is_new:
            self._versions.clear()
        self._versions[id(parameter)] = version(parameter.grad)
        self._end()

    def _is_zeroed(self, parameter: Tensor) -> bool:
        """Is the gradient a new tensor? Accumulation in place only raises its version.

        So a step that a GradScaler skipped is told from one more micro-batch.
        """
        last = self._versions.get(id(parameter))
        assert parameter.grad is not None
        return not self._after_reduction and last is not None and version(parameter.grad) <= last

    def _continues(self, parameter: Tensor) -> bool:
        last = self._versions.get(id(parameter))
        assert parameter.grad is not None
        return last is not None and version(parameter.grad) == last + 1

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped; those of other models do not count."""
        group = optimizer.param_groups[0]["params"] if optimizer.param_groups else ()
        if self.is_on and any(id(parameter) in self._ids for parameter in group):
            self._guarded(self._step)
            self._has_stepped = True
            self.count = 0

    def _guarded(self, call: Callable[[], None]) -> None:
        """A measurement never ends a training."""
        try:
            call()
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}")


def _on_steps(passes: BackwardPasses) -> Any:
    """The hook of all optimizers; it does not keep ``passes`` alive."""
    known = weakref.ref(passes)

    def after(optimizer: Optimizer, *_: Any) -> None:
        found = known()
        if found is not None:
            found.stepped(optimizer)

    return register_optimizer_step_post_hook(after)


def _is_nested(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _CUSTOM:
            return True
        frame = frame.f_back
    return False


# ---
# A forward and backward pass of two halves of a batch, which leaves no trace in the training.


#: Share of the run's time that passes may cost, and calls between two before their time is known: a
#: pass costs about as much as a step.
_ALLOWED: Final = 0.02
_INTERVAL: Final = 50
_PARTS: Final = 2


class MeasuringPass:
    """Squared norms of the gradients of a batch's halves, every N-th time that it is asked."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        groups: Sequence[int],
        cost: Cost,
    ) -> None:
        self.fault = ""
        self._model, self._parameters, self._groups = model, list(parameters), list(groups)
        self._cost = cost
        self._calls = 0
        self._interval = _INTERVAL
        self._last_call: float | None = None

    def squares(
        self,
        loss_of: Callable[[Any], Tensor],
        batch: Any,
        records: Records,
        every: int | None,
    ) -> tuple[Tensor, Tensor, Weights] | None:
        """The mean of the halves' squares and that of the sum; ``None``: not this time.

        :attr:`fault` says what a pass failed with; none is made from then on.
        """
        now = time.perf_counter()
        between = now - self._last_call if self._last_call is not None else None
        self._last_call = now
        self._calls += 1
        if self.fault or (self._calls - 1) % (every or self._interval):
            return None
        try:
            found = self._measured(loss_of, batch, records)
        except Exception as error:  # out of memory, too: the training goes on
            self.fault = f"the measuring pass failed: {type(error).__name__}: {error}"
            return None
        took = time.perf_counter() - now
        if between is not None and between > 0 and self._calls > 2:
            self._interval = max(1, math.ceil(took / (_ALLOWED * between)))
        self._last_call = time.perf_counter()
        return found

    def _measured(
        self, loss_of: Callable[[Any], Tensor], batch: Any, records: Records
    ) -> tuple[Tensor, Tensor, Weights] | None:
        count = _samples(batch)
        if count is None or count < _PARTS:
            self.fault = f"a batch of {count or 0} samples cannot be split in two"
            return None
        half = count // 2
        whole: list[Tensor | None] = [None] * len(self._parameters)
        small: Tensor | None = None
        with self._cost.measured(), untouched(self._model):
            for begin, end in ((0, half), (half, count)):
                loss = loss_of(_part(batch, count, begin, end))
                grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
                del loss
                squares = self._squares(grads, records)
                small = squares if small is None else small + squares
                whole = [_added(total, grad) for total, grad in zip(whole, grads, strict=True)]
        assert small is not None
        return small / _PARTS, self._squares(whole, records), mean_against_all((half, count - half))

    def _squares(self, grads: Sequence[Tensor | None], records: Records) -> Tensor:
        kept = [
            (grad, group)
            for grad, group in zip(grads, self._groups, strict=True)
            if grad is not None and grad.layout is torch.strided
        ]
        with torch.no_grad():
            return records.squares([grad for grad, _ in kept], [group for _, group in kept])


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None or grad.layout is not torch.strided:
        return total
    return grad if total is None else total.add_(grad)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Random states and buffers are afterwards what they were; gradients are enabled within."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, former in buffers:
                buffer.copy_(former)
        random.setstate(python)
        np.random.set_state(numpy)


def _samples(batch: Any) -> int | None:
    """Length of the first tensor's first dimension."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((n for n in map(_samples, batch) if n is not None), None)
    return None


def _part(batch: Any, count: int, begin: int, end: int) -> Any:
    """The samples from ``begin`` to ``end``; what has no dimension of ``count`` samples stays."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() and batch.shape[0] == count else batch
    if isinstance(batch, dict):
        made = {key: _part(value, count, begin, end) for key, value in batch.items()}
        return made if type(batch) is dict else type(batch)(made)
    if isinstance(batch, list | tuple):
        if len(batch) == count and not any(isinstance(tensor, Tensor) for tensor in batch):
            return batch[begin:end]  # one text or label a sample
        parts = [_part(value, count, begin, end) for value in batch]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    return batch
