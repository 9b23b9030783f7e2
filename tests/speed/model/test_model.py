"""The speed model: kernels' times on a GPU, the step that they make, every batch size."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.hardware import catalogue, find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import PHASES, NotAffineError
from trainfit.results.runs.steps import DTYPES, KINDS
from trainfit.speed.efficiency import DEFAULT, Efficiency
from trainfit.speed.kernel_times import KernelTimes, clock_share, peak_flops, product_shares
from trainfit.speed.measured import product_flops
from trainfit.speed.step import (
    HostCosts,
    HostedGpu,
    TimedWork,
    issue_seconds,
    step_time,
)
from trainfit.speed.timeline import Timeline
from trainfit.speed.work import COLUMNS, Work, WorkLaw

RTX_3090 = find_gpu("RTX 3090")
#: Groups of a convolution are no slower than others.
ALIKE = {"wide_groups": 1.0, "uneven_groups": 1.0}
#: Every kernel at its peak, without a least time.
IDEAL = Efficiency({}, {}, small_tile=0.0, unaligned=1.0, cache=0.0, least_s=0.0, **ALIKE)
#: TFLOP/s of products of 8192 x 8192 matrices, in float32 without TF32 and in half precision
#: (``None``: no Tensor cores), by https://github.com/zzc0721/torch-performance-test-data ("db":
#: database.md; PyTorch 2.2 to 2.9). ``product_shares`` are from it: no test on held-out GPUs.
PUBLISHED: dict[str, tuple[float, float | None, str]] = {
    "P100 PCIe": (8.63, None, "issue 177"),
    "P100 SXM": (9.50, None, "issue 180"),
    "V100 16GB SXM": (14.4, 97.4, "issue 140"),
    "T4": (4.17, 41.9, "db"),
    "A100 40GB PCIe": (17.6, 206.0, "issue 108"),
    "A100 80GB SXM": (19.2, 262.0, "db"),
    "RTX 3080 10GB": (21.0, 63.8, "issue 114"),
    "RTX 3090": (24.5, 76.0, "db"),
    "RTX A4000": (11.9, 58.5, "issue 97"),
    "A40": (23.7, 110.0, "issue 185"),
    "L4": (10.7, 56.6, "issue 120"),
    "RTX 4090": (54.7, 164.0, "db"),
    "H100 PCIe": (37.0, 465.0, "issue 95"),
    "H100 SXM": (51.8, 767.0, "issue 79"),
    "B200": (66.2, 1662.0, "db"),
    "RTX 5080": (33.1, 102.6, "issue 104"),
    "RTX 5090": (66.3, 230.0, "pull 15"),
}
SIDE = 8192


def row(kind: str, dtype: str = "float16", **values: int) -> list[int]:
    known = {"kind": KINDS.index(kind), "dtype": DTYPES.index(dtype), "batches": 1, "launches": 1}
    return [{**known, **values}.get(name, 0) for name in COLUMNS]


def product(rows: int, columns: int, depth: int, batches: int = 1, **values: int) -> list[int]:
    flops = 2 * rows * columns * depth * batches
    sizes = {"rows": rows, "columns": columns, "depth": depth, "batches": batches}
    return row("matmul", flops=flops, **sizes, **values)


def work(*rows: list[int], phases: tuple[str, ...] = ()) -> Work:
    """One operator a kernel."""
    count = len(rows)
    of_ops = [PHASES.index(phase) for phase in phases or ("forward",) * count]
    return Work(
        np.array(rows, dtype=np.int64).reshape(count, len(COLUMNS)),
        np.zeros(count, dtype=np.int64),
        np.arange(count),
        np.array(of_ops, dtype=np.int64),
    )


def times(*rows: list[int], gpu: Any = RTX_3090, efficiency: Efficiency = IDEAL) -> list[float]:
    return KernelTimes(work(*rows).table, gpu).seconds(efficiency).tolist()  # type: ignore[no-any-return]


# --- Kernels ------------------------------------------------------------------------------------


def test_traffic_takes_its_share_of_the_bandwidth() -> None:
    copy = row("pointwise", read=1 << 30, written=1 << 30)
    (seconds,) = times(copy)
    assert seconds == pytest.approx((2 << 30) / RTX_3090.bandwidth_bytes_per_s)
    half = dataclasses.replace(IDEAL, traffic={"pointwise": 0.5})
    assert times(copy, efficiency=half) == [pytest.approx(2 * seconds)]


def test_threads_that_take_turns_wait_for_each() -> None:
    """196 threads with a million turns each: the bandwidth does not matter."""
    size = 196 << 21
    slow = row("resampling", read=size // 4, written=size, rows=196, depth=1 << 20)
    assert times(slow) == [pytest.approx(300e-9 * (1 << 20))]
    crowded = row("resampling", read=size, written=size, rows=82 * 1024 + 1, depth=1 << 20)
    assert times(crowded) == [pytest.approx(2 * 300e-9 * (1 << 20))]
    (free,) = times(row("resampling", read=size // 4, written=size))
    assert free < 1e-3


def test_a_large_product_runs_at_the_peak_of_its_dtype() -> None:
    sizes = (82 * 128 * 8, 128 * 16, 4096)
    for dtype in ("float16", "tfloat32", "float32"):
        one = product(*sizes)
        one[COLUMNS.index("dtype")] = DTYPES.index(dtype)
        (seconds,) = times(one)
        # Filling each tile's pipeline.
        assert seconds == pytest.approx(2 * np.prod(sizes) / sustained(RTX_3090, dtype), rel=0.05)


def sustained(gpu: Any, dtype: str) -> float:
    """FLOP/s of large matmuls."""
    return float((peak_flops(gpu) * product_shares(gpu))[DTYPES.index(dtype)])


@settings(max_examples=60)
@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 8192), st.integers(1, 64))
def test_no_product_is_faster_than_the_peak(
    rows: int, columns: int, depth: int, batches: int
) -> None:
    one = product(rows, columns, depth, batches)
    (seconds,) = times(one)
    least = one[COLUMNS.index("flops")] / sustained(RTX_3090, "float16")
    assert seconds >= least * (1 - 1e-9)
    # And no smaller than one that it contains.
    assert seconds >= times(product(max(1, rows // 2), columns, depth, batches))[0] * (1 - 1e-9)


def test_a_product_that_fills_no_tile_takes_as_long_as_one_that_does() -> None:
    full, part = times(product(128, 128, 4096, 82), product(100, 100, 4096, 82))
    assert part > 0.7 * full
    # One tile more than the multiprocessors take at once is more than its share.
    even, uneven = times(product(128, 128, 4096, 82), product(128, 128, 4096, 83))
    assert uneven > (1 + 2 / 82) * even


def test_deep_products_of_few_tiles_are_split_over_the_multiprocessors() -> None:
    (seconds,) = times(product(64, 64, 1 << 20))
    alone = 2 * 64 * 64 * (1 << 20) / (peak_flops(RTX_3090)[2] / RTX_3090.sm_count)
    assert seconds < alone / 8


def test_the_larger_of_arithmetic_and_traffic_counts() -> None:
    computes = product(8192, 8192, 8192)
    moves = row("pointwise", read=1 << 28, written=1 << 28)
    both = [max(a, b) for a, b in zip(computes, row("matmul", read=1 << 28), strict=True)]
    a, b, c = times(computes, moves, both)
    assert a <= c <= a * 1.1 and b > 0


def test_every_launch_takes_its_least_time() -> None:
    small = dataclasses.replace(IDEAL, least_s=2e-6)
    one, many = times(row("fill", written=4), row("fill", written=4, launches=5), efficiency=small)
    assert one == pytest.approx(2e-6, rel=1e-3) and many == pytest.approx(1e-5, rel=1e-3)


def test_odd_sides_are_slower() -> None:
    slow = dataclasses.replace(IDEAL, unaligned=0.5)
    for depth, factor in ((4096, 1), (4095, 2)):
        one = product(4096, 4096, depth)
        found = times(one, efficiency=slow)[0] / times(one)[0]
        assert found == pytest.approx(factor, rel=0.06)  # pipelines do not become slower


def grouped(channels: int, groups: int, depth: int, way: str = "") -> list[int]:
    """A pass of a convolution of channels-last tensors: so many channels of each group."""
    rows, columns = (channels, depth) if way == "_weight_gradient" else (1 << 18, channels)
    last = 1 << 18 if way == "_weight_gradient" else depth
    sizes = {"rows": rows, "columns": columns, "depth": last, "batches": groups}
    return row(f"grouped_nhwc{way}", flops=1 << 40, **sizes)


def test_wide_and_uneven_groups_are_slower() -> None:
    slow = dataclasses.replace(IDEAL, wide_groups=0.25, uneven_groups=0.2)
    for one, factor in (
        (grouped(64, 4, 9 * 64), 4),
        (grouped(32, 4, 9 * 32), 1),
        (grouped(64, 4, 9 * 64, "_weight_gradient"), 4),
        (grouped(16, 20, 9 * 16), 5),  # 320 channels
        (grouped(16, 20, 9 * 16, "_weight_gradient"), 5),
        (grouped(8, 16, 9 * 4), 5),  # 64 channels in, 128 out
        (grouped(8, 16, 9 * 4, "_weight_gradient"), 5),
        (grouped(8, 16, 9 * 2, "_input_gradient"), 1),  # a step of 2 meets a quarter of the taps
        (row("grouped", flops=1 << 40, rows=1 << 18, columns=64, depth=64), 1),
    ):
        assert times(one, efficiency=slow)[0] == pytest.approx(factor * times(one)[0])


def test_copies_to_and_from_the_host_are_no_kernels() -> None:
    for kind in ("upload", "upload_pinned", "download", "download_pinned", "wait"):
        assert times(row(kind, read=1 << 20, written=1 << 20)) == [0.0]


def test_a_capped_board_cannot_hold_its_clock() -> None:
    assert clock_share(find_gpu("RTX 3090")) == 1.0
    assert clock_share(find_gpu("T4")) < 0.85
    whole, capped = (find_gpu(name) for name in ("RTX PRO 6000", "RTX PRO 6000 Max-Q"))
    assert clock_share(capped) < 0.8 < clock_share(whole)


def test_power_limits_tensor_cores_and_shader_cores() -> None:
    t4, uncapped = find_gpu("T4"), dataclasses.replace(find_gpu("T4"), power_watts=1000.0)
    for dtype in ("float32", "float16"):
        kernel = product(4096, 4096, 4096)
        kernel[COLUMNS.index("dtype")] = DTYPES.index(dtype)
        slow, fast = (times(kernel, gpu=gpu)[0] for gpu in (t4, uncapped))
        assert 1.1 < slow / fast < 1.6


def test_large_products_are_as_fast_as_published_on_every_gpu() -> None:
    """No GPU is far off, but two of which sources differ; the medians are docs/accuracy.md's."""
    errors: dict[str, list[float]] = {"float32": [], "float16": []}
    apart = {("T4", "float32"), ("RTX 5090", "float16")}
    for name, (*rates, _) in PUBLISHED.items():
        machine = machine_of(find_gpu(name))
        for dtype, published in zip(errors, rates, strict=True):
            if published is not None:
                predicted = product_flops(machine, dtype, SIDE) / 1e12
                most = 0.48 if (name, dtype) in apart else 0.18
                assert predicted == pytest.approx(published, rel=most), name
                errors[dtype].append(abs(predicted / published - 1))
    medians = [100 * statistics.median(found) for found in errors.values()]
    assert medians == pytest.approx([6.4, 3.2], abs=0.05)


