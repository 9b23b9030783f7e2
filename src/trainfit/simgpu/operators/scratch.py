"""Memory that kernels allocate besides results, and what libraries allocate at first use."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.results.gpus import Library
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import dense_copy
from trainfit.simgpu.device.registry import LIBRARY_OF, allocates, makes
from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.simgpu.operators.convolution import native_depthwise
from trainfit.torch_private import operators as private

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


@allocates(aten.sort.default, aten.sort.stable)
def sort(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """args as aten::sort or aten::sort.stable (which has a flag before the dimension)."""
    spec = args[0]._spec
    given = [argument for argument in args[1:] if type(argument) is int]
    dim = given[0] if given else -1
    length = spec.size[dim] if spec.size else 1
    itemsize = spec.dtype.itemsize
    requests = [("sort", (spec.numel, length, itemsize))]
    if length > 4096 and spec.stride[dim] != 1:
        requests.append(("sort_copies", (spec.numel, itemsize, 2)))
    engine.workspace(*requests)


@makes(aten.embedding_dense_backward.default)
def embedding_backward(engine: Engine, result: Any, args: tuple[Any, ...]) -> Any:
    """Indices are sorted before the result is made, and segments of them summed after."""
    grad, indices = args[0]._spec, args[1]._spec
    count, size = indices.numel, indices.dtype.itemsize
    accumulator = 4 if grad.dtype in _HALVES else grad.dtype.itemsize
    engine.workspace(("embedding_sort", (count, size)))
    made = engine.materialize(result)
    engine.workspace(
        *_contiguous(args[:1]),
        ("embedding_segments", (count, args[2], size)),
        ("embedding_backward", (count, args[2], grad.size[-1], size, accumulator)),
    )
    return made


@allocates(aten.index_put.default, aten.index_put_.default, private.index_put_impl_.default)
def index_put(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Accumulating (or deterministic) writes sort their indices; masks become indices."""
    target, indices, values = args[:3]
    accumulate = len(args) > 3 and args[3]
    masks = [
        ("index_tensors", (index._spec.numel * index.dim(),))
        for index in indices
        if type(index) is SimulatedTensor and index.dtype in (torch.bool, torch.uint8)
    ]
    if masks:
        if values._spec.numel == 1 and not accumulate:
            return  # masked_fill
        engine.workspace(*masks)
    if accumulate or torch.are_deterministic_algorithms_enabled():
        count = max((index.numel() for index in indices if index is not None), default=0)
        engine.workspace(("index_put", (count,)), *_contiguous((values, target)))


