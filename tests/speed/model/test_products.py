"""Times of matmuls by their causes: launch, tiles and waves, splits, caches, memory, power."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.hardware import catalogue, find_gpu
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.kernel_times import peak_flops, product_shares
from trainfit.speed.products import Design, Products, Sizes, design_of, product_seconds

A100, H100, H200, L40S = (find_gpu(name) for name in ("A100 80GB SXM", "H100 SXM", "H200", "L40S"))


def costed(
    gpu: Any, *shapes: tuple[int, int, int], dtype: str = "bfloat16", **design: float
) -> Any:
    """Products (m, n, k) with weights of their own."""
    m, n, k = (np.array(each, dtype=np.float64) for each in zip(*shapes, strict=True))
    size = {"float32": 4, "tfloat32": 4, "float8": 1}.get(dtype, 2)
    codes = np.full(len(m), DTYPES.index(dtype))
    sizes = Sizes(m, n, k, np.ones(len(m)), size * (m * k + k * n), size * m * n, codes)
    rate = np.full(len(m), (peak_flops(gpu) * product_shares(gpu))[DTYPES.index(dtype)])
    return product_seconds(sizes, rate, gpu, dataclasses.replace(design_of(gpu), **design))


def seconds(gpu: Any, *shape: int, **options: Any) -> float:
    return float(costed(gpu, shape, **options).total[0])  # type: ignore[arg-type]


def test_no_launched_kernel_takes_less_than_the_floor() -> None:
    for gpu in (A100, H100, L40S):
        design = design_of(gpu)
        assert seconds(gpu, 1, 32, 32) == pytest.approx(design.floor_s, rel=0.2)


def test_a_skinny_product_takes_as_long_as_its_weights_pass_from_memory() -> None:
    """m = 1, weights of 1 GiB: bytes by the bandwidth that is reached; of H200 by its datasheet."""
    for gpu in (A100, H100, H200):
        found = seconds(gpu, 1, 16384, 32768)
        passing = 2 * 16384 * 32768 / (gpu.bandwidth_bytes_per_s * design_of(gpu).memory)
        assert passing <= found <= 1.1 * passing
    assert seconds(H200, 1, 16384, 32768) == pytest.approx(
        seconds(H100, 1, 16384, 32768) * 3.35 / 4.8, rel=0.05
    )


def test_weights_that_the_l2_cache_keeps_are_not_read_from_memory() -> None:
    """8 MiB are kept of L40S's 96 MiB, 20 MiB are not."""
    kept, read = seconds(L40S, 8, 2048, 2048), seconds(L40S, 8, 5120, 2048)
    assert read > 3 * kept
    small = dataclasses.replace(L40S, l2_bytes=6 << 20)
    assert seconds(small, 8, 2048, 2048) > 1.8 * kept


def test_a_wave_that_is_begun_is_waited_for_but_by_persistent_kernels() -> None:
    """One row of tiles more than the multiprocessors take at once."""
    for gpu, least in ((A100, 1.4), (H100, 1.0)):
        full, more = seconds(gpu, 128 * gpu.sm_count, 128, 128), 0.0
        more = seconds(gpu, 128 * (gpu.sm_count + 1), 128, 128)
        assert more >= full * (1 + 1e-9) and (least == 1.0 or more < 2 * full)
    steps = [seconds(H100, rows, 4096, 4096) for rows in range(2048, 4097, 128)]
    assert all(b <= 1.12 * a for a, b in itertools.pairwise(steps))


def test_deep_products_of_few_tiles_are_split() -> None:
    deep = seconds(A100, 64, 64, 1 << 20)
    alone = 2 * 64 * 64 * (1 << 20) / (312e12 / 108)
    assert deep < alone / 4
    # Adding up the parts is worth it for a long sum only.
    assert seconds(A100, 64, 64, 512) == seconds(A100, 64, 64, 512, split_s=1.0)


def test_busy_tensor_cores_are_slowed_by_power_and_idle_ones_are_not() -> None:
    for shape, slower in (((8192, 8192, 8192), True), ((1, 8192, 8192), False)):
        limited, free = (seconds(H100, *shape, busy=each) for each in (0.7, 1.0))
        assert (limited > 1.05 * free) is slower


@pytest.mark.parametrize(("dtype", "share"), [("tfloat32", 2.0), ("float8", 0.5)])
def test_other_dtypes_follow_their_rates(dtype: str, share: float) -> None:
    shape = (8192, 8192, 16384)
    found = seconds(H100, *shape, dtype=dtype) / seconds(H100, *shape)
    assert found == pytest.approx(share, rel=0.05)


def test_the_published_rate_of_a_large_product() -> None:
    """H100 SXM: 713 to 876 TFLOP/s (aiconfigurator; an H200 of the project 788)."""
    for gpu in (H100, H200):
        assert 713e12 < 2 * 8192**3 / seconds(gpu, 8192, 8192, 8192) < 876e12


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from((A100, H100, L40S, find_gpu("B200"), find_gpu("T4"))),
    st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000),
)  # fmt: skip
def test_a_product_takes_no_less_than_its_causes_and_than_one_that_it_contains(
    gpu: Any, rows: int, columns: int, depth: int
) -> None:
    found: Products = costed(gpu, (rows, columns, depth), (rows, columns, max(1, depth // 2)))
    whole, part = found.total.tolist()
    assert whole >= 0.95 * part  # ways to divide a sum differ
    assert whole >= max(found.arithmetic[0], found.traffic[0])


def test_every_gpu_of_the_catalogue_has_a_design() -> None:
    for gpu in catalogue():
        design = design_of(gpu)
        assert isinstance(design, Design) and 0 < design.share <= 1 and design.memory <= 1


def test_many_sizes_at_once_are_as_one_by_one() -> None:
    shapes = [(1, 4096, 4096), (4096, 4096, 4096), (96, 512, 65536), (7, 33, 65)]
    together = costed(H100, *shapes).total.tolist()
    assert together == [seconds(H100, *shape) for shape in shapes]
