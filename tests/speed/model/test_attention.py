"""Times of fused attention: tiles of queries, causal halves, few heads, backward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainfit.hardware import find_gpu
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.efficiency import FITTED
from trainfit.speed.kernel_times import KernelTimes
from trainfit.speed.work import COLUMNS

A100 = find_gpu("A100 80GB SXM")


def seconds(
    tokens: int, heads: int = 64, size: int = 128, gpu: Any = A100, *,
    causal: bool = True, backward: bool = False, dtype: str = "bfloat16",
) -> float:  # fmt: skip
    pairs = tokens * (tokens + 1) // 2 if causal else tokens**2
    values = {
        "kind": KINDS.index("attention_gradient" if backward else "attention"),
        "dtype": DTYPES.index(dtype),
        "flops": (10 if backward else 4) * heads * pairs * size,
        "read": 6 * heads * tokens * size, "written": 2 * heads * tokens * size,
        "rows": tokens, "columns": tokens, "depth": size, "batches": heads, "launches": 1,
    }  # fmt: skip
    table = np.array([[values[name] for name in COLUMNS]], dtype=np.int64)
    return float(KernelTimes(table, gpu).seconds(FITTED)[0])


def test_long_attention_runs_at_the_published_rates() -> None:
    """bfloat16, heads of 128: A100 174 TFLOP/s, L40S 184, H100 619, at 16,384 tokens."""
    for name, rate in (("A100 80GB SXM", 174e12), ("L40S", 184e12), ("H100 SXM", 619e12)):
        tokens, heads = 16384, 64
        flops = 4 * heads * 128 * tokens * (tokens + 1) / 2
        assert flops / seconds(tokens, heads, gpu=find_gpu(name)) == pytest.approx(rate, rel=0.1)


def test_a_causal_mask_saves_half_of_long_sequences_and_less_of_short_ones() -> None:
    for tokens, least, most in ((16384, 0.49, 0.55), (128, 0.8, 1.0)):
        saved = seconds(tokens) / seconds(tokens, causal=False)
        assert least <= saved <= most


def test_few_heads_do_not_fill_the_multiprocessors() -> None:
    """One head of 4,096 tokens: 32 blocks for 108 multiprocessors; none ends before the longest."""
    assert seconds(4096, 1) > 0.3 * seconds(4096, 16)
    assert seconds(4096, 128) == pytest.approx(2 * seconds(4096, 64), rel=0.1)


def test_smaller_heads_take_longer_a_product() -> None:
    """The exponential is of every pair, whatever the head's size."""
    assert seconds(8192, 64, 64) > 0.5 * seconds(8192, 64, 128)


def test_a_backward_pass_takes_longer_than_its_products() -> None:
    assert 2.5 < seconds(8192, backward=True) / seconds(8192) < 4.5


def test_a_geforces_tensor_cores_are_half_as_fast_and_all_else_is_not() -> None:
    one, other = (seconds(8192, gpu=find_gpu(name)) for name in ("L40S", "RTX 4090"))
    assert 1.0 < other / one < 2.0


def test_float32_on_tensor_cores_is_slower_than_halves() -> None:
    assert seconds(4096, dtype="tfloat32") > 1.5 * seconds(4096)
