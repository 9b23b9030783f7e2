"""Times of matmuls and fused attention: launch, tiles, waves, splits, caches, memory, power.

A matmul of m x k by k x n is computed in tiles of its result, one at a time on a multiprocessor.
A tile takes what is more: its arithmetic at the Tensor cores' rate, less of it the smaller the
tile, or the passage of its operands from the L2 cache; that of its result to there comes on top:
the cores wait for it, which weighs the more the shorter the sums are. Where few tiles are to be
had, several multiprocessors share the sum of one (split k), whose parts are added up after that.
Libraries choose tile and split by what they expect to be fastest; the fastest is
taken here. Next to the tiles runs the traffic with the device's memory: of the weights once, of
what is in the L2 cache only at that one's rate. Last, Tensor cores that are busy throughout draw
the board's power, and the clock falls.

What these causes cost is a :class:`Design`, one for each of NVIDIA's architectures; a GPU of it
is its datasheet: multiprocessors, clock, rate, bandwidth, L2. They are fitted to measured kernels
and checked on GPUs that they were not fitted to (``bench/kernel_accuracy.py``).
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_figures import tensor_rate
from trainfit.results.runs.steps import DTYPES

Floats = NDArray[np.float64]

#: Tiles of results (rows, columns) that kernels for matmuls come in (CUTLASS, cuBLAS).
_TILES: Final = (
    *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
    *((64, 32), (32, 64), (16, 64), (64, 16)),
)
#: Multiprocessors that share a tile's sum, and the least part of it worth one of its own.
_SPLITS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
_LEAST_DEPTH: Final = 128
#: Elements by which a tile's sum goes on at once.
_DEPTH_STEP: Final = 64
#: Of the bandwidth, what is left where ECC's codes pass the same bus: a T4 copies at 220 of 320
#: GB/s, a V100 (HBM2) at 750 of 900 (Jia et al., "Dissecting the NVidia Turing T4 GPU", 2019).
INLINE_ECC: Final = 0.83
#: Exponent of the smooth maximum of tiles and traffic, which run next to each other.
_SHARPNESS: Final = 3.0
#: The largest tile computes at the full rate; others at their part of its results to the power of
#: this: fewer products for each operand that is loaded.
_LARGEST_TILE: Final = 256 * 128
_SMALLER_TILE: Final = 0.15
#: Shares of the L2 cache up to which operands are still in it: the weights that were last used some
#: kernels ago (rows of the published measurements take six in turn), and what the kernel before
#: made with what this one makes. Around them the share found falls over a factor of about two.
_KEPT_WEIGHT: Final = 0.13
_KEPT_REST: Final = 0.73
_KEPT_EDGE: Final = 8
#: Of a split's parts, float32, the share that passes beyond the L2.
_PARTS: Final = 0.66
#: How the time grows with Tensor cores that are busier than power allows: dynamic power goes with
#: the clock and the square of the voltage, which follows it.
_POWER: Final = 0.58
#: FLOPs a clock of a multiprocessor's Tensor cores in a GeForce, from Ampere on.
_HALVED: Final = 512
#: Where no boost clock is known (Hz).
USUAL_CLOCK: Final = 1.5e9
_BYTES: Final = {
    **dict.fromkeys(("float32", "tfloat32"), 4),
    **dict.fromkeys(("float16", "bfloat16"), 2),
    **dict.fromkeys(("float8", "integer"), 1),
    "float64": 8,
}


@dataclasses.dataclass(frozen=True)
class Design:
    """What matmuls cost on an architecture.

    ``floor_s``: a launched kernel's least time; ``share`` of the Tensor cores' rate that kernels
    sustain; ``l2_bytes`` that a multiprocessor gets from the L2 cache in a clock; ``memory`` the
    share of the bandwidth that is reached, and ``l2`` the L2's as a multiple of it; ``split_s``:
    adding up the parts of a split sum; ``whole``: how far multiprocessors wait for the last wave of
    tiles (1: kernels of one tile a block; 0: the rest is shared); ``busy``: the share of the
    Tensor cores' rate above which power is the limit; ``fed_share`` replaces ``share`` for those of
    a GeForce, at half of the rate of others of the architecture (above 1 where cards clock higher
    than rated). Of fused attention: ``attention`` is the share of the Tensor cores' rate,
    ``softmax`` what else a pair of a query and a key takes, in elements of a head, and
    ``queries_s`` what beginning and ending a block of queries takes. ``streams``: of the bandwidth,
    what kernels reach that read and write in order, next to those of a GeForce.
    """

    floor_s: float
    share: float
    l2_bytes: float
    memory: float
    l2: float
    split_s: float
    whole: float
    busy: float
    fed_share: float = 1.0
    attention: float = 0.5
    softmax: float = 15.0
    queries_s: float = 3.0e-6
    streams: float = 1.0


#: Blocks of one tile each; of A100 SXM.
AMPERE: Final = Design(
    3.25e-6, 0.948, 34, 0.751, 1.16, 2.15e-6, 1.0, 1.0, attention=0.63, streams=0.87
)
#: Of L40S: a large L2; memory without ECC (with it, :data:`INLINE_ECC` of that).
ADA: Final = Design(
    1.85e-6, 0.73, 17.2, 0.937, 5.3, 1.78e-6, 1.0, 1.0, 1.08, attention=0.60, softmax=17.0
)
#: Persistent kernels, clusters that share operands; of H100 SXM, and of an H200 what a block of
#: queries begins and ends with (the H100's short rows are of paged keys).
HOPPER: Final = Design(
    *(2.58e-6, 0.975, 66, 0.877, 1.35, 2.6e-6, 0.02, 0.77),
    attention=0.88,
    softmax=50.0,
    queries_s=2.0e-6,
    streams=0.91,
)
#: Two dies, Tensor memory; of B200.
BLACKWELL: Final = Design(
    2.07e-6, 0.97, 92, 0.785, 1.35, 3.1e-6, 0.05, 0.70, attention=1.11, softmax=133.0, streams=0.88
)
#: No measured kernels of these were at hand, only large matmuls (docs/decisions/0040): Volta and
#: Turing, Ampere with GDDR, and Blackwell with GDDR (Ada's multiprocessor, more power each).
VOLTA: Final = dataclasses.replace(AMPERE, share=0.80, attention=0.4, streams=1.0)
AMPERE_GDDR: Final = dataclasses.replace(
    AMPERE, share=0.80, memory=0.93, fed_share=1.1, streams=1.0
)
BLACKWELL_GDDR: Final = dataclasses.replace(
    ADA, share=0.76, fed_share=0.93, memory=0.90, streams=0.90
)


def design_of(gpu: GpuSpec) -> Design:
    """The design of the GPU's architecture."""
    return DESIGNS[max(since for since in DESIGNS if since <= gpu.capability)]