def test_tensor_cores_that_do_more_a_clock_are_not_fed_at_their_rate() -> None:
    """An A40 has an RTX 3090's multiprocessors with Tensor cores of twice the rate."""
    a40, geforce = find_gpu("A40"), find_gpu("RTX 3090")
    large = product(8192, 8192, 8192)
    reached = {}
    for gpu in (a40, geforce):
        peak = peak_flops(gpu)[DTYPES.index("float16")]
        reached[gpu.key] = 2 * 8192**3 / times(large, gpu=gpu)[0] / peak
    assert reached["A40"] < 0.8 * reached["RTX 3090"]


def three(kind: str, dtype: str) -> list[int]:
    values = {"rows": 1 << 16, "columns": 64, "depth": 9 * 64}
    return row(kind, dtype, flops=2 << 32, **values)


@pytest.mark.parametrize(
    ("gpu", "dtype", "bound"),
    [
        ("RTX 3090", "float16", "tensor cores"),
        ("RTX 3090", "tfloat32", "tensor cores"),
        ("RTX 3090", "float32", "shader cores"),
        ("T4", "tfloat32", "shader cores"),
        ("P100 SXM", "float16", "shader cores"),
    ],
)
def test_which_cores_bound_a_step(gpu: str, dtype: str, bound: str) -> None:
    large = product(4096, 4096, 4096)
    large[COLUMNS.index("dtype")] = DTYPES.index(dtype)
    assert step_time(work(large), machine(gpu=find_gpu(gpu))).bound == bound


