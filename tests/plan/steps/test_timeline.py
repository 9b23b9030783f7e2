"""A step over time: it is the step that is costed, and its memory what the allocator holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_cli import ROOT
from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.job_detail import step_timeline
from trainfit.plan.sizing.costing import machine_of, step_seconds
from trainfit.results.runs.recording import Recording
from trainfit.results.speed import StepTimeline

RECORDING = Recording.load(ROOT / "tests" / "fixtures" / "results" / "recording-v1.trainfit")
MACHINE = machine_of(find_gpu("T4"))


@pytest.fixture(scope="module")
def timeline() -> StepTimeline:
    found = step_timeline(RECORDING, MACHINE)
    assert found is not None
    return found


def test_it_is_the_step_that_is_costed(timeline: StepTimeline) -> None:
    assert timeline.step == 1 and timeline.gpu == "Tesla T4"
    assert timeline.seconds == pytest.approx(step_seconds(RECORDING, MACHINE))
    assert len(timeline.operators) == np.count_nonzero(RECORDING.op_step == 1)
    assert {each.phase for each in timeline.operators} >= {"forward", "backward", "optimizer"}


def test_operators_follow_one_another_and_kernels_their_operators(timeline: StepTimeline) -> None:
    ends = [each.end_s for each in timeline.operators]
    assert [each.start_s for each in timeline.operators] == [0.0, *ends[:-1]]
    assert all(each.start_s <= each.end_s for each in timeline.operators)
    assert max(ends[-1], *(each.end_s for each in timeline.kernels)) == timeline.seconds
    for kernel in timeline.kernels:
        assert kernel.end_s >= kernel.start_s >= timeline.operators[kernel.operator].start_s
        assert kernel.moved_bytes or kernel.flops or kernel.kind.startswith("upload")


def test_memory_is_what_the_allocator_holds(timeline: StepTimeline) -> None:
    held = [sum(point.by_kind_bytes.values()) for point in timeline.memory]
    outcome = replay(Stream.of(RECORDING))
    of_step = outcome.allocated_after[-(len(held)) :]
    assert max(held) == outcome.step_peaks[1][0]
    assert held[-1] == of_step[-1] == outcome.stats["allocated_bytes"]
    assert min(min(point.by_kind_bytes.values()) for point in timeline.memory) >= 0
    times = [point.time_s for point in timeline.memory]
    assert times == sorted(times) and times[-1] <= timeline.seconds


def test_what_has_no_times_has_no_timeline() -> None:
    assert step_timeline(RECORDING, machine_of(find_gpu("custom:8GiB"))) is None
    empty = np.zeros(0, dtype=np.int64)
    kernels = {f.name: empty for f in dataclasses.fields(RECORDING) if f.name.startswith("kernel_")}
    assert step_timeline(dataclasses.replace(RECORDING, **kernels), MACHINE) is None
    ends = RECORDING.events % 4 == 2
    unfinished = dataclasses.replace(RECORDING, events=RECORDING.events[~ends])
    assert step_timeline(unfinished, MACHINE) is None
