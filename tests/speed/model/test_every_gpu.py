"""Every GPU of the catalogue by its datasheet: what matmuls are said to take is possible there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.speed.model.test_products import costed
from trainfit.hardware import catalogue, find_gpu
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.kernel_times import peak_flops

#: Rows of x, as sequences and their tokens make them, and weights (n, k) of GPT-2 to Llama-3-8B.
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 4096, 8192, 16384)
WEIGHTS = ((768, 768), (3072, 768), (1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))


def times(gpu: Any, weights: tuple[int, int]) -> Any:
    dtype = "bfloat16" if gpu.supports_bf16 else "float16"
    return costed(gpu, *((rows, *weights) for rows in ROWS), dtype=dtype).total


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.key)
def test_more_rows_take_no_less_time_and_no_more_than_the_peak(gpu: Any) -> None:
    """GeForce cards run above their boost clock (a 4090 at 2.7 instead of 2.52 GHz): 10% more."""
    dtype = "bfloat16" if gpu.supports_bf16 else "float16"
    peak = float(peak_flops(gpu)[DTYPES.index(dtype)])
    for n, k in WEIGHTS:
        seconds = times(gpu, (n, k))
        assert (seconds[1:] > 0.97 * seconds[:-1]).all(), (n, k)
        rate = 2 * np.array(ROWS) * n * k / seconds
        assert (rate < 1.1 * peak).all(), (n, k)
        if peak and gpu.tensor_flops:
            assert rate[-1] > 0.3 * peak, (n, k)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("H200", "H100 SXM"),  # bandwidth
        ("H100 SXM", "H100 PCIe"),  # power, clock, multiprocessors
        ("GB200", "B200"),  # power and clock
        ("B200", "H200"),
        ("H100 SXM", "A100 80GB SXM"),
        ("A100 80GB SXM", "A100 80GB PCIe"),  # power
        ("A100 80GB SXM", "A100 40GB SXM"),  # bandwidth
        ("A100 40GB SXM", "V100 32GB SXM"),
        ("RTX PRO 6000", "RTX 5090"),
        ("L40S", "L4"),
        ("A40", "A10"),
        ("RTX A6000", "RTX A4000"),
        ("V100 16GB SXM", "T4"),
        ("L4", "T4"),
    ],
)
def test_the_better_datasheet_takes_no_longer(better: str, worse: str) -> None:
    """Of no size of at least a GFLOP by more than 5%: tiles and waves differ."""
    for n, k in WEIGHTS:
        fast, slow = (times(find_gpu(name), (n, k)) for name in (better, worse))
        large = 2 * np.array(ROWS) * n * k >= 1e9
        assert (fast[large] < 1.05 * slow[large]).all(), (n, k)
