"""Scratch allocations of sorting, indexing, normalization and a few other kernels."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import allocates
from trainfit.simgpu.tensors.layouts import dense_copy
from trainfit.simgpu.tensors.tensor import SimulatedTensor
from trainfit.torch_private import operators as private

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


@allocates(aten.sort.default, aten.sort.stable)
def sort(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """args as aten::sort or aten::sort.stable (which has a flag before the dimension)."""
    spec = args[0]._spec
    given = [each for each in args[1:] if type(each) is int]
    dim = given[0] if given else -1
    length = spec.size[dim] if spec.size else 1
    itemsize = spec.dtype.itemsize
    requests = [("sort", (spec.numel, length, itemsize))]
    if length > 4096 and spec.stride[dim] != 1:
        requests.append(("sort_copies", (spec.numel, itemsize, 2)))
    engine.workspace(*requests)


@allocates(aten.embedding_dense_backward.default)
def embedding_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    grad, indices = args[0]._spec, args[1]._spec
    accumulator = 4 if grad.dtype in _HALVES else grad.dtype.itemsize
    shape = (indices.numel, args[2], grad.size[-1], indices.dtype.itemsize, accumulator)
    engine.workspace(*_contiguous(args[:1]), ("embedding_backward", shape))


@allocates(aten.index_put.default, aten.index_put_.default, private.index_put_impl_.default)
def index_put(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Accumulating (or deterministic) writes sort their indices; masks become indices."""
    target, indices, values = args[:3]
    accumulate = len(args) > 3 and args[3]
    masks = [
        ("index_tensors", (each._spec.numel * each.dim(),))
        for each in indices
        if type(each) is SimulatedTensor and each.dtype in (torch.bool, torch.uint8)
    ]
    if masks:
        if values._spec.numel == 1 and not accumulate:
            return  # masked_fill
        engine.workspace(*masks)
    if accumulate or torch.are_deterministic_algorithms_enabled():
        count = max((each.numel() for each in indices if each is not None), default=0)
        engine.workspace(("index_put", (count,)), *_contiguous((values, target)))


@allocates(aten.masked_scatter.default, aten.masked_scatter_.default)
def masked_scatter(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Running counts of the mask (masked_scatter_cuda_impl)."""
    engine.workspace(("index_tensors", (args[0]._spec.numel,)))


@allocates(aten.multinomial.default)
def multinomial(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Without replacement: exponential numbers like the weights; else sums of them, twice."""
    with_replacement = len(args) > 2 and args[2] and args[1] > 1
    engine.workspace(("temporary", (args[0]._spec.nbytes * (1 + bool(with_replacement)),)))


@allocates(private.foreach_norm.Scalar)
def foreach_norm(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    tensors = args[0]
    itemsize = max(tensors[0].dtype.itemsize, 4)
    longest = max(each.numel() for each in tensors)
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


@allocates(private.softmax_backward_data.default, private.log_softmax_backward_data.default)
def softmax_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    if not (args[0]._spec.contiguous and args[1]._spec.contiguous):
        engine.workspace(*_contiguous(args[:2]))


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