#: By the compute capability that each is of, and of all after it up to the next.
DESIGNS: Final = {
    (0, 0): VOLTA,
    (8, 0): AMPERE,
    (8, 6): AMPERE_GDDR,
    (8, 9): ADA,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (12, 0): BLACKWELL_GDDR,
}


def is_halved(gpu: GpuSpec) -> bool:
    """Has it Tensor cores of a GeForce, whose float32 sums are at half of the rate?"""
    return tensor_rate(gpu.capability, geforce="GeForce" in gpu.name) <= _HALVED


def rate_share(gpu: GpuSpec, share: float) -> float:
    """``share`` of an architecture's Tensor cores, on this GPU: at half of their rate, what else
    there is to do takes as long."""
    return 2 / (1 + 1 / share) if is_halved(gpu) else share


class Products(NamedTuple):
    """Seconds of matmuls: all of a kernel, and what its arithmetic and its traffic take alone."""

    total: Floats
    arithmetic: Floats
    traffic: Floats


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Matmuls, a value each: ``rows`` x ``depth`` by ``depth`` x ``columns``, ``batches`` of them;
    the bytes that they read and write, and their dtype's code (of ``DTYPES``)."""

    rows: Floats
    columns: Floats
    depth: Floats
    batches: Floats
    read: Floats
    written: Floats
    dtype: NDArray[np.int64]


