"""Kernel times on a GPU: a roofline for each kernel.

A kernel takes the time of its arithmetic or that of its traffic, whichever is more (where both
are near each other, a little more than either), and no less than the least time of any kernel.

Matmuls (convolutions as implicit ones) are computed in tiles, one at a time on each
multiprocessor: a matmul that does not fill its tiles, or the last wave of tiles over the
multiprocessors, takes as long as one that does. Of several tile sizes, and of one or more
multiprocessors for the same tile ("split k"), the fastest is taken, as cuBLAS and cuDNN do.

Traffic passes the device's memory at its bandwidth, but for what the L2 cache still holds. Kernels
that neither of both bounds wait (:mod:`trainfit.speed.kernel_times`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_figures import tensor_rate
from trainfit.results.runs.recording import IntArray
from trainfit.results.runs.steps import DTYPES, HOST_COPIES, KINDS, MARKS, TRANSFERS
from trainfit.speed.efficiency import Efficiency
from trainfit.speed.products import (
    INLINE_ECC,
    USUAL_CLOCK,
    Products,
    Sizes,
    attention_seconds,
    design_of,
    is_halved,
    product_seconds,
)
from trainfit.speed.work import CODES, COLUMNS, Floats, among

# ---
# Times of kernels that neither arithmetic nor traffic bounds: those that wait.
#
# Threads that take turns one after the other wait for the memory's latency in each. Kernels that go
# over elements one by one compute where each lies; where elements lie apart, each takes a piece of
# 32 bytes from the L2 cache. Where a block goes over a whole channel or row, few of them leave most
# of the GPU idle, and short ones begin and end more than they compute. PyTorch's own depthwise
# convolutions take instructions for places and edges, many times those of their sums, and GELU
# takes more than its memory leaves time for.


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
    """Instructions of the threads of depthwise convolutions, and of elementwise kernels that have
    many; 0 of other kernels."""
    kinds, dtype, rows, columns, depth, batches = (
        table[:, COLUMNS.index(name)].astype(np.float64)
        for name in ("kind", "dtype", "rows", "columns", "depth", "batches")
    )
    instructions = np.where(kinds == CODES["pointwise"], columns * depth, 0.0)
    for name, of_tap in _OF_TAP.items():
        mine = (kinds == CODES[name]) & (dtype != DTYPES.index("float16"))
        pairs, results = rows * columns * depth * batches, rows * columns * batches
        instructions += np.where(mine, of_tap * pairs + _OF_RESULT * results, 0.0)
    return instructions


def _of_kinds(rates: Mapping[str, float]) -> Floats:
    """The rate of each kind: that of the longest name that it begins with; infinite without one."""
    found = np.full(len(KINDS), np.inf)
    for code, kind in enumerate(KINDS):
        names = [name for name in rates if kind.startswith(name)]
        if names:
            found[code] = rates[max(names, key=len)]
    return found


_OF_ELEMENTS: Final = _of_kinds(_ELEMENTS_A_CLOCK)
_OF_CHANNELS: Final = _of_kinds(_CHANNEL_RATES)


# ---
# All kernels of a step.


#: Tiles of results (rows, columns) that kernels for matmuls come in (CUTLASS, cuBLAS).
_TILES: Final = (
    *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
    *((128, 32), (32, 128), (64, 32), (32, 64), (32, 32)),
)
#: Besides, of the kernels for narrow groups of channels: the Tensor cores' instructions are 8 wide.
_GROUP_TILES: Final = ((256, 16), (128, 16), (256, 8), (128, 8), (16, 128), (8, 128))
#: Multiprocessors that share a tile's sum, and the least part of it worth one of its own.
_SPLITS: Final = (1, 2, 4, 8, 16)
_LEAST_DEPTH: Final = 64
#: A tile as wide as this computes at the full rate.
_FULL_TILE: Final = 192.0
#: Elements by which a tile's sum goes on at once; one step more fills and drains the pipeline.
_DEPTH_STEP: Final = 32
#: From so many waves of tiles on, multiprocessors run apart and the last wave is half full.
_MANY_WAVES: Final = 6
#: Exponent of the smooth maximum of arithmetic and traffic.
_SHARPNESS: Final = 4.0
_HALVES: Final = ("float16", "bfloat16")
#: Watts that a multiprocessor's work takes at its boost clock with busy Tensor cores: so many, and
#: so many more for each 1,024 FLOPs a clock that they do. What large matmuls reach under a power
#: limit (docs/decisions/0040): T4 1.4, L4 1.6, A100 PCIe 1.9, H100 PCIe 2.9; and with busy shader
#: cores, which a T4 (12 nm) still feeds at three quarters of its boost clock (NVIDIA's ResNet-50 in
#: float32).
_TENSOR_WATTS: Final = 1.1
_FED_WATTS: Final = 0.43
_SHADER_WATTS: Final = 1.7
#: What goes elsewhere: a share of the board's, what a multiprocessor leaks (assumed; constant and
#: static power are a large part of a GPU's: AccelWattch, MICRO 2021), and memory at its full
#: bandwidth, 5 pJ a bit (HBM2 3.9, GDDR6 some 7: O'Connor et al., MICRO 2017, and vendors').
_BOARD: Final = 0.05
_STATIC_WATTS: Final = 0.3
_MEMORY_JOULES_A_BYTE: Final = 8 * 5e-12
#: Dynamic power goes with f V^2. Near the boost clock voltage falls with the clock (the third
#: power of it), at the least voltage no more (the first): a card that has less than half of what
#: its multiprocessors would take passes from one to the other.
_CLOCK_EXPONENT: Final = 0.55
#: Not on Tensor cores, cuDNN computes 3 x 3 filters by Winograd's algorithm ("winograd" in a V100's
#: profiles: github.com/ryujaehun/pytorch-gpu-benchmark, issue 6): F(2x2, 3x3) multiplies 2.25 times
#: less
#: (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016), of which its
#: transforms take a part (assumed: a tenth).
_WINOGRAD: Final = 2.0
#: Of that power, what is taken to be there at least (a figure that is wrong must not stop it).
_LEAST_CLOCK: Final = 0.1

#: Of the peak rate of Tensor cores, what libraries reach where kernels are other than those that
#: the constants are of, by the compute capability's first figure: large float16 matmuls run at 179
#: of 209.5 TFLOP/s on an RTX 5090 (github.com/zzc0721/torch-performance-test-data, issue 200:
#: PyTorch 2.7.1, CUDA 12.8), at 159 to 167 of 165.2 on an RTX 4090 (github.com/mli/
#: transformers-benchmarks, issue 4).
_LIBRARY_SHARE: Final = {12: 0.87}
#: Tensor cores that do so many FLOPs a clock in a multiprocessor are fed at the full rate (GeForce
#: from Ampere on); others at this share of theirs, by large matmuls on eight of them, from a V100
#: to a B200 (0.69 to 0.79; docs/decisions/0040).
_FED_FLOPS: Final = 512
_FED_SHARE: Final = 0.74
#: FLOPs a clock of a multiprocessor where operands start at multiples of so many half-precision
#: elements only: kernels of earlier architectures load them in pieces of 2, 4 or 8 bytes. By the
#: vocabularies of GPT-2 (50,257: 95 to 148 TFLOP/s) and BERT (30,522: 243 to 262) on an H200 of the
#: project (PyTorch 2.11, 2026-11-27); of four elements it is assumed: Hopper's own kernels need
#: eight.
_ALIGNED_FLOPS: Final = {1: 640.0, 2: 1130.0, 4: 1600.0}
#: Of the shader cores' float32 rate, what matmuls reach, in shares of what Tensor cores reach of
#: theirs on a GeForce: where 32 lanes share a scheduler, all else that a kernel issues takes turns
#: with them (8.6 and later); by large matmuls (docs/decisions/0040).
_SHADER_SHARE: Final = {(8, 6): 0.65, (8, 7): 0.65, (8, 9): 0.63, (9, 0): 0.72, (12, 0): 0.60}
_OTHER_SHADER_SHARE: Final = 0.88
#: Of the float32 rate that of float64, by compute capability; of others 1/32 (CUDA C++ Programming
#: Guide, "Throughput of Native Arithmetic Instructions"). Matmuls of A100 and H100 have Tensor
#: cores for it, at the float32 rate (NVIDIA's data sheets: 19.5 and 67 TFLOP/s of both).
_FLOAT64: Final = {
    **dict.fromkeys(((6, 0), (7, 0), (10, 0)), 1 / 2),
    **dict.fromkeys(((8, 0), (9, 0)), 1.0),
    **dict.fromkeys(((8, 6), (8, 7), (8, 9), (10, 3), (12, 0), (12, 1)), 1 / 64),
}

_ELSEWHERE: Final = (*HOST_COPIES, *MARKS, *TRANSFERS)
_TILED: Final = tuple(
    name for name in KINDS if name.startswith(("convolution", "grouped", "recurrent"))
)
_THREE_BY_THREE: Final = tuple(name for name in KINDS if "_3x3" in name)
#: Of each kind the one that has the same constants.
PLAIN: Final = {name: name.replace("_3x3", "").replace("_1x1", "") for name in KINDS}
#: Filters of one place, of channels that lie next to each other: matmuls, as cuBLAS's are.
_MATMULS: Final = ("matmul", *(name for name in KINDS if "_1x1" in name))
_GROUPED_NHWC: Final = tuple(name for name in KINDS if name.startswith("grouped_nhwc"))
_OF_INPUT: Final = tuple(name for name in _GROUPED_NHWC if name.endswith("input_gradient"))
_OF_WEIGHT: Final = tuple(name for name in _GROUPED_NHWC if name.endswith("weight_gradient"))
#: Channels of a group up to which cuDNN has kernels of their own, and of how many channels their
#: blocks are: ResNeXt's and RegNetZ's (128 and more, of 4 to 32 a group) take them, RegNetX's and
#: Y's (288, 320, 672) do not, by timm's channels-last steps on an RTX 3090.
_NARROW: Final = 32
_BLOCK: Final = 128
#: Forward and backward pass.
_ATTENTION: Final = ("attention", "attention_gradient")
_ON_SHADERS: Final = tuple(name for name in KINDS if name.startswith("depthwise"))


#: Kernels that take one element at a time of channels that lie apart, whose shares are of halves:
#: float32's are twice the bytes in the same time, up to this share (what a forward pass reaches in
#: halves; by ResNet-50 in float32 on A100, V100 and H200: 4, 13 and 7% too slow without).
_ONE_BY_ONE: Final = ("batch_norm", "batch_norm_gradient")
_WIDE_SHARE: Final = 0.65
#: Columns of a block that sums a layer normalization's gradients of weight and bias over all rows
#: (ConfigureAndLaunchGammaBetaBackwardKernel in ATen/native/cuda/layer_norm_kernel.cu), and the
#: memory's bandwidth that one multiprocessor draws, in parts of all divided by their number
#: (assumed: two thirds of them draw all of it).
_COLUMNS_OF_BLOCK, _DRAWN_BY_ONE = 32, 1.5


class KernelTimes:
    """Times of a table's kernels (columns of :data:`trainfit.speed.work.COLUMNS`) on a
    GPU."""

    def __init__(self, table: IntArray, gpu: GpuSpec) -> None:
        self.table, self._gpu = table, gpu
        self._kinds = self._column("kind")
        self._tiled = self._is(_TILED) & (self._column("flops") > 0)
        self._by_cause = self._is((*_MATMULS, *_ATTENTION)) & (self._column("flops") > 0)
        self._known: tuple[float, Floats] | None = None
        self._known_by_cause: tuple[float, Products] | None = None

    def seconds(self, efficiency: Efficiency) -> Floats:
        """Seconds of each kernel."""
        arithmetic, traffic = self.arithmetic(efficiency), self.traffic(efficiency)
        most, least = np.maximum(arithmetic, traffic), np.minimum(arithmetic, traffic)
        share = np.divide(least, most, out=np.zeros_like(most), where=most > 0)
        smooth = most * (1 + share**_SHARPNESS) ** (1 / _SHARPNESS)
        smooth = np.maximum(smooth, waiting_seconds(self.table, self._gpu))
        kernels = self._column("launches")
        kernels = np.where(self._is(("sorting",)), self._column("batches"), kernels)
        seconds = smooth + kernels * efficiency.least_s
        if self._by_cause.any():
            seconds[self._by_cause] = self._of_causes(efficiency.unaligned).total
        return np.where(self._is(_ELSEWHERE) | self._of_tensor_cores(), 0.0, seconds)

    def _of_tensor_cores(self) -> NDArray[np.bool_]:
        """Copies into the order of convolutions in TF32, on a GPU that computes them in float32."""
        return self._is(("layout",)) & self._not_rounded()

    def _winograd(self) -> NDArray[np.bool_]:
        """3 x 3 filters, not on Tensor cores: cuDNN has Winograd's algorithm for float16, too, with
        sums in float32 (PSEUDO_HALF_CONFIG of cudnnConvolutionForward)."""
        names = [name for name in ("float32", "float16") if name not in self._gpu.tensor_flops]
        on_shaders = among(tuple(names), DTYPES)[self._column("dtype")]
        return self._is(_THREE_BY_THREE) & (on_shaders | self._not_rounded())

    def _not_rounded(self) -> NDArray[np.bool_]:
        """What would be in TF32 if the GPU had it."""
        if "tfloat32" in self._gpu.tensor_flops:
            return np.zeros(len(self.table), dtype=np.bool_)
        return among(("tfloat32",), DTYPES)[self._column("dtype")]

    def traffic(self, efficiency: Efficiency) -> Floats:
        """Seconds that each kernel's bytes need at the memory bandwidth."""
        moved = (self._column("read") + self._column("written")).astype(np.float64)
        cached = np.minimum(moved, efficiency.cache * (self._gpu.l2_bytes or 0))
        peak = self._gpu.bandwidth_bytes_per_s * (INLINE_ECC if self._gpu.inline_ecc else 1.0)
        peak *= design_of(self._gpu).streams
        share = self._shares(efficiency.traffic)
        wide = self._is(_ONE_BY_ONE) & among(("float32", "tfloat32"), DTYPES)[self._column("dtype")]
        share = np.where(wide, np.maximum(share, np.minimum(_WIDE_SHARE, 2 * share)), share)
        share = np.maximum(share, self._of_columns(efficiency.traffic.get("normalization", 1.0)))
        found: Floats = (moved - cached) / (peak * share)
        if self._by_cause.any():
            found[self._by_cause] = self._of_causes(efficiency.unaligned).traffic
        return found

    def arithmetic(self, efficiency: Efficiency) -> Floats:
        """Seconds that each kernel's arithmetic needs."""
        seconds: Floats = self._at_peak(efficiency.small_tile) / self._shares(efficiency.arithmetic)
        seconds = np.where(self._winograd(), seconds / _WINOGRAD, seconds)
        seconds = np.where(self._odd(), seconds / efficiency.unaligned, seconds)
        if self._is(_GROUPED_NHWC).any():
            seconds = np.where(self._wide_groups(), seconds / efficiency.wide_groups, seconds)
            seconds = np.where(self._uneven_groups(), seconds / efficiency.uneven_groups, seconds)
        if self._by_cause.any():
            seconds[self._by_cause] = self._of_causes(efficiency.unaligned).arithmetic
        return seconds

    def on_tensor_cores(self) -> NDArray[np.bool_]:
        """Whose arithmetic is theirs."""
        with_cores = tuple(name for name in DTYPES if name in self._gpu.tensor_flops)
        return among(with_cores, DTYPES)[self._column("dtype")] & ~self._is(_ON_SHADERS)

    def _at_peak(self, small_tile: float) -> Floats:
        """Seconds at the full rate of a kernel's kind, but for the tiles."""
        if self._known is None or self._known[0] != small_tile:
            gpu = self._gpu
            rate = (peak_flops(gpu) * _reached(gpu))[self._column("dtype")]
            shaders = gpu.fp32_flops * clock_share(gpu, _SHADER_WATTS)
            rate = np.where(self._is(_ON_SHADERS), shaders, rate)
            seconds = self._column("flops") / rate
            if self._tiled.any():
                seconds[self._tiled] = self._tiled_seconds(rate / self._gpu.sm_count, small_tile)
            self._known = small_tile, seconds
        return self._known[1]

    def _of_causes(self, unaligned: float) -> Products:
        """Times of matmuls and fused attention; those of the same sizes are costed once."""
        if self._known_by_cause is None or self._known_by_cause[0] != unaligned:
            distinct, place = _distinct(self.table[self._by_cause])
            found = self._costed(distinct, unaligned)
            self._known_by_cause = unaligned, Products(*(each[place] for each in found))
        return self._known_by_cause[1]

    def _costed(self, table: IntArray, unaligned: float) -> Products:
        gpu, design = self._gpu, design_of(self._gpu)
        found = Products(*(np.zeros(len(table)) for _ in range(3)))
        kinds = table[:, COLUMNS.index("kind")]
        fused = among(_ATTENTION, KINDS)[kinds]
        peak = peak_flops(gpu)
        if not fused.all():
            chosen = table[~fused]
            rate = (peak * product_shares(gpu))[chosen[:, COLUMNS.index("dtype")]]
            maximum = _aligned_rates(chosen) * gpu.sm_count * (gpu.boost_clock_hz or USUAL_CLOCK)
            rate = np.where(_odd_sides(chosen), np.minimum(rate * unaligned, maximum), rate)
            _put(found, ~fused, product_seconds(_sizes_of(chosen), rate, gpu, design))
        if fused.any():
            chosen = table[fused]
            rate = peak[chosen[:, COLUMNS.index("dtype")]] * clock_share(gpu)
            flops = chosen[:, COLUMNS.index("flops")].astype(np.float64)
            gradient = among(_ATTENTION[1:], KINDS)[kinds[fused]].astype(np.float64)
            sizes = _sizes_of(chosen)
            total, alone = attention_seconds(sizes, flops, gradient, rate, gpu, design)
            moving = (sizes.read + sizes.written) / (gpu.bandwidth_bytes_per_s * design.memory)
            _put(found, fused, Products(np.maximum(total, moving), alone, moving))
        return found

    def _tiled_seconds(self, rate: Floats, small_tile: float) -> Floats:
        """Seconds of matmuls by their tiles, the fastest way; ``rate`` is a multiprocessor's (of
        every kernel)."""
        rate, launches = rate[self._tiled], self._column("launches")[self._tiled]
        sizes = self._sizes(self._tiled)
        best = self._fastest(sizes, rate, _TILES, small_tile)
        if self._is(_GROUPED_NHWC).any():
            narrow = self._narrow_groups()[self._tiled]
            others = self._fastest(sizes[:, narrow], rate[narrow], _GROUP_TILES, small_tile)
            best[narrow] = np.minimum(best[narrow], others)
        # Of recurrent layers every other launch is that of the cells.
        launches = np.where(self._is(("recurrent",))[self._tiled], launches / 2, launches)
        found: Floats = best * np.maximum(launches, 1)
        return found

    def _sizes(self, chosen: NDArray[np.bool_]) -> Floats:
        """Rows, columns, depth and batches of these matmuls, a line each."""
        names = ("rows", "columns", "depth", "batches")
        sizes = np.stack([self._column(name)[chosen] for name in names]).astype(np.float64)
        sizes[3, self._is(("recurrent",))[chosen]] = 1.0  # theirs are calls of the library
        return sizes

    def _fastest(
        self, sizes: Floats, rate: Floats, shapes: Sequence[tuple[int, int]], small_tile: float
    ) -> Floats:
        """Seconds of matmuls by the best of these tiles."""
        rows, columns, depth, batches = sizes
        depth = np.ceil(depth / _DEPTH_STEP) * _DEPTH_STEP
        best = np.full(len(rate), np.inf)
        for high, wide in shapes:
            tiles = np.ceil(rows / high) * np.ceil(columns / wide) * batches
            share = min(1.0, math.sqrt(high * wide) / _FULL_TILE) ** small_tile
            for parts in _SPLITS:
                split = np.minimum(parts, np.maximum(1.0, np.floor(depth / _LEAST_DEPTH)))
                waves = tiles * split / self._gpu.sm_count
                waves = np.where(waves < _MANY_WAVES, np.ceil(waves), waves + 0.5)
                each = 2 * high * wide * (depth / split + _DEPTH_STEP) / (rate * share)
                best = np.minimum(best, waves * each)
        return best

    def _odd(self) -> NDArray[np.bool_]:
        """Half-precision convolutions with a side that is not a multiple of 8."""
        return self._tiled & _odd_sides(self.table)

    def _of_columns(self, limit: float) -> Floats:
        """The share that a layer normalization's gradient reaches: in its input's pass that of the
        forward pass (``most``), in that of weight and bias what the multiprocessors draw that have
        a block of columns; 0 of others."""
        gradient = self._is(("normalization_gradient",)) & (self._column("columns") > 0)
        blocks = np.ceil(self._column("columns") / _COLUMNS_OF_BLOCK)
        drawn = np.minimum(1.0, np.maximum(blocks, 1) * _DRAWN_BY_ONE / self._gpu.sm_count)
        # Of five tensors' bytes two are read for weight and bias.
        return np.where(gradient, limit * 5 / (3 + 2 / drawn), 0.0)

    def _wide_groups(self) -> NDArray[np.bool_]:
        """Grouped convolutions of channels-last tensors with many channels a group."""
        return self._is(_GROUPED_NHWC) & (self._group_channels() > _NARROW)

    def _narrow_groups(self) -> NDArray[np.bool_]:
        """Convolutions that the kernels for narrow groups compute: whole blocks of channels, as
        many of the result's as of the input's (as far as the matmul's sides tell: its depth is a
        multiple of them)."""
        channels = self._group_channels()
        of_weight, of_input = self._is(_OF_WEIGHT), self._is(_OF_INPUT)
        depth = np.where(of_weight, self._column("columns"), self._column("depth"))
        alike = (depth % np.maximum(1, channels) == 0) | of_input
        blocks = channels * self._column("batches") % _BLOCK == 0
        taken: NDArray[np.bool_] = (channels <= _NARROW) & blocks & alike
        return self._is(_GROUPED_NHWC) & taken

    def _uneven_groups(self) -> NDArray[np.bool_]:
        """Convolutions of channels-last tensors that the kernels for narrow groups do not compute,
        and that are not wide."""
        known = self._narrow_groups() | self._wide_groups()
        return self._is(_GROUPED_NHWC) & ~known

    def _group_channels(self) -> IntArray:
        """Channels of the result's groups; of the input's in the input's gradient."""
        of_weight = self._is(_OF_WEIGHT)
        return np.where(of_weight, self._column("rows"), self._column("columns"))

    def _column(self, name: str) -> IntArray:
        return self.table[:, COLUMNS.index(name)]

    def _is(self, names: tuple[str, ...]) -> NDArray[np.bool_]:
        return among(names, KINDS)[self._kinds]

    def _shares(self, by_kind: Mapping[str, float]) -> Floats:
        """A share for each kernel by its kind; 1 where nothing is said."""
        return np.array([by_kind.get(name, 1.0) for name in PLAIN.values()])[self._kinds]