@allocates(aten.masked_scatter.default, aten.masked_scatter_.default)
def masked_scatter(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Running counts of the mask (masked_scatter_cuda_impl)."""
    engine.workspace(("index_tensors", (args[0]._spec.numel,)))


@allocates(aten.multinomial.default)
def multinomial(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Allocate scratch memory: without replacement exponential numbers like the weights, else sums
    of them, twice."""
    with_replacement = len(args) > 2 and args[2] and args[1] > 1
    engine.workspace(("temporary", (args[0]._spec.nbytes * (1 + bool(with_replacement)),)))


@allocates(private.foreach_norm.Scalar)
def foreach_norm(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    tensors = args[0]
    itemsize = max(tensors[0].dtype.itemsize, 4)
    longest = max(tensor.numel() for tensor in tensors)
    engine.workspace(("foreach_norm", (len(tensors), longest, itemsize)))


@allocates(
    private.softmax.default,
    private.log_softmax.default,
    aten.native_layer_norm.default,
)
def of_contiguous(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Kernels that first make their operand contiguous."""
    if not args[0]._spec.contiguous:
        engine.workspace(*_contiguous(args[:1]))


@allocates(private.log_softmax_backward_data.default)
def log_softmax_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    if not (args[0]._spec.contiguous and args[1]._spec.contiguous):
        engine.workspace(*_contiguous(args[:2]))


@allocates(private.softmax_backward_data.default)
def softmax_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """``grad * output`` is a tensor (softmax_backward_cuda_out in ATen/native/cuda/SoftMax.cu)."""
    engine.workspace(("temporary", (args[0]._spec.nbytes,)), *_contiguous(args[1:2]))


@allocates(aten.native_layer_norm_backward.default)
def layer_norm_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    source = args[1]._spec
    width = math.prod(args[2])
    rows = source.numel // max(width, 1)
    shape = (rows, width, source.dtype.itemsize, engine.gpu.sm_count)
    engine.workspace(*_contiguous(args[:2]), ("layer_norm_backward", shape))


@allocates(private.fft_r2c.default, private.fft_c2c.default)
def fourier(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    engine.workspace(("cufft", (out._spec.nbytes,)))


@allocates(private.fft_c2r.default)
def fourier_to_real(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """cuFFT overwrites the input of this transform, so it gets a copy."""
    nbytes = args[0]._spec.nbytes
    engine.workspace(("contiguous_copy", (nbytes,)), ("cufft", (nbytes,)))


def _contiguous(tensors: tuple[Any, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [
        dense_copy(tensor)
        for tensor in tensors
        if type(tensor) is SimulatedTensor and not tensor._spec.contiguous
    ]


# ---
# Scratch allocations of the attention kernels, operator by operator.


#: Compute capabilities whose shared memory holds the kernels with 128 x 128 blocks.
_WIDE = ((8, 0), (8, 7))


@allocates(private.scaled_dot_product_flash_attention.default)
def flash_forward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key = args[0]._spec, args[1]._spec
    if len(args) > 3 and args[3]:
        return  # with dropout the keys are never split
    batch, heads, queries, head_size = query.size
    shape = (batch, heads, queries, key.size[2], head_size, engine.gpu.sm_count)
    engine.workspace(("flash_splits", shape))


@allocates(private.scaled_dot_product_flash_attention_backward.default)
def flash_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key = args[1]._spec, args[2]._spec
    batch, heads, queries, head_size = query.size
    processors = engine.gpu.sm_count if torch.are_deterministic_algorithms_enabled() else 0
    others = (key.size[2], key.size[1], query.dtype.itemsize, processors)
    engine.workspace(("flash_backward", (batch, heads, queries, head_size, *others)))


@allocates(private.flash_attention_forward.default)
def packed_forward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Keys of sequences one after the other are not split."""
    query, key = args[0]._spec, args[1]._spec
    if len(query.size) == 4 and not args[7]:
        batch, queries, heads, head_size = query.size
        shape = (batch, heads, queries, key.size[1], head_size, engine.gpu.sm_count)
        engine.workspace(("flash_splits", shape))


@allocates(private.flash_attention_backward.default)
def packed_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Sequences one after the other have 128 rows more each (mha_varlen_bwd)."""
    query, key = args[1]._spec, args[2]._spec
    processors = engine.gpu.sm_count if torch.are_deterministic_algorithms_enabled() else 0
    if len(query.size) == 4:
        batch, queries, heads, head_size = query.size
        keys = key.size[1]
    else:
        total, heads, head_size = query.size
        batch, keys = 1, key.size[0]
        queries = total + 128 * max(1, args[6]._spec.numel - 1)
    others = (keys, key.size[-2], query.dtype.itemsize, processors)
    engine.workspace(("flash_backward", (batch, heads, queries, head_size, *others)))


@allocates(private.scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    engine.workspace(("cudnn_attention_backward", args[1]._spec.size))


@makes(aten.native_dropout.default)
def dropout(engine: Engine, result: Any, args: tuple[Any, ...]) -> Any:
    """The mask is made before the result (ATen/native/cuda/Dropout.cu)."""
    value, mask = result.items
    made = engine.materialize(mask)
    return result.kind([engine.materialize(value), made])


@allocates(private.scaled_dot_product_efficient_attention.default)
def efficient_forward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, value = args[0]._spec, args[2]._spec
    if query.dtype in _HALVES and value.size[3] > 128:
        batch, heads, queries, _ = query.size
        engine.workspace(("efficient_forward", (batch, heads, queries, value.size[3])))


@allocates(private.scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key, value = (argument._spec for argument in args[1:4])
    batch, heads, queries, head_size = query.size
    capability = engine.gpu.capability
    widest = 128 if capability in _WIDE or capability[0] in (9, 10) else 64
    half = query.dtype in _HALVES
    products = 0
    if not half:
        products = 1
    elif capability == (7, 0) and max(head_size, value.size[3]) > widest:
        products = 3
    if products:
        engine.workspace(("efficient_delta", (batch, heads, queries, value.size[3], products)))
    shape = (batch, heads, queries, key.size[2], head_size, value.size[3], int(half), widest)
    engine.workspace(("efficient_backward", shape))


# ---
# The library of an operator's kernel: a library allocates device memory at its first use.
#
# Only who pays is decided here; how much is a matter of the GPU's ``DeviceConstants``.


_PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("addr", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("linalg_solve_triangular", "triangular_solve", "linalg_lu_factor_ex", "linalg_lu_solve"),
)
_CUDNN_FORWARD = ("cudnn_batch_norm", "_cudnn_rnn", "_cudnn_ctc_loss", "cudnn_convolution")
_CUDNN_BACKWARD = ("cudnn_batch_norm_backward", "_cudnn_rnn_backward")
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
#: cuDNN's attention is cuDNN's and no kernel of PyTorch's own.
_CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"


def _cublas(engine: Engine, args: tuple[Any, ...]) -> Library:
    """PyTorch keeps a handle for each thread; gradients are computed in one of their own."""
    return "cublas_backward" if engine.in_backward() else "cublas"


def _cudnn_forward(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "cudnn_forward"


def _cudnn_backward(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "cudnn_backward"


def _sdpa(engine: Engine, args: tuple[Any, ...]) -> Library:
    return "sdpa"


def _convolution(engine: Engine, args: tuple[Any, ...]) -> Library | None:
    """aten::convolution: cuDNN, or PyTorch's own depthwise kernels, or matmuls."""
    if native_depthwise(args[0], args[1], *args[3:9]):
        return None
    return "cudnn_forward" if torch.backends.cudnn.enabled else _cublas(engine, args)


def _convolution_backward(engine: Engine, args: tuple[Any, ...]) -> Library | None:
    if native_depthwise(args[1], args[2], *args[4:10]):
        return None
    return "cudnn_backward" if torch.backends.cudnn.enabled else _cublas(engine, args)


LIBRARY_OF.update(
    {
        **dict.fromkeys(_PRODUCTS, _cublas),
        **dict.fromkeys((*_CUDNN_FORWARD, _CUDNN_ATTENTION), _cudnn_forward),
        **dict.fromkeys((*_CUDNN_BACKWARD, f"{_CUDNN_ATTENTION}_backward"), _cudnn_backward),
        **dict.fromkeys(_FUSED_ATTENTION, _sdpa),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
    }
)