def product_seconds(sizes: Sizes, rate: Floats, gpu: GpuSpec, design: Design) -> Products:
    """Seconds of each matmul; ``rate`` is the whole GPU's FLOP/s in each one's dtype, as far as its
    power and its kind of cores allow."""
    traffic, cache = _traffic(sizes, gpu, design)
    best = np.full(len(rate), np.inf)
    arithmetic = np.zeros(len(rate))
    each = rate / gpu.sm_count
    element = _size_of(sizes.dtype)
    passage = element / (design.l2_bytes * _clocks(gpu, sizes.dtype))
    depth = np.ceil(sizes.depth / _DEPTH_STEP) * _DEPTH_STEP
    most_parts = np.maximum(1.0, np.floor(sizes.depth / _LEAST_DEPTH))
    # Shader cores have kernels of one tile a block on every architecture, and power of their own.
    on_tensor_cores = np.isin(sizes.dtype, [DTYPES.index(name) for name in gpu.tensor_flops])
    whole = np.where(on_tensor_cores, design.whole, 1.0)
    busy = np.where(on_tensor_cores, design.busy, np.inf)
    results = 4 * _PARTS * sizes.rows * sizes.columns * sizes.batches / cache
    for high, wide in _TILES:
        count = np.ceil(sizes.rows / high) * np.ceil(sizes.columns / wide) * sizes.batches
        smaller = (high * wide / _LARGEST_TILE) ** _SMALLER_TILE
        step = np.maximum(2 * high * wide / (each * smaller), (high + wide) * passage)
        result = element * high * wide * gpu.sm_count / cache
        for parts in _SPLITS:
            possible = parts <= most_parts
            if not possible.any():
                break
            waves = count * parts / gpu.sm_count
            waves = np.maximum(1.0, waves + whole * (np.ceil(waves) - waves))
            alone = waves * step * depth / parts
            total = _either(alone + waves * result, traffic)
            if parts > 1:
                total += design.split_s + results * parts
            better = possible & (total < best)
            best = np.where(better, total, best)
            arithmetic = np.where(better, alone, arithmetic)
    flops = 2 * sizes.rows * sizes.columns * sizes.depth * sizes.batches
    slower = np.maximum(1.0, flops / rate / best / busy) ** _POWER
    return Products(best * slower + design.floor_s, arithmetic * slower, traffic)


def _either(one: Floats, other: Floats) -> Floats:
    found: Floats = (one**_SHARPNESS + other**_SHARPNESS) ** (1 / _SHARPNESS)
    return found


def _traffic(sizes: Sizes, gpu: GpuSpec, design: Design) -> tuple[Floats, float]:
    """Seconds of each matmul's, and the L2 cache's bandwidth."""
    bandwidth = gpu.bandwidth_bytes_per_s * design.memory
    bandwidth *= INLINE_ECC if gpu.inline_ecc else 1.0
    cache = float(gpu.l2_bytes or 0)
    weight = sizes.columns * sizes.depth * sizes.batches * _size_of(sizes.dtype)
    weight = np.minimum(weight, sizes.read)
    rest = sizes.read - weight + sizes.written
    of_memory = weight * _beyond(weight, _KEPT_WEIGHT * cache)
    of_memory += rest * _beyond(rest, _KEPT_REST * cache)
    of_cache = (weight + rest) / design.l2
    return np.maximum(of_memory, of_cache) / bandwidth, bandwidth * design.l2


def _beyond(size: Floats, kept: float) -> Floats:
    """The share of so many bytes that is not found in the cache."""
    found: Floats = 1 / (1 + (kept / np.maximum(size, 1.0)) ** _KEPT_EDGE)
    return found


def _size_of(dtype: NDArray[np.int64]) -> Floats:
    """Bytes of an element."""
    return np.array([_BYTES[name] for name in DTYPES], dtype=np.float64)[dtype]


