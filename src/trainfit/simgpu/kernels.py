"""What CUDA's kernels allocate besides their results, operator by operator."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.engine import Engine, allocates
from trainfit.simgpu.tensor import SimulatedTensor

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


@allocates(
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.mv.default,
    aten.dot.default,
    aten._addmm_activation.default,
)
def matrix_product(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """cuBLAS takes its workspace at the first product on a stream."""
    engine.library_workspace("cublas_handle", (engine.gpu.capability[0],))


@allocates(aten.convolution.default)
def convolution(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Forward convolution; args as aten::convolution, ``out`` the result."""
    source, weight = args[0], args[1]
    stride, dilation, transposed, groups = args[3], args[5], args[6], args[8]
    if is_depthwise(source, weight, groups, transposed):
        return
    requests = _layout_copies((source, weight), out)
    requests += _algorithm(engine, source, weight, out, stride, dilation, transposed, groups)
    engine.workspace(*requests)


@allocates(aten.convolution_backward.default)
def convolution_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Gradients of a convolution: cuDNN runs data and weight gradient one after another."""
    grad, source, weight = args[0], args[1], args[2]
    stride, dilation, transposed, groups = args[4], args[6], args[7], args[9]
    if is_depthwise(source, weight, groups, transposed):
        return
    requests = _layout_copies((grad, source, weight), source)
    requests += _algorithm(engine, source, weight, grad, stride, dilation, transposed, groups)
    for _wanted in filter(None, args[10][:2]):
        engine.workspace(*requests)


def _algorithm(
    engine: Engine,
    source: Any,
    weight: Any,
    result: Any,
    stride: Any,
    dilation: Any,
    transposed: bool,
    groups: int,
) -> list[tuple[str, tuple[int, ...]]]:
    """Workspace of the algorithm that cuDNN's heuristics take for this convolution.

    The operands may stand for a gradient's: the three algorithms (forward, data, weight)
    transform the same three tensors.
    """
    if groups > 1 or _channels_last(source) or _channels_last(weight):
        return []
    spec = source._spec
    if len(spec.size) != 4:
        return []
    if spec.dtype is torch.float32 and not transposed and _is_winograd(weight, stride, dilation):
        samples, outputs, height, width = result._spec.size
        shape = (samples, spec.size[1], outputs, height, width, spec.dtype.itemsize)
        return [("cudnn_winograd", shape)]
    if _uses_tensor_cores(engine, spec.dtype):
        return [("cudnn_layout", (spec.nbytes, result._spec.nbytes, weight._spec.nbytes))]
    return []


def _is_winograd(weight: Any, stride: Any, dilation: Any) -> bool:
    return (
        tuple(weight._spec.size[2:]) == (3, 3)
        and all(each == 1 for each in stride)
        and all(each == 1 for each in dilation)
    )


def _uses_tensor_cores(engine: Engine, dtype: torch.dtype) -> bool:
    """Are there tensor-core convolutions (which want NHWC) for this precision?"""
    if dtype in _HALVES:
        return engine.gpu.capability[0] >= 7
    ampere = engine.gpu.capability[0] >= 8
    return dtype is torch.float32 and ampere and torch.backends.cudnn.allow_tf32


def is_depthwise(source: Any, weight: Any, groups: int, transposed: bool) -> bool:
    """PyTorch's own depthwise kernels, which need no workspace (Convolution.cpp)."""
    channels = source._spec.size[1]
    return (
        not transposed
        and groups == channels
        and groups > 1
        and weight._spec.size[0] % channels == 0
    )


def _channels_last(tensor: Any) -> bool:
    """Is the layout NHWC and not NCHW at the same time?"""
    spec = tensor._spec
    if len(spec.size) != 4:
        return False
    _, channels, height, width = spec.size
    return bool(spec.stride[1] == 1 and channels > 1 and height * width > 1)


def _layout_copies(tensors: tuple[Any, ...], like: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Operands that cuDNN's caller makes contiguous in the result's memory format."""
    wanted = torch.channels_last if _channels_last(like) else torch.contiguous_format
    return [
        ("contiguous_copy", (tensor._spec.nbytes,))
        for tensor in tensors
        if type(tensor) is SimulatedTensor
        and tensor.dim() == 4
        and not tensor._meta.is_contiguous(memory_format=wanted)
    ]


@allocates(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    batch, heads, queries, head_size = args[1]._spec.size
    engine.workspace(("flash_backward", (batch, heads, queries, head_size)))


@allocates(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key, value = args[1], args[2], args[3]
    batch, heads, queries, head_size = query._spec.size
    half = int(query._spec.dtype in _HALVES)
    shape = (batch, heads, queries, key._spec.size[2], head_size, value._spec.size[3], half)
    engine.workspace(("efficient_backward", shape))
