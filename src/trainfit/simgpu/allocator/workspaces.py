"""Memory that GPU libraries use in addition to an operator's results.

The models of PyTorch's own kernels, and the table of all models by name. What cuDNN takes is in
:mod:`trainfit.simgpu.allocator.cudnn_convolutions`. Recordings name the models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainfit.simgpu.allocator import cudnn_convolutions

# ---
# Table of the models of library and kernel workspaces.
#
# Each model is a pure function of integers, every one of which is affine in the batch size,
# so a recording can be evaluated at another batch size without running the script again.


MODELS: Final[dict[str, Callable[..., int]]] = {}


def model(function: Callable[..., int]) -> Callable[..., int]:
    """Register a model under its function's name."""
    MODELS[function.__name__] = function
    return function


def workspace_bytes(name: str, arguments: tuple[int, ...]) -> int:
    """Bytes that model ``name`` asks for; 0 means that nothing is allocated."""
    return MODELS[name](*arguments)


for _cudnn in cudnn_convolutions.ALL:
    model(_cudnn)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---
# Scratch memory of PyTorch's attention kernels, in addition to their results.
#
# Sources: ATen/native/transformers/cuda/flash_attn/flash_api.cpp, .../cuda/attention_backward.cu
# and .../cuda/mem_eff_attention/kernel_backward.h, read in versions of 2024 to 2026.


@model
def flash_splits(
    batch: int, heads: int, queries: int, keys: int, head_size: int, processors: int
) -> int:
    """Flash attention's forward where one pass would leave multiprocessors idle.

    The keys are then split, and each split's result and log-sum-exp are kept in float32
    until they are united (set_params_splitkv and num_splits_heuristic).
    """
    keys_at_a_time = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    blocks = batch * heads * ceil_div(queries, 64)
    splits = _splits(blocks, 2 * processors, ceil_div(keys, keys_at_a_time))
    if splits == 1:
        return 0
    return splits * batch * heads * queries * (_flash_head(head_size) + 1) * 4


