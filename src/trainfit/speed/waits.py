"""Times of kernels that neither arithmetic nor traffic bounds: those that wait.

Threads that take turns one after the other wait for the memory's latency in each. Kernels that go
over elements one by one compute where each lies; where elements lie apart, each takes a piece of 32
bytes from the L2 cache. Where a block goes over a whole channel or row, few of them leave most of
the GPU idle, and short ones begin and end more than they compute. PyTorch's own depthwise
convolutions take instructions for places and edges, many times those of their sums, and GELU takes
more than its memory leaves time for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.results.runs.recording import IntArray
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.products import USUAL_CLOCK
from trainfit.speed.work import CODES, COLUMNS, Floats

#: What a read of the device's memory takes, in seconds (a V100 375 cycles, 270 ns: Jia et al.,
#: "Dissecting the NVIDIA Volta GPU Architecture", 2018; taken to be alike on all), and threads that
#: a multiprocessor holds at least: one block of 1024.
_LATENCY_S: Final = 300e-9
_RESIDENT: Final = 1024
#: Elements that a multiprocessor takes in a clock where it computes each one's places, by
#: Liger-Kernel's published rows: SwiGLU on halves of a tensor (H100 SXM, 1.4), rotary embeddings on
#: transposed heads (A100 SXM, 1.25); the others by kernels of an H200 of the project (PyTorch 2.11,
#: 2026-11-27).
_ELEMENTS_A_CLOCK: Final = {
    "pointwise": 1.3,
    "normalization": 1.3,
    "concatenation": 1.0,
    "layout": 2.5,
    "pooling_gradient": 0.40,
    "pooling": 0.28,
}
#: Elements of a channel that a block takes in a second (each waits for memory, so that few channels
#: leave most of a GPU idle), and seconds of a block for a row, and for each of its elements. By the
#: same H200: 1.2e9 to 1.7e9 in a forward pass, 0.5e9 to 0.7e9 backward, from 64 to 256 channels,
#: of which those of 64, where it matters, and its profile's program say the lower; rows of 96 to
#: 768 elements.
_CHANNEL_RATES: Final = {"batch_norm": 1.25e9, "batch_norm_gradient": 0.55e9}
#: A warp, not a block, takes softmax's rows of up to so many elements, several at a time
#: (ATen/native/cuda/SoftMax.cu); longer ones take what those of a normalization do: an H200 took
#: 194 us for 8192 rows of 4096 and their gradients (bench/gpu/h200-profile.json), by rows 180.
_OF_A_WARP: Final = 1024
_ROW_S, _ROW_ELEMENT_S = 185e-9, 0.29e-9


#: Bytes that the L2 cache gives a multiprocessor in a clock, by architecture: 64 of each of its
#: slices (2048 of a V100 and 5120 of an A100, as NVIDIA's "A100 Tensor Core GPU Architecture" has
#: them; others by their slices, as far as these are known), and the share that kernels reach: of
#: 33.5 million bf16 elements that an H200 transposed in 222 us, a piece of 32 bytes each.
_L2_BYTES_A_CLOCK: Final = {
    (0, 0): 26,
    (7, 5): 32,
    (8, 0): 47,
    (8, 6): 37,
    (8, 7): 32,
    (8, 9): 24,
    (9, 0): 39,
    (10, 0): 69,
    (12, 0): 24,
}
_L2_SHARE: Final = 0.57
#: Instructions of PyTorch's own depthwise convolutions, by their source (ATen/native/cuda/
#: DepthwiseConv2d.cu; counted there: a division of numbers that are known at run time as 25, others
#: as one): for each result, whose place takes three divisions, and for each tap, with its edges,
#: addresses, loads and conversions; in the weight gradient all of a pair, with a division. A
#: multiprocessor issues four of a warp's 32 threads in a clock (CUDA's programming guide), of which
#: four fifths are used by kernels that this bounds (Nsight Compute's guide: above 80% it is the
#: limit). Those in float16 keep the shares that they were fitted with: cuDNN has kernels for most
#: of them.
_OF_RESULT: Final = 80.0
_OF_TAP: Final = {
    "depthwise": 14.0,
    "depthwise_input_gradient": 18.0,
    "depthwise_weight_gradient": 60.0,
}
_ISSUED_A_CLOCK: Final = 0.8 * 4 * 32


def waiting_seconds(table: IntArray, gpu: GpuSpec) -> Floats:
    """The least that each kernel of the table (columns of :data:`trainfit.speed.work.COLUMNS`)
    takes for such reasons; 0 for others."""
    kinds, rows, columns, depth, batches = (
        table[:, COLUMNS.index(name)] for name in ("kind", "rows", "columns", "depth", "batches")
    )
    clock = gpu.boost_clock_hz or USUAL_CLOCK
    found = rows / (_OF_ELEMENTS[kinds] * clock * gpu.sm_count)
    found = np.maximum(found, rows / _OF_CHANNELS[kinds])
    of_rows = batches * (_ROW_S + _ROW_ELEMENT_S * columns) / gpu.sm_count
    by_row = (kinds == CODES["normalization"]) & (columns > 0)
    by_row |= (kinds == CODES["softmax"]) & (columns > _OF_A_WARP)
    found = np.where(by_row, np.maximum(found, of_rows), found)
    passed = np.where(kinds == CODES["pointwise_reordered"], columns, 0)
    found = np.maximum(found, passed / _l2_bytes_per_s(gpu, clock))
    found = np.maximum(found, _instructions(table) / (_ISSUED_A_CLOCK * clock * gpu.sm_count))
    turns = depth * np.ceil(rows / (_RESIDENT * gpu.sm_count)) * _LATENCY_S
    return np.where(kinds == CODES["resampling"], np.maximum(found, turns), found)


def _l2_bytes_per_s(gpu: GpuSpec, clock: float) -> float:
    since = max(each for each in _L2_BYTES_A_CLOCK if each <= gpu.capability)
    return _L2_SHARE * _L2_BYTES_A_CLOCK[since] * clock * gpu.sm_count


def _instructions(table: IntArray) -> Floats:
    """Of threads of depthwise convolutions, and of elementwise kernels that have many; 0 of other
    kernels."""
    kinds, dtype, rows, columns, depth, batches = (
        table[:, COLUMNS.index(name)].astype(np.float64)
        for name in ("kind", "dtype", "rows", "columns", "depth", "batches")
    )
    found = np.where(kinds == CODES["pointwise"], columns * depth, 0.0)
    for name, of_tap in _OF_TAP.items():
        mine = (kinds == CODES[name]) & (dtype != DTYPES.index("float16"))
        pairs, results = rows * columns * depth * batches, rows * columns * batches
        found += np.where(mine, of_tap * pairs + _OF_RESULT * results, 0.0)
    return found


def _of_kinds(rates: Mapping[str, float]) -> Floats:
    """Of each kind the rate of the longest name that it begins with; infinite without one."""
    found = np.full(len(KINDS), np.inf)
    for code, kind in enumerate(KINDS):
        names = [name for name in rates if kind.startswith(name)]
        if names:
            found[code] = rates[max(names, key=len)]
    return found


_OF_ELEMENTS: Final = _of_kinds(_ELEMENTS_A_CLOCK)
_OF_CHANNELS: Final = _of_kinds(_CHANNEL_RATES)
