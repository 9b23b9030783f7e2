"""What the recordings in a result say, for its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from helpers_page import RESULTS, entry
from trainfit.plan.job_detail import detail_of_plan, explained
from trainfit.results.files.errors import ResultFileError
from trainfit.results.kinds import read
from trainfit.results.memory import RecordingSummary
from trainfit.results.plan import JobDetail, PlanResult, Recorded


@pytest.fixture(scope="module")
def plan() -> PlanResult:
    found = read(RESULTS / "plan-v1.json")
    assert isinstance(found, PlanResult)
    return found


def test_a_plans_detail_agrees_with_its_figures(plan: PlanResult) -> None:
    detail = detail_of_plan(plan, Path("plan.json"))
    now = plan.now
    assert detail.memory is not None and detail.work is not None
    assert detail.memory.peak_bytes == now.memory.allocated_bytes
    assert detail.memory.batch_size == now.batch_size
    assert plan.speed is not None
    # The file is of an earlier model of kernels' times.
    assert detail.work.gpu_s == pytest.approx(plan.speed.now.gpu_s, rel=0.1)
    at_now = next(each for each in detail.batches if each.batch_size == now.batch_size)
    assert at_now.allocated_bytes == now.memory.allocated_bytes
    assert at_now.reserved_bytes == now.memory.reserved_bytes
    assert at_now.device_bytes == now.memory.device_bytes


def test_batch_sizes_go_beyond_the_largest_that_fits(plan: PlanResult) -> None:
    sizes = [each.batch_size for each in detail_of_plan(plan, Path("plan.json")).batches]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1
    assert plan.chosen.largest_batch is not None
    assert sizes[-1] == round(1.5 * plan.chosen.largest_batch)


def test_the_planned_gpu_is_compared_with_some_of_other_sizes(plan: PlanResult) -> None:
    gpus = detail_of_plan(plan, Path("plan.json")).gpu_bytes
    assert next(iter(gpus)) == plan.gpu
    assert gpus[plan.gpu] == plan.gpu_memory_bytes
    assert len(gpus) >= 4 and len(set(gpus.values())) == len(gpus)


def test_a_printed_plan_has_no_recordings_and_no_detail(plan: PlanResult) -> None:
    printed = PlanResult.from_json(plan.printed(), Path("plan.json"))
    assert detail_of_plan(printed, Path("plan.json")) == JobDetail()


def test_one_recording_tells_of_no_other_batch_size(plan: PlanResult) -> None:
    one = dataclasses.replace(plan, recordings=plan.recordings[:1])
    detail = detail_of_plan(one, Path("plan.json"))
    assert detail.batches == () and detail.memory is not None


def test_a_custom_gpu_has_no_times(plan: PlanResult) -> None:
    custom = dataclasses.replace(plan, gpu="custom:24GiB")
    assert detail_of_plan(custom, Path("plan.json")).work is None
    unknown = dataclasses.replace(plan, gpu="no such GPU")
    assert detail_of_plan(unknown, Path("plan.json")).work is None


def test_a_damaged_recording_is_named(plan: PlanResult) -> None:
    bad = dataclasses.replace(plan, recordings=(Recorded(8, "!"),))
    with pytest.raises(ResultFileError, match=r"plan\.json"):
        detail_of_plan(bad, Path("plan.json"))


def test_a_recording_is_shown_as_its_summary() -> None:
    found = entry("recording-v1.trainfit")
    assert isinstance(found.result, RecordingSummary)
    assert found.detail is not None and found.detail.memory is not None
    assert found.detail.memory.peak_bytes == found.result.memory.allocated_bytes


def test_other_results_are_shown_as_they_are() -> None:
    result = read(RESULTS / "loader-v1.json")
    assert explained(result, "l.json") == (result, None)
