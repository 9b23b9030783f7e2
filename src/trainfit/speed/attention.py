"""Times of fused attention by their causes: tiles of queries, causal halves, what is no product.

A kernel takes a block for every tile of queries of every head. A block goes over the keys that its
queries see: under a causal mask those before its last query, in whole tiles of keys. For each
pair of a query and a key it takes the Tensor cores' products, and the exponential and the
rescaling, which run on other units: they weigh the more the smaller a head is. Blocks share the
multiprocessors evenly, but none ends before the longest block has.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.speed.products import Design, Floats, Sizes, rate_share

#: Queries of a block, and keys that it takes at once (FlashAttention 2).
_TILE: Final = 128
#: Fewer come in tiles of whole instructions.
_ROWS_AT_ONCE: Final = 16
#: Exponent of the smooth maximum of all blocks' share of a multiprocessor and the longest block.
_SHARPNESS: Final = 1.4
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
    """Of each fused attention, and what its arithmetic takes alone.

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
    together = (busy + begun) ** _SHARPNESS + (longest + design.queries_s) ** _SHARPNESS
    found: Floats = together ** (1 / _SHARPNESS) + _FLOOR_S
    return found, alone


def _tile(side: Floats) -> Floats:
    found: Floats = np.minimum(_TILE, np.ceil(side / _ROWS_AT_ONCE) * _ROWS_AT_ONCE)
    return found
