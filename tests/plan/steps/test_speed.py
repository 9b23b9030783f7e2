"""How fast a job is: steps of recordings, costed at every batch size, and in words."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainfit
from helpers_report import of_blocks, on_one_line
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.curve import Curve, batch_sizes, curve_of, knee, saturation_batch
from trainfit.plan.sizing.speed import speed
from trainfit.report.sections.speed import speed_facts
from trainfit.results.plan import HostCpu
from trainfit.results.runs.recording import Recording
from trainfit.results.speed import KNEE, RunRate, Speed, StepSpeed
from trainfit.results.text import duration
from trainfit.speed.step import REFERENCE_HZ

GPU = find_gpu("RTX 3090")
MACHINE = machine_of(GPU)


def recorded(batch: int, width: int = 4096) -> Recording:
    """Two steps of a perceptron."""
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            images = torch.randn(batch, width).pin_memory().to("cuda", non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                model(images).sum().backward()
            optimizer.step()
    return simulation.recording


@pytest.fixture(scope="module")
def pair() -> tuple[tuple[int, Recording], tuple[int, Recording]]:
    return (64, recorded(64)), (128, recorded(128))


def test_a_step_at_every_batch_size(pair: tuple[tuple[int, Recording], ...]) -> None:
    found = speed(pair[0][1], 64, MACHINE, curve_of(pair, MACHINE, 4096), samples=6400)
    assert found is not None
    assert found.at(64) == found.now and found.now.bound == "bandwidth"
    sizes = [each.batch_size for each in found.curve]
    assert sizes[0] == 1 and sizes[-1] == 4096 and sizes == sorted(set(map(int, sizes)))
    times = [each.seconds for each in found.curve]
    # But for sides that are no multiple of 8, no larger batch is faster.
    assert all(b > 0.95 * a for a, b in itertools.pairwise(times))
    # Weights and optimizer take the same at every batch size: samples a second rise to the knee.
    rates = [each.samples_per_s or 0 for each in found.curve]
    assert found.knee is not None and found.knee > 64
    assert found.at(found.knee).samples_per_s >= KNEE * max(rates)  # type: ignore[union-attr]
    assert all(
        rate < KNEE * max(rates)
        for size, rate in zip(sizes, rates, strict=True)
        if size is not None and size < found.knee
    )
    assert found.curve[-1].bound == "tensor cores"
    assert found.epoch_s == pytest.approx(100 * found.now.seconds)
    assert 0 < (found.mfu or 0) < 1
    assert sum(found.by_kind_s.values()) == pytest.approx(found.now.gpu_s)
    low, high = found.now.range_s
    assert low < found.now.seconds < high


def test_the_law_gives_what_was_recorded(pair: tuple[tuple[int, Recording], ...]) -> None:
    at_two = speed(pair[1][1], 128, MACHINE)
    law = speed(pair[0][1], 64, MACHINE, curve_of(pair, MACHINE, 128))
    assert at_two is not None and law is not None
    assert law.curve[-1].seconds == pytest.approx(at_two.now.seconds)
    assert at_two.curve == () and at_two.knee is None


def test_other_kernels_at_another_batch_size_are_said(
    pair: tuple[tuple[int, Recording], ...],
) -> None:
    short = recorded(128, width=64).first_steps(1)
    found = speed(pair[0][1], 64, MACHINE, curve_of((pair[0], (128, short)), MACHINE, 128))
    assert found is not None
    assert found.curve == () or found.notes == ()
    if found.notes:
        assert "not known at other batch sizes" in found.notes[0]


def test_nothing_is_said_without_rates_or_kernels(
    pair: tuple[tuple[int, Recording], ...],
) -> None:
    recording = pair[0][1]
    assert speed(recording, 64, machine_of(find_gpu("custom:24GiB"))) is None
    old = dataclasses.replace(
        recording,
        **{n.name: getattr(recording, n.name)[:0] for n in dataclasses.fields(recording)
           if n.name.startswith("kernel_")},
    )  # fmt: skip
    assert speed(old, 64, MACHINE) is None


@given(st.integers(1, 5000))
def test_batch_sizes_are_near_one_another(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] == largest
    assert all(b <= max(a + 1, a * 5 // 4 + 1) for a, b in itertools.pairwise(sizes))


# --- Words --------------------------------------------------------------------------------------

NOW = StepSpeed(8, 0.085, (0.07, 0.102), 0.08, 0.036, 0.004, "bandwidth", 94.1)
SPEED = Speed(
    now=NOW,
    curve=tuple(
        StepSpeed(n, 0.01 * n, (0.008 * n, 0.012 * n), 0.01 * n, 0.005, 0.0, "launches", 100.0)
        for n in (1, 2, 3, 4, 6, 8)
    ),
    knee=3,
    mfu=0.17,
    by_kind_s={"matmul": 0.06, "convolution_weight_gradient": 0.02},
    constants="assumed",
    epoch_s=754.0,
    notes=("a \x1b[2Jnote",),
)


def told(speed: Speed, run: RunRate | None = None) -> str:
    return on_one_line(of_blocks(speed_facts(speed, run, "12 min 34 s")))


def test_what_a_step_consists_of() -> None:
    text = told(SPEED, RunRate(8, 0.085, 94.1, 754.0, "gpu", 0.085, 94.1))
    for words in (
        "step 85 ms (90% prediction interval 70 ms to 102 ms) at batch size 8",
        "limited by memory bandwidth",
        "kernels matmul 75%, convolution weight gradient 25%",
        "epoch 12 min 34 s",
    ):
        assert words in text
    bare = Speed(
        dataclasses.replace(NOW, batch_size=None, samples_per_s=None), (), None, None, {}, "x"
    )
    text = told(bare)
    assert "at batch size" not in text and "MFU" not in text and "kernels matmul" not in text


# --- Another processor, graphs, limits ------------------------------------------------------------


def test_a_slower_core_launches_later(pair: tuple[tuple[int, Recording], ...]) -> None:
    recording = pair[0][1]
    usual, slow, same = (
        speed(recording, 64, machine_of(GPU, HostCpu(None, hz)))
        for hz in (None, 1.0e9, REFERENCE_HZ)
    )
    assert usual is not None and slow is not None
    assert same == usual
    assert slow.now.host_s == pytest.approx(3 * usual.now.host_s)
    assert slow.now.gpu_s == pytest.approx(usual.now.gpu_s)
    assert "assumed CPU: 1 GHz" in slow.constants and "assumed CPU: 3 GHz" in usual.constants
    here = speed(recording, 64, machine_of(GPU, HostCpu(2.0, None, 0.5)))
    assert here is not None and here.now.host_s == pytest.approx(2 * usual.now.host_s)
    assert "measured CPU: 0.5 times the reference's speed at 3 GHz" in here.constants


def test_graphs_win_what_launches_cost() -> None:
    """A narrow perceptron waits for its launches, a wide one does not."""
    narrow, wide = speed(recorded(8, width=64), 8, MACHINE), speed(recorded(4096), 4096, MACHINE)
    assert narrow is not None and wide is not None
    assert narrow.now.bound == "launches" and narrow.graphed_s is not None
    assert narrow.graphed_s < 0.5 * narrow.now.seconds
    assert wide.graphed_s == pytest.approx(wide.now.seconds, rel=0.02)
    assert "with CUDA graphs" in told(narrow)
    assert "CUDA graphs" not in told(wide)


def test_a_lower_clock_between_calls_costs_who_launches() -> None:
    """Of calls of a model; a training step has no pauses."""
    narrow = speed(recorded(8, width=64), 8, MACHINE, calls=True)
    wide = speed(recorded(4096), 4096, MACHINE, calls=True)
    assert narrow is not None and narrow.paced is not None
    assert wide is not None and wide.paced is not None
    high, low = narrow.paced.slowed
    assert high.core_share == 3.5 / 4.0 and low.core_share == 1.7 / 4.0
    assert narrow.now.seconds < high.seconds < low.seconds
    assert low.seconds == pytest.approx(narrow.now.seconds * 4.0 / 1.7, rel=0.05)
    assert narrow.paced.launches > 20
    text = told(narrow)
    assert f"{narrow.paced.launches} launches a call: where the CPU's clock falls" in text
    assert "to 2.6 to 1.3 GHz instead of 3, expect" in text
    ends = f"{duration(high.seconds)} to {duration(low.seconds)}"
    more = [duration(each.seconds - narrow.now.seconds) for each in (high, low)]
    assert f"{ends}, {more[0]} to {more[1]} more; `trainfit pace` measures it" in text
    assert "has no effect" in told(wide)
    training = speed(recorded(8, width=64), 8, MACHINE)
    assert training is not None and training.paced is None
    assert "launches a call" not in told(training)


def test_the_saturation_batch_is_a_multiple_of_eight(
    pair: tuple[tuple[int, Recording], ...],
) -> None:
    found = speed(pair[0][1], 64, MACHINE, curve_of(pair, MACHINE, 4096))
    most = saturation_batch(curve_of(pair, MACHINE, 4096))
    assert found is not None and found.knee is not None and most is not None
    assert most % 8 == 0 and found.knee <= most < found.knee + 8
    assert saturation_batch(curve_of(pair, MACHINE, 3)) == 3
    assert saturation_batch(curve_of(pair, machine_of(find_gpu("custom:24GiB")), 4096)) is None


def test_a_multiple_of_eight_has_to_be_nearly_as_fast_itself() -> None:
    """A script that takes its batches in parts of 3: 6 is as fast as any, 8 and 16 are not."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48)
    steps = tuple(
        StepSpeed(n, parts, (0.0, 0.0), 0.0, 0.0, 0.0, "bandwidth", n / parts)
        for n in sizes
        for parts in [0.1 - (-n // 3)]
    )
    assert knee(steps) == 6
    assert saturation_batch(Curve(steps)) == 24


@given(st.floats(1, 1e6))
def test_with_a_noise_scale_smaller_batches_train_as_fast(noise_scale: float) -> None:
    """Samples a second over 1 + samples of a step / noise scale; without end it is the knee."""
    took = {n: 0.05 + 0.001 * n for n in range(1, 513)}
    curve = [
        StepSpeed(n, seconds, (0.0, 0.0), 0.0, 0.0, 0.0, "bandwidth", n / seconds)
        for n, seconds in took.items()
    ]
    plain, found = knee(curve), knee(curve, noise_scale)
    assert plain is not None and found is not None and found <= plain
    progress = [n / (0.05 + 0.001 * n) / (1 + n / noise_scale) for n in range(1, 513)]
    assert progress[found - 1] >= KNEE * max(progress)
    assert all(each < KNEE * max(progress) for each in progress[: found - 1])
    assert knee(curve, 1e12) == plain


def test_the_simulated_clock_is_that_of_the_model() -> None:
    """Events around a step, as a user's script times it."""
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        for event in events:
            event.record()
            optimizer.zero_grad()
            model(torch.randn(2048, 2048, device="cuda")).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
    seconds = [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(events)]
    found = speed(simulation.recording, 2048, MACHINE)
    assert found is not None
    assert seconds[-1] == pytest.approx(found.now.seconds, rel=0.05)
    # The clock may be asked at any time, also with nothing done in between.
    with trainfit.simulate("RTX 3090"):
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        torch.cuda.synchronize()
        second.record()
        assert 0 <= first.elapsed_time(second) < 0.1