def test_winograds_algorithm_is_for_shader_cores() -> None:
    t4, pascal = find_gpu("T4"), find_gpu("GTX 1080 Ti")
    for kind in ("convolution", "convolution_input_gradient"):
        small = kind.replace("convolution", "convolution_3x3")
        for gpu, dtype, gain in (
            (t4, "float32", 2.0),
            (t4, "tfloat32", 2.0),  # which a T4 has not
            (t4, "float16", 1.0),
            (pascal, "float16", 2.0),
            (pascal, "bfloat16", 1.0),
            (RTX_3090, "float32", 2.0),
            (RTX_3090, "tfloat32", 1.0),
        ):
            plain, fast = times(three(kind, dtype), three(small, dtype), gpu=gpu)
            assert plain / fast == pytest.approx(gain, rel=0.05)


def test_no_tensor_is_put_into_the_order_of_tensor_cores_that_are_not_there() -> None:
    copies = [row("layout", dtype, read=1 << 28, written=1 << 28) for dtype in DTYPES[:3]]
    in_float32, in_tf32, in_half = times(*copies, gpu=find_gpu("T4"))
    assert in_tf32 == 0.0 < in_half == in_float32
    assert times(*copies)[1] > 0


def test_kinds_of_equal_constants_are_told_as_one() -> None:
    found = step_time(
        work(three("convolution", "float16"), three("convolution_3x3", "float16")), machine()
    )
    assert list(found.by_kind_s) == ["convolution"]
    assert found.by_kind_s["convolution"] == pytest.approx(found.gpu_s)