def _splits(blocks: int, processors: int, parts: int) -> int:
    if blocks >= 0.8 * processors:
        return 1
    possible = [
        count
        for count in range(1, min(128, processors, parts) + 1)
        if count == 1 or ceil_div(parts, count) != ceil_div(parts, count - 1)
    ]
    waves = {count: blocks * count / processors for count in possible}
    efficiency = {count: wave / -(-wave // 1) for count, wave in waves.items()}
    good = 0.85 * max(efficiency.values(), default=0)
    return next((count for count in possible if efficiency[count] >= good), 1)


def _flash_head(head_size: int) -> int:
    return round_up(head_size, 32 if head_size <= 128 else 64)


@model
def flash_backward(
    batch: int,
    heads: int,
    queries: int,
    head_size: int,
    keys: int = 0,
    key_heads: int = 0,
    itemsize: int = 2,
    processors: int = 0,
) -> int:
    """Flash attention's backward: float32 accumulator of dQ, and softmax sums (mha_bwd).

    Rows are rounded up to 128, the head size to 32 or 64. With fewer key than query heads
    dK and dV are made for every query head first. ``processors`` is not 0 where
    deterministic algorithms are asked for: dQ is then accumulated once per split.
    """
    rows = round_up(queries, 128)
    copies = ceil_div(processors, batch * heads) if processors else 1
    accumulated = batch * heads * rows * (copies * _flash_head(head_size) + 1) * 4
    if key_heads in (0, heads):
        return accumulated
    return accumulated + 2 * batch * keys * heads * head_size * itemsize


@model
def cudnn_attention_backward(batch: int, heads: int, queries: int, head_size: int) -> int:
    """cuDNN's attention, backward. An estimate: cuDNN does not publish it.

    Its frontend's graph of the backward pass holds dQ in float32 and one sum a row between
    its kernels (sdpa backward node: dQ_accum, softmax_sum), as flash attention does. The
    truth is not above twice that where dK and dV are accumulated likewise.
    """
    return batch * heads * queries * (head_size + 1) * 4


@model
def efficient_forward(batch: int, heads: int, queries: int, value_size: int) -> int:
    """Memory-efficient attention's forward, halves with values wider than 128.

    The result does not fit the registers and is accumulated in float32
    (kNeedsOutputAccumulatorBuffer of kernel_forward.h).
    """
    return batch * queries * heads * value_size * 4


@model
def efficient_delta(batch: int, heads: int, queries: int, value_size: int, products: int) -> int:
    """Memory-efficient attention's backward before its kernel: ``(dO * O).sum(-1)``.

    Halves do that in the kernel; for float32 the product is a tensor (``products`` 1), and
    for wide halves on Volta the float32 copies of dO and O are, too (3).
    """
    return products * batch * heads * queries * value_size * 4


@model
def efficient_backward(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_size: int,
    value_size: int,
    half: int,
    in_registers: int = 64,
) -> int:
    """Memory-efficient attention's backward: delta, and float32 accumulators.

    dQ is accumulated by blocks of 64 x 64 with two counters each, padded (GradQTempStorage). For
    halves dK and dV are too, when the head is wider than the kernel's registers
    (``in_registers``), once for each part that the keys are split into (at most
    200 // (batch * heads) then).
    """
    delta = batch * heads * (round_up(queries, 32) if half else queries) * 4
    accumulators = ceil_div(queries, 64) * ceil_div(head_size, 64) * (64 * 64 + 4)
    if half and max(head_size, value_size) > in_registers:
        splits = max(1, min(ceil_div(keys, 128), 200 // (batch * heads)))
        accumulators += splits * round_up(keys, 64) * (head_size + value_size)
    return delta + batch * heads * accumulators * 4


# ---
# Scratch memory of PyTorch's sorting, indexing and a few other kernels.
#
# Sources: ATen/native/cuda/SortStable.cu, Sort.cpp, Embedding.cu, EmbeddingBackwardKernel.cu,
# Indexing.cu, IndexKernel.cpp, Unique.cu, layer_norm_kernel.cu, ForeachReduceOp.cu,
# SpectralOps.cpp. CUB's scratch space is from its headers: a radix sort that must keep its
# input takes a second buffer for keys and values, and tables of less than an eighth of a byte
# an item, which are left out.


INT64 = 8
#: Sorts up to this length happen in place (should_use_small_sort).
_SMALL_SORT = 4096
#: embedding_dense_backward_cuda: without a sort up to so many indices.
_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
#: Layer norm's weight gradients are summed in two steps for more rows than these.
MANY_ROWS = 64 * 1024


def _radix_sort(items: int, key: int, value: int) -> int:
    return items * (key + value)


@model
def sort(items: int, length: int, itemsize: int) -> int:
    """Sorting rows of ``length`` along the last dimension (launch_stable_sort_kernel)."""
    if length <= _SMALL_SORT or items == 0:
        return 0
    rows = items // length
    if rows == 1 or length >= 1_000_000:
        return length * INT64 + _radix_sort(length, itemsize, INT64)
    if rows < 128:  # by full sort: pairs of row and place, twice, and the sorted keys
        return 2 * items * INT64 + items * itemsize + _radix_sort(items, itemsize, INT64)
    return items * INT64 + _radix_sort(items, itemsize, INT64)


@model
def sort_copies(items: int, itemsize: int, values: int) -> int:
    """Rows copied together because the sorted dimension is not the last one in memory.

    ``values`` counts the copies of the values; the indices are copied once.
    """
    return items * (values * itemsize + INT64)


@model
def sort_pairs(items: int) -> int:
    """thrust::sort_by_key of pairs of int64 with an order of its own: a merge sort into copies."""
    return items * 2 * INT64


@model
def embedding_sort(indices: int, index_size: int) -> int:
    """embedding_dense_backward_cuda before its result: indices sorted, with their places.

    CUB's part is exact at three sizes on an H200: second buffers and tables.
    """
    if indices <= _FEW_INDICES:
        return 0
    tables = indices // 4 + 16_895
    return 3 * indices * index_size + _radix_sort(indices, index_size, index_size) + tables


@model
def embedding_segments(indices: int, rows: int, index_size: int) -> int:
    """Bytes after :func:`embedding_sort`: sorted indices and their places, and where each row's
    segments of ten begin."""
    if indices <= _FEW_INDICES:
        return 0
    segments = min(indices, rows)
    return (3 * indices + 3 * segments + indices // _ROWS_PER_THREAD) * index_size


@model
def embedding_backward(
    indices: int, rows: int, width: int, index_size: int, accumulator_size: int
) -> int:
    """Sums of those segments."""
    if indices <= _FEW_INDICES:
        return 0
    return (indices // _ROWS_PER_THREAD + min(indices, rows)) * width * accumulator_size


@model
def index_put(indices: int) -> int:
    """Accumulating index_put: linear, sorted and original indices, a range, and the sort."""
    return indices * INT64 * 4 + _radix_sort(indices, INT64, INT64)


@model
def index_tensors(indices: int) -> int:
    """The int64 indices that a boolean mask becomes (expandTensors: nonzero)."""
    return indices * INT64


@model
def unique(items: int, itemsize: int, inverse: int) -> int:
    """Unique values: sorted copy, for the inverse also places and running counts.

    An upper bound where the sort and the later steps do not overlap (Unique.cu).
    """
    if inverse:
        return items * (itemsize + 3 * INT64) + _radix_sort(items, itemsize, INT64)
    return 2 * items * itemsize + items * INT64


@model
def layer_norm_backward(rows: int, width: int, itemsize: int, processors: int) -> int:
    """Partial sums of weight's and bias's gradients, for many short rows.

    cuComputePartGradGammaBeta's successor in GammaBetaBackward: blocks of 32 rows.
    """
    across = ceil_div(width, 32)
    if rows <= MANY_ROWS or width // 32 >= processors // 2:
        return 0
    down = min(32 * 1024 // across, ceil_div(rows, 32))
    return 2 * down * width * itemsize


#: Reduce.cuh: values that a thread reads at once (input_vec_size and get_output_vec_size), which
#: along the fastest dimension it does where so many are summed; threads of a block, and values of a
#: thread at least and at most.
VECTOR: Final = 4
_REDUCING_THREADS, _FEWEST_VALUES, _MOST_VALUES, _LONG = 512, 16, 256, 128


def _split_reduction(
    outputs: int, inputs: int, within: int, vector: int, processors: int, threads: int
) -> tuple[int, int, int]:
    """Blocks, blocks for each of them, and partial results that a block keeps (setReduceConfig)."""
    if outputs <= 0 or inputs <= 0:
        return 0, 1, 0
    # Between two batch sizes, and beyond them, a law of both may say anything.
    vector = max(1, min(vector, VECTOR))
    lanes, rows = (inputs, outputs) if within else (outputs, inputs)
    if not within or inputs >= _LONG:
        lanes //= vector
    maximum = _REDUCING_THREADS // (1 if within else vector)
    lanes, rows = (min(1 << max(each, 1).bit_length() - 1, maximum) for each in (lanes, rows))
    height = min(rows, maximum // min(lanes, 32))
    width = min(lanes, maximum // height)
    step = width if within else 1
    if ceil_div(inputs, step) < min(height * 16, _MOST_VALUES):
        return 0, 1, 0
    values = ceil_div(inputs, step * height)
    blocks = outputs if within else ceil_div(outputs // vector, width)
    target = processors * (threads // (width * height))
    if values < _MOST_VALUES or blocks > target:
        return blocks, 1, 0
    split = min(ceil_div(target, blocks), ceil_div(values, _FEWEST_VALUES))
    kept = 1 if within else width * vector
    return blocks, max(split, ceil_div(values, _MOST_VALUES)), kept


@model
def reduction_partials(
    outputs: int, inputs: int, within: int, vector: int, itemsize: int, processors: int,
    threads: int,
) -> int:  # fmt: skip
    """Partial results of a sum of ``inputs`` for each output that several blocks share.

    gpu_reduce_kernel and global_memory_size of ATen/native/cuda/Reduce.cuh. ``within``: is it the
    fastest dimension that is summed? ``vector``: values that a thread reads at once. ``threads`` of
    a multiprocessor. On an H200 exact for each of those looked at.
    """
    _, split, kept = _split_reduction(outputs, inputs, within, vector, processors, threads)
    return itemsize * outputs * split * kept if split > 1 else 0


@model
def reduction_semaphores(
    outputs: int, inputs: int, within: int, vector: int, itemsize: int, processors: int,
    threads: int,
) -> int:  # fmt: skip
    """A counter for each block of the same sum."""
    blocks, split, _ = _split_reduction(outputs, inputs, within, vector, processors, threads)
    return 4 * blocks if split > 1 else 0


@model
def foreach_norm(tensors: int, longest: int, itemsize: int) -> int:
    """_foreach_norm: one partial result for each chunk of 65,536 elements."""
    return tensors * max(ceil_div(longest, 65_536), 1) * itemsize


@model
def temporary(nbytes: int) -> int:
    """A tensor that a kernel makes for itself."""
    return nbytes


@model
def cufft(nbytes: int) -> int:
    """cuFFT's work area. A bound: it is the transformed data once more, or nothing."""
    return nbytes


__all__ = ["MODELS", "workspace_bytes"]

#: Models of what a closed library chooses by itself: estimates, not facts. What share of them may
#: be wrong: those with a share below 1 were measured (:mod:`..cudnn_workspaces`).
ESTIMATED: Final = {
    "cudnn_tensor_core": 1.0,
    "cudnn_winograd": 1.0,
    "cudnn_nhwc": 0.15,
    "cudnn_rnn_workspace": 0.15,
}


@model
def cublas_workspace(nbytes: int) -> int:
    """Workspace of a cuBLAS handle on one stream, kept for the life of the process.

    :mod:`trainfit.simgpu.operators.matmul` works out its size.
    """
    return nbytes


@model
def cublas_handle(capability_major: int) -> int:
    """cuBLAS's workspace in recordings of format version 1, by compute capability."""
    return 32 << 20 if capability_major in (9, 10) else 4096 * 1024 * 2 + 16 * 1024 * 8


@model
def contiguous_copy(nbytes: int) -> int:
    """A copy that a kernel's caller makes because it wants dense operands."""
    return nbytes


@model
def reordered_copy(nbytes: int) -> int:
    """A copy in which other elements become neighbours."""
    return nbytes