def _distinct(table: IntArray) -> tuple[IntArray, IntArray]:
    """The different rows, and which of them each row is."""
    rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * 8))).ravel()
    _, first, place = np.unique(rows, return_index=True, return_inverse=True)
    return table[first], place.ravel()


def _sizes_of(table: IntArray) -> Sizes:
    names = ("rows", "columns", "depth", "batches", "read", "written")
    rows, columns, depth, batches, read, written = (
        table[:, COLUMNS.index(name)].astype(np.float64) for name in names
    )
    return Sizes(rows, columns, depth, batches, read, written, table[:, COLUMNS.index("dtype")])


def _put(products: Products, where: NDArray[np.bool_], values: Products) -> None:
    for column, value in zip(products, values, strict=True):
        column[where] = value


def _odd_sides(table: IntArray) -> NDArray[np.bool_]:
    """Half-precision matmuls with a side that is not a multiple of 8."""
    halves = among(_HALVES, DTYPES)[table[:, COLUMNS.index("dtype")]]
    sides = table[:, [COLUMNS.index("depth"), COLUMNS.index("columns")]]
    odd_sides: NDArray[np.bool_] = halves & (sides % 8 > 0).any(axis=1)
    return odd_sides


def _aligned_rates(table: IntArray) -> Floats:
    """FLOPs a clock and multiprocessor that the alignment of half-precision operands allows."""
    sides = table[:, [COLUMNS.index("depth"), COLUMNS.index("columns")]]
    common = np.gcd(np.gcd(sides[:, 0], sides[:, 1]), 8)
    return np.array([_ALIGNED_FLOPS.get(int(each), np.inf) for each in common])


