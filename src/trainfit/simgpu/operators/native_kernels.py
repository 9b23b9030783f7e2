"""PyTorch's own kernels: those of several passes, and one for each operator without a rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.results.runs.steps import PEER_COPY
from trainfit.simgpu.device.geometry import innermost
from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    Rule,
    bytes_of,
    dtype_of,
    launched_by,
    stored_bytes,
)
from trainfit.torch_private.operators import schema, short_name

# ---
# One kernel for an operator without a rule: its kind by name and tags, its bytes by operands.


#: Kinds of operators by the beginning of their names; "" is determined by tags and operands.
_KINDS: Final[tuple[tuple[str, str], ...]] = (
    ("_foreach_zero_", "fill"),
    ("_foreach_", "optimizer"),
    ("_fused_", "optimizer"),
    ("_softmax", "softmax"),
    ("_log_softmax", "softmax"),
    ("native_dropout", "pointwise"),
    ("max_pool", "pooling"),
    ("avg_pool", "pooling"),
    ("_adaptive_avg_pool", "pooling"),
    ("adaptive_max_pool", "pooling"),
    ("upsample", "resampling"),
    ("_upsample", "resampling"),
    ("grid_sampler", "resampling"),
    ("im2col", "resampling"),
    ("col2im", "resampling"),
    ("reflection_pad", "resampling"),
    ("replication_pad", "resampling"),
    ("constant_pad", "pointwise"),
    ("index", "indexing"),
    ("_index_put", "indexing"),
    ("_unsafe_index", "indexing"),
    ("gather", "indexing"),
    ("scatter", "indexing"),
    ("embedding", "indexing"),
    ("masked_select", "indexing"),
    ("nonzero", "indexing"),
    ("take", "indexing"),
    ("roll", "pointwise"),
    ("flip", "pointwise_reordered"),
    ("sort", "sorting"),
    ("topk", "sorting"),
    ("cumsum", "sorting"),
    ("cumprod", "sorting"),
    ("unique", "sorting"),
    ("_unique", "sorting"),
    ("randperm", "sorting"),
    ("cat", "concatenation"),
    ("stack", "concatenation"),
    ("clone", "copy"),
    ("contiguous", "copy"),
    ("repeat", "copy"),
    ("nll_loss", "reduction"),
    ("fill", "fill"),
    ("zero", "fill"),
    ("full", "fill"),
    ("ones", "fill"),
    ("new_zeros", "fill"),
    ("new_ones", "fill"),
    ("new_full", "fill"),
    ("arange", "fill"),
    ("linspace", "fill"),
    ("eye", "fill"),
    ("rand", "fill"),
    ("normal", "fill"),
    ("uniform", "fill"),
    ("bernoulli", "fill"),
    ("random", "fill"),
)
#: Namespaces of PyTorch's own operators; what others compute is not known without a FLOP rule.
_PYTORCHS: Final = frozenset(
    ("aten", "prims", "prim", "c10d", "_c10d_functional", "inductor", "torchvision", "quantized")
)
#: These read nothing of what they write to.
_BLIND: Final = ("fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")


def by_operands(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, flops: int
) -> Kernel:
    """One kernel that reads its arguments and writes its results, each once."""
    name = short_name(func)
    given, made = tensors_in((args, tuple(kwargs.values()))), tensors_in(result)
    written = {id(tensor) for tensor in made}
    changed = _changed(func, args, kwargs)
    blind = name.startswith(("_foreach_zero_", "_foreach_copy_")) or name in _BLIND
    reads = [tensor for tensor in given if not (blind and id(tensor) in changed)]
    if name.endswith("_like"):
        reads = []  # they ask for the shape alone
    writes = [
        *made,
        *(tensor for tensor in given if id(tensor) in changed and id(tensor) not in written),
    ]
    kind = _kind(func, name, given, made)
    read_bytes, written_bytes = bytes_of(reads), bytes_of(writes)
    if kind == "indexing":
        # Of a table only the rows that are asked for are read, or changed.
        rows = min(read_bytes, written_bytes)
        at_rows = not made or name in ("index_put_", "index_fill_")
        read_bytes, written_bytes = rows, rows if at_rows else written_bytes
    if func.namespace not in _PYTORCHS and not flops and torch.Tag.pointwise not in func.tags:
        kind = "unknown"
    first = next(iter([*made, *given]), None)
    dtype = dtype_of(first) if first is not None else "float32"
    tensors, launches = 1, 1
    if name.startswith(("_foreach_", "_fused_")):
        tensors, launches = _listed(args)
    single = singly([*given, *made]) if kind.startswith("pointwise") else 0
    apart = kind == "pointwise_reordered"
    passed = passed_bytes(made or given, [*given, *made]) if apart else 0
    if kind == "concatenation" and not all(tensor._spec.contiguous for tensor in given):
        single = sum(tensor._spec.numel for tensor in made)
    return Kernel(
        *(kind, dtype, flops, read_bytes, written_bytes, single, passed),
        batches=tensors,
        launches=launches,
    )


@launched_by("sort")
def _sort(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    spec = call["self"]._spec
    length = spec.size[call["dim"]] if spec.size else 1
    moved, kernels = _sorted(spec.numel // max(1, length), length, spec.dtype.itemsize)
    half = spec.numel * moved // 2
    # Not as ``launches``, which have to be the same at every batch size.
    return [Kernel("sorting", dtype_of(call["self"]), flops, half, half, batches=kernels)]


#: Elements up to which a block sorts a row within its shared memory, and how often such a sort
#: passes all (should_use_small_sort in ATen/native/cuda/Sort.h).
_SORTED_IN_BLOCK, _BLOCK_PASSES = 4096, 3
#: Rows below which they are sorted all at once, each with its number, and the length from which
#: one alone fills the GPU (launch_stable_sort_kernel in ATen/native/cuda/Sort.cu).
_ROWS_AT_ONCE, _ROW_ALONE = 128, 1_000_000
#: Bits of a key that cub's radix sort takes in a pass, and those where a block sorts each row;
#: bytes of an element's place, and of its place and its row's number in one (``int2``).
_BITS, _BITS_OF_ROWS, _PLACE_BYTES = 8, 6, 8


def _sorted(rows: int, length: int, key: int) -> tuple[int, int]:
    """Bytes that a sort of keys of so many bytes moves for each element, and its kernels.

    Radix sort counts all keys once, in a kernel before its passes and one that adds up the counts
    (cub's DeviceRadixSort); each pass reads and writes keys and what goes with them. Few rows are
    first given places and rows' numbers, then sorted by their keys, then by the rows' numbers, and
    at last put where they belong: keys that are read from everywhere, places and results.
    """
    pair = key + _PLACE_BYTES
    passes = math.ceil(8 * key / _BITS)
    if length <= _SORTED_IN_BLOCK:
        return 2 * _BLOCK_PASSES * pair, 1
    of_keys = key + 2 * passes * pair
    if rows == 1 or length >= _ROW_ALONE:
        return of_keys, 1 + rows * (2 + passes)
    if rows < _ROWS_AT_ONCE:
        by_row = math.ceil(math.log2(max(2, rows)) / _BITS)
        of_rows = _PLACE_BYTES + 2 * by_row * _PLACE_BYTES
        moved = _PLACE_BYTES + of_keys + of_rows + 2 * pair
        return moved, 1 + (2 + passes) + (2 + by_row) + 1
    # A block goes over each row, which the L2 cache still holds when its keys were counted. (That
    # places are written first, a twentieth of it, is left out.)
    passes = math.ceil(8 * key / _BITS_OF_ROWS)
    return 2 * passes * pair, 1 + passes


#: multi_tensor_apply in ATen/native/cuda/MultiTensorApply.cuh: elements of a chunk, chunks and
#: tensors of one launch, the latter by the number of lists.
_CHUNK, _MOST_BLOCKS = 65536, 320
_MOST_TENSORS: Final = (110, 64, 48, 36, 30)


def _listed(args: Sequence[Any]) -> tuple[int, int]:
    """How many tensors an operator over lists of tensors has, and how many kernels."""
    lists = [tensors_in(argument) for argument in args if isinstance(argument, list | tuple)]
    lists = [each for each in lists if each]
    if not lists:
        return 1, 1
    most = _MOST_TENSORS[min(len(lists), len(_MOST_TENSORS)) - 1]
    chunks = sum(-(-each._spec.numel // _CHUNK) for each in lists[0])
    tensors = len(lists[0])
    return tensors, max(1, -(-tensors // most), -(-chunks // _MOST_BLOCKS))


def _kind(func: Any, name: str, given: Sequence[Any], made: Sequence[Any]) -> str:
    for start, kind in _KINDS:
        if name.startswith(start):
            found = kind
            break
    else:
        found = "pointwise" if torch.Tag.pointwise in func.tags else _untold(given, made)
    if "backward" in name and found == "pooling":
        return "pooling_gradient"
    if found in ("pointwise", "copy"):
        return pointwise([*given, *made])
    return found


def pointwise(operands: Sequence[Any]) -> str:
    """An elementwise kernel, by how it goes over its operands."""
    return "pointwise" if _same_order(operands) else "pointwise_reordered"


def singly(operands: Sequence[Any], *, casts: bool = False) -> int:
    """Elements of an elementwise kernel that goes over them one by one; 0: vectors of them.

    Vectors need operands of one order without gaps and repeated dimensions, and of one dtype but
    in a copy (``casts``), which has kernels for two (gpu_kernel_impl in ATen/native/cuda/Loops.cuh
    and CUDALoops.cuh).
    """
    specs = {operand._spec for operand in operands}
    maximum = max((spec.numel for spec in specs), default=0)
    orders = {(spec.size, spec.stride) for spec in specs}
    dtypes = {spec.dtype for spec in specs if spec.dtype is not torch.bool}
    alike = len(orders) == 1 and (casts or len(dtypes) < 2)
    return 0 if alike and all(_dense(spec) for spec in specs) else maximum


def _dense(spec: Any) -> bool:
    """Do its elements fill the memory from its first to its last?"""
    if spec.contiguous:
        return True
    steps = sum((size - 1) * step for size, step in zip(spec.size, spec.stride, strict=True))
    return bool(steps + 1 == spec.numel)


#: Bytes that pass between a multiprocessor and the L2 cache at least, and bytes of results that a
#: block of an elementwise kernel makes (128 threads of four halves or two floats:
#: launch_legacy_kernel in ATen/native/cuda/CUDALoops.cuh).
_SECTOR_BYTES, _BLOCK_BYTES = 32, 1024


def passed_bytes(results: Sequence[Any], operands: Sequence[Any]) -> int:
    """Bytes that an elementwise kernel moves between multiprocessors and the L2 cache.

    A block makes results that are next to each other; where those of an operand are not, each of
    them takes a piece of 32, which blocks of other places on other multiprocessors take again.
    """
    made = results[0]._spec
    elements = max(1, _BLOCK_BYTES // made.dtype.itemsize)
    inward = sorted(range(len(made.size)), key=lambda dim: (made.stride[dim], made.size[dim]))
    found = 0
    for spec in (operand._spec for operand in operands):
        if spec.numel != made.numel or len(spec.size) != len(made.size):
            continue
        left, pieces = elements, 1
        for dim in inward:
            taken = min(made.size[dim], left)
            step = spec.stride[dim] * spec.dtype.itemsize
            if step and taken > 1:
                pieces *= math.ceil(taken * min(step, _SECTOR_BYTES) / _SECTOR_BYTES)
            left = math.ceil(left / max(1, made.size[dim]))
        found += pieces * math.ceil(made.numel / elements)
    return found * _SECTOR_BYTES


def _untold(given: Sequence[Any], made: Sequence[Any]) -> str:
    """Fewer elements come out than go in: a reduction."""
    elements = max((each._spec.numel for each in given), default=0)
    return "reduction" if sum(each._spec.numel for each in made) * 2 < elements else "pointwise"


def _same_order(tensors: Sequence[Any]) -> bool:
    """Do the large ones have the same innermost dimension, so that all is read in order?"""
    maximum = max((tensor._spec.numel for tensor in tensors), default=0)
    inner = {innermost(tensor._spec) for tensor in tensors if tensor._spec.numel == maximum}
    return len({number for number in inner if number is not None}) < 2


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """Ids of the tensors that the schema says are written to."""
    declared = schema(func)
    if not declared.is_mutable:
        return set()
    found: set[int] = set()
    for place, argument in enumerate(declared.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = (
            kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
        )
        found |= {id(tensor) for tensor in tensors_in(value)}
    return found


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
    if here and there and source._life.gpu != target._life.gpu:
        return [Kernel(PEER_COPY, dtype_of(target), 0, *(2 * [stored_bytes(target._spec)]))]
    if here and there:
        both = [source, target]
        kind, single = pointwise(both), singly(both, casts=True)
        passed = passed_bytes([target], both) if kind == "pointwise_reordered" else 0
        moved = bytes_of([source]), stored_bytes(target._spec)
        return [Kernel(kind, dtype_of(target), 0, *moved, single, passed)]
    if there:
        pinned = call["non_blocking"] and source.is_pinned()
        size = source.numel() * source.element_size()
        kind = "upload_pinned" if pinned else "upload"
        return [Kernel(kind, dtype_of(target), 0, size, stored_bytes(target._spec))]
    # What _to_copy makes for a copy that nobody waits for is pinned.
    pinned = call["non_blocking"] and ("src" not in call or target.is_pinned())
    kind = "download_pinned" if pinned else "download"
    return [Kernel(kind, dtype_of(source), 0, bytes_of([source]), bytes_of([source]))]


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
        Kernel(kind, dtype, 0, part, part, gradient._spec.numel),
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
    return _by_channel(_passes(kind, 1 + bool(train))(call, result, flops), call)


@launched_by("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    found = _passes(f"batch_norm{_last(call)}_gradient", 2)(call, result, flops)
    return _by_channel(found, call)


def _by_channel(kernels: list[Kernel], call: Arguments) -> list[Kernel]:
    """The kernels where channels are not next to each other: a block goes over each
    (batch_norm_collect_statistics_kernel and batch_norm_backward_kernel in
    ATen/native/cuda/Normalization.cuh; cuDNN's bn_fw_tr_1C11 and bn_bw_1C11)."""
    spec = call["input"]._spec
    channels = spec.size[1] if len(spec.size) > 1 else 1
    of_channel = spec.numel // max(1, channels)
    return [
        dataclasses.replace(kernel, rows=of_channel)
        if kernel.kind in ("batch_norm", "batch_norm_gradient")
        else kernel
        for kernel in kernels
    ]


def _last(call: Arguments) -> str:
    """Normalized are channels that are next to each other, by kernels of their own?"""
    spec = call["input"]._spec
    return "_nhwc" if len(spec.size) > 2 and innermost(spec) == 1 - len(spec.size) else ""


@launched_by("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A block goes over each row (vectorized_layer_norm_kernel in
    ATen/native/cuda/layer_norm_kernel.cu)."""
    (kernel,) = _passes("normalization", 1)(call, result, flops)
    row = max(1, math.prod(call["normalized_shape"]))
    return [dataclasses.replace(kernel, columns=row, batches=call["input"]._spec.numel // row)]


@launched_by(
    *("_softmax", "_log_softmax"), *("_softmax_backward_data", "_log_softmax_backward_data")
)
def _softmax(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A block goes over each row where it is long (ATen/native/cuda/SoftMax.cu)."""
    (kernel,) = _passes("softmax", 1)(call, result, flops)
    spec = tensors_in(result)[0]._spec
    row = max(1, spec.size[call["dim"]]) if spec.size else 1
    return [dataclasses.replace(kernel, columns=row, batches=max(1, spec.numel // row))]


@launched_by("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_gradient(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A pass for the input's gradient, a block for each row, and one for those of weight and bias,
    a block for each 32 columns (LayerNormBackwardKernelImplInternal)."""
    (kernel,) = _passes("normalization_gradient", 2)(call, result, flops)
    row = max(1, math.prod(call["normalized_shape"]))
    return [dataclasses.replace(kernel, columns=row, batches=call["input"]._spec.numel // row)]


#: Instructions of GELU and its gradient for each element, by their formulas (ATen/native/cuda/
#: ActivationGeluKernel.cu; counted there, with 25 for the error function or the hyperbolic tangent
#: and 6 for the exponential): more than a data-centre GPU issues while its memory moves them.
_OF_GELU, _OF_GELU_GRADIENT = 32, 45


@launched_by("gelu", "gelu_backward")
def _gelu(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    given = [each for each in (call.get("grad_output"), call["self"]) if each is not None]
    instructions = _OF_GELU_GRADIENT if len(given) > 1 else _OF_GELU
    kind, single = pointwise([*given, result]), singly([*given, result])
    elements, moved = result._spec.numel, (bytes_of(given), bytes_of([result]))
    if kind == "pointwise_reordered":
        return [
            Kernel(kind, dtype_of(result), flops, *moved, single, passed_bytes([result], given))
        ]
    return [Kernel(kind, dtype_of(result), flops, *moved, single, elements, instructions)]


@launched_by("max_pool2d_with_indices", "max_pool2d_with_indices_backward")
def _max_pool(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    """A thread goes over the window of each result, backward over the windows that hold it
    (ATen/native/cuda/DilatedMaxPool2d.cu)."""
    given, made = tensors_in(list(call.values())), tensors_in(result)
    kind = "pooling_gradient" if "grad_output" in call else "pooling"
    moved = bytes_of(given), bytes_of(made)
    return [Kernel(kind, dtype_of(given[0]), flops, *moved, made[0]._spec.numel)]


#: Times that group normalization's kernels go over the elements one by one: moments by Welford's
#: sums, which divide for each, and scales by channel; and in the backward pass.
_GROUP_NORM_PASSES: Final = {"normalization": 3, "normalization_gradient": 4}


def _group_norm(kind: str) -> Rule:
    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        (kernel,) = _passes(kind, 2)(call, result, flops)
        elements = _GROUP_NORM_PASSES[kind] * call["input"]._spec.numel
        return [dataclasses.replace(kernel, rows=elements)]

    return rule


launched_by("native_group_norm")(_group_norm("normalization"))
launched_by("native_group_norm_backward")(_group_norm("normalization_gradient"))