def _clocks(gpu: GpuSpec, dtype: NDArray[np.int64]) -> Floats:
    """The clock that the GPU's rate in each dtype is told at (Hz): where a rate was measured, all
    that feeds the cores follows it."""
    a_clock = tensor_rate(gpu.capability, geforce="GeForce" in gpu.name) * gpu.sm_count
    clocks = [
        gpu.tensor_flops[name] / (a_clock * 2 / _BYTES[name])
        if a_clock and name in gpu.tensor_flops
        else gpu.boost_clock_hz or USUAL_CLOCK
        for name in DTYPES
    ]
    return np.array(clocks)[dtype]


# ---
# Times of fused attention by their causes: tiles of queries, causal halves, what is no product. A
# kernel takes a block for every tile of queries of every head. A block goes over the keys that its
# queries see: under a causal mask those before its last query, in whole tiles of keys. For each
# pair of a query and a key it takes the Tensor cores' products, and the exponential and the
# rescaling, which run on other units: they weigh the more the smaller a head is. Blocks share the
# multiprocessors evenly, but none ends before the longest block has.


#: Queries of a block, and keys that it takes at once (FlashAttention 2).
_TILE: Final = 128
#: Fewer come in tiles of whole instructions.
_ROWS_AT_ONCE: Final = 16
#: Exponent of the smooth maximum of all blocks' share of a multiprocessor and the longest block.
_BLOCKS_SHARPNESS: Final = 1.4
#: A launch with the sizes, pointers and random state that it needs: of 128 to 512 tokens on an H200
#: (bench/gpu/h200-profile.json).
_FLOOR_S: Final = 4.0e-6
#: What the backward pass reaches of the forward's rate: its tiles are held in fewer registers, and
#: gradients of queries are added up across blocks (FlashAttention 2: 0.6 to 0.75).
_GRADIENT: Final = 0.69
#: Below this share of all pairs a mask is causal.
_CAUSAL: Final = 0.8


def attention_seconds(
    sizes: Sizes, flops: Floats, gradient: Floats, rate: Floats, gpu: GpuSpec, design: Design
) -> tuple[Floats, Floats]:
    """Seconds of each fused attention, and of its arithmetic alone.

    ``rows`` of ``sizes`` are queries, ``columns`` keys, ``depth`` a head's size and ``batches``
    batch times heads; ``flops`` what the mathematics asks for; ``gradient`` is 1 in a backward
    pass, 0 else; ``rate`` the GPU's peak FLOP/s in each one's dtype.
    """
    products = np.where(gradient > 0, 10.0, 4.0)
    pairs = np.maximum(1.0, sizes.rows * sizes.columns)
    seen = flops / np.maximum(1.0, products * sizes.depth * sizes.batches)
    causal = seen < _CAUSAL * pairs
    high, wide = _tile(sizes.rows), _tile(sizes.columns)
    count = np.ceil(sizes.rows / high)
    keys = np.ceil(sizes.columns / wide) * wide
    # The masked part of the tiles across the diagonal is computed, too.
    met = np.where(causal, np.minimum(keys, seen / np.maximum(1.0, sizes.rows) + wide / 2), keys)
    share = rate_share(gpu, design.attention) * np.where(gradient > 0, _GRADIENT, 1.0)
    each = products * (sizes.depth + design.softmax) / (rate * share / gpu.sm_count)
    busy = count * high * met * each * sizes.batches / gpu.sm_count
    longest = high * keys * each
    begun = count * (high / _TILE) * design.queries_s * sizes.batches / gpu.sm_count
    alone = np.maximum(busy, longest)
    together = (busy + begun) ** _BLOCKS_SHARPNESS + (
        longest + design.queries_s
    ) ** _BLOCKS_SHARPNESS
    found: Floats = together ** (1 / _BLOCKS_SHARPNESS) + _FLOOR_S
    return found, alone


def _tile(side: Floats) -> Floats:
    found: Floats = np.minimum(_TILE, np.ceil(side / _ROWS_AT_ONCE) * _ROWS_AT_ONCE)
    return found
