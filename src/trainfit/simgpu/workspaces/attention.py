"""Scratch memory of PyTorch's attention kernels, in addition to their results.

Sources: ATen/native/transformers/cuda/flash_attn/flash_api.cpp, .../cuda/attention_backward.cu
and .../cuda/mem_eff_attention/kernel_backward.h, read in versions of 2024 to 2026.
"""

from __future__ import annotations

from trainfit.simgpu.workspaces.models import ceil_div, model, round_up


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
    """Memory-efficient attention's backward: delta, and float32 accumulators for halves.

    dQ is accumulated in float32 where the result is of half precision; dK and dV too, when
    the head is wider than the kernel's registers (``in_registers``), once for each part
    that the keys are split into (at most 200 // (batch * heads) then).
    """
    delta = batch * heads * round_up(queries, 32) * 4
    if not half:
        return delta
    accumulators = round_up(queries, 64) * head_size
    if max(head_size, value_size) > in_registers:
        splits = max(1, min(ceil_div(keys, 128), 200 // (batch * heads)))
        accumulators += splits * round_up(keys, 64) * (head_size + value_size)
    return delta + batch * heads * accumulators * 4
