"""A step's GPU time by phase and operator: it adds up to the model's, and says what limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_page import RESULTS
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.kinds import read
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import DTYPES
from trainfit.results.speed import StepWork
from trainfit.speed.step import step_time, step_work
from trainfit.speed.work import Work

T4 = machine_of(find_gpu("T4"))


@pytest.fixture(scope="module")
def recording() -> Recording:
    found = read(RESULTS / "recording-v1.trainfit")
    assert isinstance(found, Recording)
    return found


def of(recording: Recording) -> StepWork:
    found = step_work(recording, T4)
    assert found is not None
    return found


@pytest.mark.parametrize("steps", [1, 2])
def test_parts_add_up_to_the_step_of_the_model(recording: Recording, steps: int) -> None:
    """Also where the first step is the only one, which comes without what is done once."""
    recording = recording.first_steps(steps)
    took = step_time(Work.of_steady_step(recording), T4)
    found = of(recording)
    assert found.gpu_s == pytest.approx(took.gpu_s)
    assert sum(found.by_phase_s.values()) == pytest.approx(took.gpu_s)
    assert sum(each.gpu_s for each in found.operators) == pytest.approx(took.gpu_s)
    assert set(found.by_phase_s) == {"forward", "backward", "optimizer"}


def test_flops_are_those_of_the_work(recording: Recording) -> None:
    found = of(recording)
    assert sum(each.flops for each in found.operators) == int(
        Work.of_steady_step(recording).column("flops").sum()
    )
    multiplies = {each.name for each in found.operators if each.flops}
    assert multiplies <= {"aten.addmm.default", "aten.mm.default"}
    # T4: float32 on the CUDA cores at 8.1 TFLOP/s, 320 GB/s (NVIDIA T4 datasheet).
    assert found.peak_flops_per_s["float32"] == pytest.approx(8.1e12, rel=0.02)
    assert found.bandwidth_bytes_per_s == pytest.approx(320e9, rel=0.01)


def test_what_may_round_to_tf32_is_named_so_where_the_gpu_has_it(recording: Recording) -> None:
    """The recording says of each multiplication whether it may, whatever the GPU."""
    tf32 = np.full_like(recording.kernel_dtype, DTYPES.index("tfloat32"))
    allowed = dataclasses.replace(recording, kernel_dtype=tf32)
    assert {each.dtype for each in of(allowed).operators} == {"float32"}
    ampere = step_work(allowed, machine_of(find_gpu("A10")))
    assert ampere is not None
    assert {each.dtype for each in ampere.operators} == {"tfloat32"}


def test_no_operator_is_above_the_roof(recording: Recording) -> None:
    found = of(recording)
    for each in found.operators:
        if each.flops:
            assert each.flops / each.gpu_s < found.peak_flops_per_s[each.dtype]


def test_small_kernels_wait_for_their_launch_not_for_memory(recording: Recording) -> None:
    """All tensors of this script are a few KiB."""
    assert {each.limit for each in of(recording).operators} == {"latency"}


def test_a_recording_without_kernels_or_steps_says_nothing(recording: Recording) -> None:
    none = np.zeros(0, dtype=np.int64)
    columns = {
        field.name: none
        for field in dataclasses.fields(Recording)
        if field.name.startswith("kernel_")
    }
    assert step_work(dataclasses.replace(recording, **columns), T4) is None  # type: ignore[arg-type]
    no_step = dataclasses.replace(recording, events=recording.events[:0])
    assert step_work(no_step, T4) is None
