"""Scratch memory of PyTorch's sorting, indexing and a few other kernels.

Sources: ATen/native/cuda/SortStable.cu, Sort.cpp, Embedding.cu, EmbeddingBackwardKernel.cu,
Indexing.cu, IndexKernel.cpp, Unique.cu, layer_norm_kernel.cu, ForeachReduceOp.cu,
SpectralOps.cpp. CUB's scratch space is from its headers: a radix sort that must keep its
input takes a second buffer for keys and values, and tables of less than an eighth of a byte
an item, which are left out.
"""

from __future__ import annotations

from trainfit.simgpu.workspaces.models import ceil_div, model

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
def embedding_backward(
    indices: int, rows: int, width: int, index_size: int, accumulator_size: int
) -> int:
    """embedding_dense_backward_cuda: indices are sorted, rows summed by segments of ten."""
    if indices <= _FEW_INDICES:
        return 0
    found = 2 * indices * index_size
    sorting = indices * index_size + _radix_sort(indices, index_size, index_size)
    segments = min(indices, rows)
    partial = indices // _ROWS_PER_THREAD + segments
    summing = (indices + 2 * segments + partial) * index_size
    return found + max(sorting, summing + partial * width * accumulator_size)


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