def test_libraries_reach_less_of_blackwells_tensor_cores() -> None:
    """Where an RTX 4090 clocks above its rate."""
    blackwell = find_gpu("RTX 5090")
    ada = dataclasses.replace(blackwell, capability=(8, 9))
    large, copy = product(8192, 8192, 8192), row("pointwise", read=1 << 30, written=1 << 30)
    slow, fast = times(large, copy, gpu=blackwell), times(large, copy, gpu=ada)
    assert slow[0] == pytest.approx(fast[0] * 1.08 / 0.93, rel=0.02)
    # GDDR7 is used a little less well than GDDR6X.
    assert slow[1] == pytest.approx(fast[1] / 0.9, rel=0.02)


def test_codes_of_inline_ecc_pass_the_same_bus() -> None:
    t4 = find_gpu("T4")
    without = dataclasses.replace(t4, inline_ecc=False)
    kernel = row("pointwise", read=1 << 30, written=1 << 30)
    with_ecc, plain = (times(kernel, gpu=gpu)[0] for gpu in (t4, without))
    assert with_ecc == pytest.approx(plain / 0.83, rel=1e-3)
    assert find_gpu("A10").inline_ecc and not find_gpu("A100 80GB SXM").inline_ecc
    assert not find_gpu("RTX 4090").inline_ecc


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.key)
def test_every_gpu_of_the_catalogue_has_times(gpu: Any) -> None:
    found = times(
        product(4096, 4096, 4096),
        row("convolution", dtype="bfloat16", flops=1 << 40, rows=1 << 20, columns=64, depth=576),
        row("depthwise", flops=1 << 30, read=1 << 28, written=1 << 28),
        row("pointwise", read=1 << 28, written=1 << 28),
        gpu=gpu,
        efficiency=DEFAULT,
    )
    assert all(0 < seconds < 60 for seconds in found)


# --- The step -----------------------------------------------------------------------------------

HOST = HostCosts(10e-6, 6e-6, 5e-6, 9e-6, 2e-6, 1e-6, 0.5e-6)


def machine(**changes: Any) -> HostedGpu:
    values: dict[str, Any] = {"gpu": RTX_3090, "efficiency": IDEAL, "host": HOST}
    return HostedGpu(**values | changes)


