"""Batch normalization by cuDNN, which requires tensors that are dense in their memory format."""

from __future__ import annotations

from typing import Any, Final

import torch

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import allocates
from trainfit.simgpu.tensors.layouts import dense_copy
from trainfit.simgpu.tensors.tensor import SimulatedTensor
from trainfit.torch_private.tensors import suggest_memory_format

aten = torch.ops.aten

_INDEXED: Final = (1 << 31) - 1
#: Images that cuDNN takes at once, in training and in evaluation.
_MOST_TRAINED, _MOST_EVALUATED = 880801, 65535


def by_cudnn(source: torch.Tensor, weight: torch.Tensor | None, training: bool) -> bool:
    """Is this batch normalization cuDNN's? Otherwise PyTorch's kernels take any strides.

    _select_batch_norm_backend in ATen/native/Normalization.cpp, of layers that have a bias where
    they have a weight.
    """
    if weight is None or not torch.backends.cudnn.enabled or source.dim() < 3:
        return False
    if torch.bfloat16 in (source.dtype, weight.dtype):
        return False
    if source.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    most = _MOST_TRAINED if training else _MOST_EVALUATED
    return source.shape[0] <= most and source.numel() < _INDEXED


def in_its_format(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is dense."""
    return tensor.contiguous(memory_format=suggest_memory_format(tensor))


@allocates(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """args as aten::native_batch_norm_backward, which a build without cuDNN has in its place."""
    gradient, source, weight, training = args[0], args[1], args[2], args[7]
    if training and by_cudnn(source, weight, training):
        _copied(engine, gradient, source)


@allocates(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    _copied(engine, args[1], args[0])


def _copied(engine: Engine, gradient: Any, source: Any) -> None:
    """The gradient is made dense in the input's format (ATen/native/cudnn/BatchNorm.cpp)."""
    if type(gradient) is not SimulatedTensor:
        return
    wanted = suggest_memory_format(source)
    if not gradient._meta.is_contiguous(memory_format=wanted):
        engine.workspace(dense_copy(gradient, wanted))