def peak_flops(gpu: GpuSpec) -> Floats:
    """Dense FLOP/s for matmuls by dtype (index of ``DTYPES``).

    Without Tensor cores for a half precision it runs on the shader cores: float16 at their
    float32 rate (its sums are float32), bfloat16 by way of float32; float64 at a part of it.
    """
    rates = dict.fromkeys(DTYPES, gpu.fp32_flops)
    rates["float64"] = gpu.fp32_flops * _FLOAT64.get(gpu.capability, 1 / 32)
    rates |= {name: rate for name, rate in gpu.tensor_flops.items() if name in rates}
    return np.array([rates[name] for name in DTYPES])


def clock_share(gpu: GpuSpec, watts: float | None = None) -> float:
    """Share of the boost clock that the board's power lets multiprocessors hold whose work takes
    ``watts`` each at that clock (by default: with busy Tensor cores)."""
    if watts is None:
        watts = _TENSOR_WATTS + _FED_WATTS * _tensor_flops_a_clock(gpu) / 1024
    memory = gpu.bandwidth_bytes_per_s * _MEMORY_JOULES_A_BYTE
    left = gpu.power_watts * (1 - _BOARD) - memory
    each = max(0.0, left / max(1, gpu.sm_count) - _STATIC_WATTS)
    return float(min(1.0, max(_LEAST_CLOCK, each / watts)) ** _CLOCK_EXPONENT)