def moving(seconds: float) -> list[int]:
    """A kernel that takes so long."""
    return row("pointwise", read=round(seconds * RTX_3090.bandwidth_bytes_per_s))


def test_long_kernels_hide_their_launches() -> None:
    found = step_time(work(*[moving(1e-3)] * 10), machine())
    # The first waits until it is launched.
    assert found.seconds == pytest.approx(10e-3 + 12e-6, rel=1e-3)
    assert found.gpu_s == pytest.approx(10e-3, rel=1e-3) and found.bound == "bandwidth"


def test_short_kernels_wait_for_their_launches() -> None:
    found = step_time(work(*[moving(1e-6)] * 100), machine())
    assert found.seconds == pytest.approx(100 * 12e-6, rel=1e-2)
    assert found.bound == "launches"
    # On a core of half the speed it takes twice as long, and nothing changes for long kernels.
    slow = step_time(work(*[moving(1e-6)] * 100), machine(core_speed=0.5))
    assert slow.seconds == pytest.approx(2 * found.seconds, rel=1e-2)


def test_operators_cost_what_they_launch() -> None:
    """By phase; more for a library's kernels and for each tensor of a list, little for a view."""
    rows = (moving(0), moving(0), row("matmul"), row("convolution"), row("optimizer", batches=40))
    phases = ("forward", "backward", "forward", "forward", "optimizer")
    issued, done = issue_seconds(work(*rows, phases=phases), HOST)
    ends = np.cumsum([12e-6, 8e-6, 17e-6, 21e-6, 32e-6])
    assert issued.tolist() == pytest.approx(ends) and done.tolist() == pytest.approx(ends)
    views = dataclasses.replace(work(moving(0)), op_phase=np.full(11, PHASES.index("backward")))
    assert issue_seconds(views, HOST)[1][-1] == pytest.approx(8e-6 + 10 * 1e-6)


def test_waiting_for_the_gpu_launches_what_follows_later() -> None:
    asks = work(moving(1e-3), row("download", read=2), moving(1e-6), moving(1e-6))
    found = step_time(asks, machine())
    without = step_time(work(moving(1e-3), moving(1e-6), moving(1e-6)), machine())
    assert found.seconds >= 1e-3 + 2 * 12e-6
    # A core is busy meanwhile: CUDA spins, but not where GPU and CPU share the memory.
    assert found.core_s > 1e-3 and without.core_s == without.host_s
    shared = dataclasses.replace(RTX_3090, shared_memory_device=True)
    assert step_time(asks, machine(gpu=shared)).core_s == found.host_s
    assert without.seconds < 1.1e-3 < found.seconds + 0.1e-3


def test_copies_from_pageable_memory_are_slower() -> None:
    size = 1 << 28
    pinned = step_time(work(row("upload_pinned", read=size)), machine())
    pageable = step_time(work(row("upload", read=size)), machine())
    assert pinned.copies_s == pytest.approx(size / 20e9)
    assert pageable.copies_s == pytest.approx(size / 6e9)
    assert pageable.bound == "host copies"
    down = step_time(work(row("download_pinned", read=size)), machine())
    assert down.copies_s == pytest.approx(size / 20e9)


def test_what_most_of_a_step_waits_for_may_be_other_gpus() -> None:
    """Copies of a model among the GPUs of one process need more time than its kernels."""
    several = machine(gpu=dataclasses.replace(RTX_3090, count=4))
    passing = row("all_reduce", read=1 << 30, rows=4)
    assert step_time(work(moving(1e-3), passing), several).bound == "communication"
    assert step_time(work(moving(1.0), passing), several).bound == "bandwidth"


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e-3), min_size=1, max_size=30))
def test_the_recurrence_is_that_of_a_queue(took: list[float]) -> None:
    """Each kernel begins when it is launched and the one before it is done."""
    rows = [moving(seconds) for seconds in took]
    found = step_time(work(*rows), machine())
    exact = KernelTimes(work(*rows).table, RTX_3090).seconds(IDEAL)
    issued, done = issue_seconds(work(*rows), HOST)
    end = 0.0
    for begins, seconds in zip(issued, exact, strict=True):
        end = max(end, begins) + seconds
    assert found.seconds == pytest.approx(max(end, done[-1]))


