"""Operators of ``SyncBatchNorm``, which PyTorch has for GPUs alone: without shapes of their own.

Statistics are of the dtype that CUDA adds up in: float32 for half precisions.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def _statistics(given: torch.Tensor) -> torch.Tensor:
    """A value for each channel."""
    dtype = torch.float32 if given.dtype in _HALVES else given.dtype
    return given.new_empty(given.shape[1], dtype=dtype)


@handles(
    aten.batch_norm_stats.default,
    aten.batch_norm_gather_stats_with_counts.default,
    aten.batch_norm_update_stats.default,
)
def statistics(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Mean, and one over the standard deviation; or the running ones."""
    engine.record(engine.info(func))
    return _statistics(args[0]), _statistics(args[0])


@handles(aten.batch_norm_elemt.default)
def normalized(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of the forward pass."""
    engine.record(engine.info(func))
    return torch.empty_like(args[0])


@handles(aten.batch_norm_backward_reduce.default)
def sums(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Of gradients over each channel, and the gradients of weight and bias that are asked for."""
    engine.record(engine.info(func))
    _, given, _, _, weight, _, of_weight, of_bias = args
    wanted = [weight is not None and each for each in (of_weight, of_bias)]
    gradients = (torch.empty_like(weight) if each else None for each in wanted)
    return _statistics(given), _statistics(given), *gradients


@handles(aten.batch_norm_backward_elemt.default)
def input_gradient(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of the input."""
    engine.record(engine.info(func))
    return torch.empty_like(args[1])
