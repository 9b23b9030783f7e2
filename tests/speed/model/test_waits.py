"""Kernels that wait, and misaligned matmuls, as an H200 of the project took (PyTorch 2.11, CUDA 13,
2026-11-27, by PyTorch's profiler)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainfit.hardware import find_gpu
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.efficiency import FITTED
from trainfit.speed.kernel_times import KernelTimes, waiting_seconds
from trainfit.speed.work import CODES, COLUMNS

H200 = find_gpu("H200")


def table(kind: str, **values: int) -> Any:
    every = {"kind": CODES[kind], "dtype": DTYPES.index("bfloat16"), "batches": 1, "launches": 1}
    return np.array([[{**every, **values}.get(name, 0) for name in COLUMNS]], np.int64)


def microseconds(kind: str, gpu: Any = H200, **values: int) -> float:
    return 1e6 * float(KernelTimes(table(kind, **values), gpu).seconds(FITTED)[0])


def normalized(channels: int, side: int, batch: int = 64) -> dict[str, int]:
    """The traffic of a batch normalization's backward pass, and a channel's elements."""
    elements = batch * channels * side * side
    return {"read": 8 * elements, "written": 2 * elements, "rows": elements // channels}


def matmul(rows: int, columns: int, depth: int, gpu: Any = H200) -> float:
    moved = {"read": 2 * (rows + columns) * depth, "written": 2 * rows * columns}
    sizes = {"rows": rows, "columns": columns, "depth": depth}
    return microseconds("matmul", gpu, flops=2 * rows * columns * depth, **moved, **sizes)


@pytest.mark.parametrize(
    ("channels", "side", "measured"),
    [(64, 112, 1404.0), (64, 56, 401.0), (128, 28, 85.4), (512, 28, 153.0), (1024, 14, 80.4)],
)
def test_a_block_a_channel_leaves_multiprocessors_idle(
    channels: int, side: int, measured: float
) -> None:
    found = microseconds("batch_norm_gradient", **normalized(channels, side))
    assert found == pytest.approx(measured, rel=0.25)


def test_channels_of_float32_are_twice_the_bytes_in_little_more_time() -> None:
    """Of so many channels that all multiprocessors have some; by ResNet-50's steps in float32."""
    halves = normalized(1024, 28)
    doubled = {**halves, "read": 2 * halves["read"], "written": 2 * halves["written"]}
    doubled["dtype"] = DTYPES.index("float32")
    for kind, most in (("batch_norm_gradient", 1.4), ("batch_norm_nhwc_gradient", 2.05)):
        took = microseconds(kind, **doubled) / microseconds(kind, **halves)
        assert most - 0.15 < took < most
    # A forward pass reaches in halves already what it reaches at all.
    assert microseconds("batch_norm", **doubled) > 1.9 * microseconds("batch_norm", **halves)


def test_channels_next_to_each_other_need_no_block_each() -> None:
    of_one, of_all = normalized(64, 112), {**normalized(64, 112), "rows": 0}
    assert microseconds("batch_norm_nhwc_gradient", **of_all) < 0.2 * microseconds(
        "batch_norm_gradient", **of_one
    )


@pytest.mark.parametrize(
    ("rows", "length", "measured"), [(100352, 96, 158.9), (25088, 192, 44.0), (12608, 768, 37.9)]
)
def test_a_block_a_row(rows: int, length: int, measured: float) -> None:
    size = 4 * rows * length
    found = microseconds("normalization", read=size, written=size, columns=length, batches=rows)
    assert found == pytest.approx(measured, rel=0.25)


def test_a_block_a_row_of_a_long_softmax() -> None:
    """Forward and backward pass, of an H200's profile; short rows are a warp's, at full pace."""
    size, sizes = 2 * 8192 * 4096, {"batches": 8192, "columns": 4096}
    both = microseconds("softmax", read=size, written=size, **sizes)
    both += microseconds("softmax", read=2 * size, written=size, **sizes)
    assert both == pytest.approx(194, rel=0.15)
    size, sizes = 2 * 8192 * 512, {"batches": 8192, "columns": 512}
    short = microseconds("softmax", read=size, written=size)
    assert microseconds("softmax", read=size, written=size, **sizes) == short


