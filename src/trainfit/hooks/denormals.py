"""Numbers next to zero that a CPU computes with slowly: denormal float32 of weights, gradients and
an optimizer's averages.

They are below 1.18e-38 and have no leading one; x86 cores compute with them in microcode, some 100
cycles an operation. Weights and averages that decay for long become such, and gradients of a loss
that is next to nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from trainfit.hooks.owners import tensors_of

#: Tensors of each kind that are looked at, and numbers of each: some 50 µs in all.
_TENSORS: Final = 3
_NUMBERS: Final = 256
_SMALLEST: Final = float(np.finfo(np.float32).tiny)
#: An average that an optimizer keeps of each parameter.
_AVERAGES: Final = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def denormals(optimizer: Any) -> dict[str, float]:
    """By "weights", "gradients" and "averages" of an optimizer on the CPU: of a sample of their
    numbers, the share that is denormal. Where the core counts them as 0 there are none."""
    found: dict[str, float] = {}
    with contextlib.suppress(Exception):  # a tensor of another kind is not looked at
        for kind, tensors in _kinds(optimizer):
            shares = [share for each in tensors if (share := _share(each)) is not None]
            if shares:
                found[kind] = max(shares)
    return found


def _kinds(optimizer: Any) -> Iterator[tuple[str, list[Any]]]:
    weights = _some(tensors_of(optimizer))
    yield "weights", weights
    yield "gradients", [each.grad for each in weights]
    states = [optimizer.state.get(each, {}) for each in weights]
    yield "averages", [state.get(name) for state in states for name in _AVERAGES]


def _some(tensors: Sequence[Any]) -> list[Any]:
    """The largest, in which most of the time goes."""
    return sorted(tensors, key=lambda each: -each.numel())[:_TENSORS]


def _share(tensor: Any) -> float | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tensor.is_sparse:
        return None
    if not tensor.is_contiguous() or tensor.numel() < _NUMBERS:
        return None
    values = tensor.detach().numpy().reshape(-1)
    # A step that is no power of two, so that not all are of one column.
    sample = np.abs(values[:: max(1, values.size // _NUMBERS) | 1])
    return float(np.mean((sample > 0) & (sample < _SMALLEST)))