def _tensor_flops_a_clock(gpu: GpuSpec) -> int:
    """Dense float16 FLOPs of a multiprocessor's Tensor cores in one clock, by its design: a rate
    that was measured is not to change what kernels reach of it."""
    return tensor_rate(gpu.capability, geforce="GeForce" in gpu.name)


def product_shares(gpu: GpuSpec) -> Floats:
    """The share of the peak rate that matmuls sustain, by dtype."""
    design = design_of(gpu)
    tensor = clock_share(gpu) * (design.fed_share if is_halved(gpu) else design.share)
    share = 1.1 * _SHADER_SHARE.get(gpu.capability, _OTHER_SHADER_SHARE)
    shaders = min(1.0, clock_share(gpu, _SHADER_WATTS) * share)
    return np.array([tensor if name in gpu.tensor_flops else shaders for name in DTYPES])


def _reached(gpu: GpuSpec) -> Floats:
    """The share of the peak rate that libraries reach, by dtype: what power leaves of the clock,
    and what kernels leave of the cores."""
    fed = 1.0 if _tensor_flops_a_clock(gpu) <= _FED_FLOPS else _FED_SHARE
    tensor = clock_share(gpu) * fed * _LIBRARY_SHARE.get(gpu.capability[0], 1.0)
    share = _SHADER_SHARE.get(gpu.capability, _OTHER_SHADER_SHARE)
    shaders = clock_share(gpu, _SHADER_WATTS) * share
    return np.array([tensor if name in gpu.tensor_flops else shaders for name in DTYPES])