@pytest.mark.parametrize(
    ("kind", "elements", "measured"),
    [
        ("pooling_gradient", 64 * 64 * 112 * 112, 568.2),
        ("pooling", 64 * 64 * 56 * 56, 210.0),
        ("layout", 64 * 256 * 56 * 56, 79.5),
        ("layout", 64 * 32 * 224 * 224, 139.8),  # three channels in tiles of 32
        ("concatenation", 3 * 64 * 12 * 197 * 64, 112.7),
    ],
)
def test_elements_one_by_one(kind: str, elements: int, measured: float) -> None:
    found = 1e6 * float(waiting_seconds(table(kind, rows=elements), H200)[0])
    assert found == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "measured"),
    [
        ((8192, 50257, 768), 6675.0),
        ((8192, 768, 50257), 4519.0),
        ((768, 50257, 8192), 4286.0),
        ((16384, 30522, 768), 3167.0),
        ((768, 30522, 16384), 3112.0),
        ((16384, 768, 30522), 2926.0),
        ((8192, 3072, 768), 56.8),
        ((16384, 768, 3072), 92.7),
    ],
)
def test_vocabularies_that_are_not_aligned(sizes: tuple[int, int, int], measured: float) -> None:
    assert matmul(*sizes) == pytest.approx(measured, rel=0.35)


def test_geforce_tensor_cores_are_no_faster_than_what_feeds_misaligned_operands() -> None:
    """They do 512 FLOPs a clock: GPT-2's vocabulary costs little more than an aligned one."""
    gpu = find_gpu("RTX 4090")
    odd, aligned = matmul(8192, 50257, 768, gpu), matmul(8192, 50304, 768, gpu)
    assert aligned < odd < 1.4 * aligned
    assert matmul(8192, 50257, 768) > 4 * matmul(8192, 50304, 768)


# -- programs of bench/gpu/h200-profile.json ------------------------------------------------------


def test_what_is_transposed_comes_in_pieces() -> None:
    """8192 x 4096 elements: 222 us, of which a third by their bytes."""
    elements = 8192 * 4096
    moved = {"read": 2 * elements, "written": 2 * elements, "rows": elements}
    pieces = microseconds("pointwise_reordered", **moved, columns=34 * elements)
    assert pieces == pytest.approx(222.4, rel=0.15)
    assert microseconds("pointwise_reordered", **moved, columns=4 * elements) < 0.6 * pieces


def test_a_wide_layer_norms_gradient_has_columns_for_all_multiprocessors() -> None:
    def gradient(rows: int, columns: int) -> float:
        size = 2 * rows * columns
        sizes = {"columns": columns, "batches": rows}
        return microseconds("normalization_gradient", read=4 * size, written=size, **sizes)

    assert gradient(8192, 4096) == pytest.approx(90, rel=0.15)  # of 197 us with the forward pass
    # As many bytes of narrow rows take twice as long, and no longer the narrower they are.
    assert 1.8 < gradient(8192 * 8, 512) / gradient(8192, 4096) < 2.3
    assert gradient(8192 * 32, 128) == pytest.approx(gradient(8192 * 8, 512))


def test_depthwise_filters_take_instructions_for_places_and_edges() -> None:
    """32 x 144 x 56 x 56, 3 x 3: 581 us in bfloat16 for the three passes."""

    def all_passes(dtype: str) -> float:
        sides = {"columns": 1, "depth": 9, "batches": 144}
        places, channel = 32 * 56 * 56, {"dtype": DTYPES.index(dtype)}
        tensor = 2 * places * 144
        moved = {"flops": 9 * tensor, "read": tensor, "written": tensor, **channel}
        forward = microseconds("depthwise", rows=places, **sides, **moved)
        back = microseconds("depthwise_input_gradient", rows=places, **sides, **moved)
        moved |= {"read": 2 * tensor, "written": 2 * 9 * 144}
        sizes = {"rows": 1, "columns": 9, "depth": places, "batches": 144}
        return forward + back + microseconds("depthwise_weight_gradient", **sizes, **moved)

    assert all_passes("bfloat16") == pytest.approx(581, rel=0.15)
    assert all_passes("float16") < 0.7 * all_passes("bfloat16")  # cuDNN's kernels


def test_gelu_takes_instructions_where_the_memory_is_fast() -> None:
    """GELU and its gradient of 8192 x 4096 elements, without the filled gradient: 109 us."""
    elements = 8192 * 4096
    size, sizes = 2 * elements, {"columns": elements}

    def both(gpu: Any = H200) -> float:
        forward = microseconds("pointwise", gpu, read=size, written=size, **sizes, depth=32)
        return forward + microseconds(
            "pointwise", gpu, read=2 * size, written=size, **sizes, depth=45
        )

    assert both() == pytest.approx(109, rel=0.1)
    geforce = find_gpu("RTX 4090")
    plain = microseconds("pointwise", geforce, read=size, written=size)
    plain += microseconds("pointwise", geforce, read=2 * size, written=size)
    assert both(geforce) == pytest.approx(plain)
