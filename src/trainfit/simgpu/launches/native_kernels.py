"""Kernels of PyTorch's own that take more than one pass, or a side: copies, resampling, norms."""

from __future__ import annotations

import math
from typing import Any

from trainfit.simgpu.launches.by_operands import pointwise
from trainfit.simgpu.launches.lower_bound import tensors_in
from trainfit.simgpu.launches.rules import (
    Arguments,
    Kernel,
    Rule,
    bytes_of,
    dtype_of,
    launched_by,
    stored_bytes,
)
from trainfit.simgpu.tensors.layouts import innermost
from trainfit.simgpu.tensors.tensor import SimulatedTensor

# --- Resampling ---------------------------------------------------------------------------------


def _upsampled(knows_last: bool) -> Rule:
    """A thread for each place, which goes through images and channels one after the other;
    ``knows_last``: channels-last tensors have a kernel with a thread for each element
    (ATen/native/cuda/UpSampleBilinear2d.cu, UpSampleBicubic2d.cu)."""

    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        source = call["self"]
        images, channels, *places = result._spec.size
        serial = not (knows_last and innermost(source._spec) == -3)
        rows, depth = (math.prod(places), images * channels) if serial else (0, 0)
        read, written = bytes_of([source]), bytes_of([result])
        return [Kernel("resampling", dtype_of(result), flops, read, written, rows, 0, depth)]

    return rule


launched_by("upsample_bilinear2d")(_upsampled(knows_last=True))
launched_by("upsample_bicubic2d")(_upsampled(knows_last=False))


# --- Between host and device --------------------------------------------------------------------


@launched_by("_to_copy", "copy_")
def _copy(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """``copy_(self, src)`` writes to its first argument, ``_to_copy(self)`` to a new tensor."""
    target, source = (call["self"], call["src"]) if "src" in call else (result, call["self"])
    here, there = type(source) is SimulatedTensor, type(target) is SimulatedTensor
    if here and there:
        kind = pointwise([source, target])
        return [Kernel(kind, dtype_of(target), 0, bytes_of([source]), stored_bytes(target._spec))]
    if there:
        pinned = call["non_blocking"] and source.is_pinned()
        size = source.numel() * source.element_size()
        kind = "upload_pinned" if pinned else "upload"
        return [Kernel(kind, dtype_of(target), 0, size, stored_bytes(target._spec))]
    return [Kernel("download", dtype_of(source), 0, bytes_of([source]), bytes_of([source]))]


@launched_by("_local_scalar_dense")
def _item(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    source = call["self"]
    size = source._spec.dtype.itemsize
    return [Kernel("download", dtype_of(source), 0, size, size)]


@launched_by("slice_backward", "select_backward")
def _slice_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Zeros, and a copy into a part of them (ATen/native/TensorShape.cpp)."""
    gradient, dtype = call["grad_output"], dtype_of(result)
    same = innermost(gradient._spec) in (None, innermost(result._spec))
    kind, part = "pointwise" if same else "pointwise_reordered", stored_bytes(gradient._spec)
    return [
        Kernel("fill", dtype, 0, 0, stored_bytes(result._spec)),
        Kernel(kind, dtype, 0, part, part),
    ]


def _passes(kind: str, reads: int) -> Rule:
    """Kernels that go over their (large) arguments so many times; small ones count once."""

    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        given, made = tensors_in(list(call.values())), tensors_in(result)
        read, written = bytes_of(given), bytes_of(made)
        dtype = dtype_of(given[0])
        return [Kernel(kind, dtype, flops, reads * read, written, launches=reads)]

    return rule


@launched_by(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("cudnn_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit_no_training"),
    "batch_norm_elemt",
)
def _batch_norm(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """Training: one pass for the statistics, one that normalizes. Otherwise an elementwise one."""
    train = call.get("training", call.get("train", True))
    kind = f"batch_norm{_last(call)}" if train else "batch_norm_eval"
    return _passes(kind, 1 + bool(train))(call, result, flops)


@launched_by("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    return _passes(f"batch_norm{_last(call)}_gradient", 2)(call, result, flops)


def _last(call: Arguments) -> str:
    """Normalized are channels that are next to each other, by kernels of their own?"""
    spec = call["input"]._spec
    return "_nhwc" if len(spec.size) > 2 and innermost(spec) == 1 - len(spec.size) else ""


launched_by("native_layer_norm", "_fused_rms_norm")(_passes("normalization", 1))
launched_by("native_group_norm")(_passes("normalization", 2))
launched_by("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward")(
    _passes("normalization_gradient", 2)
)