def test_an_empty_step_takes_no_time() -> None:
    found = step_time(work(), machine())
    assert found.seconds == found.gpu_s == 0.0 and not found.by_kind_s


def test_what_kinds_take_adds_up() -> None:
    found = step_time(work(product(4096, 4096, 4096), moving(1e-3), moving(1e-4)), machine())
    assert sum(found.by_kind_s.values()) == pytest.approx(found.gpu_s)
    assert set(found.by_kind_s) == {"matmul", "pointwise"}


# --- Every batch size ---------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_sizes_at_any_batch_follow_from_two(one: int, other: int, wanted: int) -> None:
    def at(batch: int) -> Work:
        read = 64 * batch + 7
        return work(product(49 * batch, 64, 576, read=read), row("optimizer", read=1000))

    if one == other:
        with pytest.raises(ValueError, match="different"):
            WorkLaw.between(at(one), one, at(other), other)
        return
    law = WorkLaw.between(at(one), one, at(other), other)
    assert (law.at(wanted).table == at(wanted).table).all()


def test_other_kernels_are_no_law() -> None:
    first, second = work(moving(1e-3)), work(moving(1e-3), moving(1e-3))
    with pytest.raises(NotAffineError, match="1 kernels at batch size 2, 2 at 4"):
        WorkLaw.between(first, 2, second, 4)
    with pytest.raises(NotAffineError, match="kernel 0 differs"):
        WorkLaw.between(first, 2, work(row("fill", written=8)), 4)


# --- A timeline -----------------------------------------------------------------------------------


def by_hand(took: list[float], waits: list[bool], gaps: list[float], queue: int) -> list[float]:
    """Kernels one by one: when the CPU and when the GPU are done with them.

    ``gaps`` is what the CPU takes until each launch, ``waits`` whether it then waits for the GPU.
    """
    cpu, ends = 0.0, [0.0]
    for seconds, wait, gap in zip(took, waits, gaps, strict=True):
        cpu += gap
        if len(ends) > queue:
            cpu = max(cpu, ends[-queue])
        ends.append(max(ends[-1], cpu) + seconds)
        if wait:
            cpu = max(cpu, ends[-1])
    return [cpu, ends[-1]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("pointwise", "pointwise", "pointwise", "wait", "upload")),
            st.integers(0, 40_000_000),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 20),
    st.integers(0, 60),
    st.floats(0, 1e-2),
)
def test_a_timeline_is_what_launching_kernels_one_by_one_makes(
    kernels: list[tuple[str, int, int]], queue: int, cut: int, pause: float
) -> None:
    """Added in two parts with a pause of the CPU between, and with a queue of any length."""
    cut = min(cut, len(kernels) - 1)
    costs = HostCosts()
    gaps = [costs.forward_s + launches * costs.launch_s for *_, launches in kernels]
    gaps[cut] += pause
    machine, timeline, took = HostedGpu(RTX_3090, IDEAL, costs), Timeline(queue), []
    for part, before in ((kernels[:cut], 0.0), (kernels[cut:], pause)):
        timeline.pause(before)
        if part:
            rows = [row(kind, read=read, launches=launches) for kind, read, launches in part]
            costed = TimedWork(work(*rows), machine)
            costed.launch(timeline)
            took += (costed.seconds + costed.copies).tolist()
    waits = [kind != "pointwise" for kind, *_ in kernels]
    cpu, gpu = by_hand(took, waits, gaps, queue)
    assert timeline.cpu_s == pytest.approx(cpu)
    assert timeline.end_s == pytest.approx(max(cpu, gpu))


def test_elements_that_are_taken_one_by_one_are_bounded_by_instructions_not_memory() -> None:
    """SwiGLU's halves of a tensor in bfloat16: 1.5 ms on an H100 SXM for two kernels of 2^28."""
    h100 = find_gpu("H100 SXM")
    moves = {"read": 1 << 30, "written": 1 << 29}
    vectors, single = times(row("pointwise", **moves), row("pointwise", rows=1 << 28, **moves),
                            gpu=h100)  # fmt: skip
    assert vectors < 0.6e-3 and single == pytest.approx(0.75e-3, rel=0.1)
    # A GeForce's memory is the slower of the two.
    geforce = times(row("pointwise", **moves), row("pointwise", rows=1 << 28, **moves))
    assert geforce[1] < 1.1 * geforce[0]
