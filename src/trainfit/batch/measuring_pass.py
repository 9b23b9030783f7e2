"""A forward and backward pass of two halves of a batch, which leaves no trace in the training."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainfit.batch.estimate import Weights, mean_against_all
from trainfit.batch.norms import Cost, Records

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
        if len(batch) == count and not any(isinstance(each, Tensor) for each in batch):
            return batch[begin:end]  # one text or label a sample
        parts = [_part(value, count, begin, end) for value in batch]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    return batch
