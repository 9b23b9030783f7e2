"""At which batch size a plan measures the DataLoader."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_loader import result
from tests.report.plan.test_text import PLAN
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.dataloader.section import (
    kept_batch,
    launched_batch,
    scaled,
    tuned_batch,
    with_sample_cost,
    within_memory,
)
from trainfit.plan.runs.failures import ScriptError
from trainfit.results.dataloader import Candidate, LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import PlanResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.speed import DataLoading, Speed, StepSpeed

STEP = Consumer(0.24, 0.12, source="given")


@pytest.mark.parametrize(
    ("sample_s", "batch"), [(None, 24), (0.0, 24), (0.01, 24), (0.02, 12), (0.1, 8), (9.0, 8)]
)
def test_long_batches_are_measured_smaller_but_never_below_the_present(
    sample_s: float | None, batch: int
) -> None:
    plan = dataclasses.replace(PLAN, sample_loading_s=sample_s)
    assert launched_batch(plan) == 24
    assert tuned_batch(plan) == batch
    step = scaled(STEP, plan)
    assert step.step_s / batch == pytest.approx(STEP.step_s / 24)
    assert step.work_s == pytest.approx(step.step_s / 2)
    assert ("scaled to" in step.source) == (batch != 24)


@pytest.mark.parametrize(
    ("simulated_s", "real_s", "batch"), [(0.1, 1e-6, 24), (0.1, 0.02, 12), (0.1, None, 8)]
)
def test_samples_that_look_slow_are_timed_for_real(
    simulated_s: float, real_s: float | None, batch: int
) -> None:
    """On the simulated device, or while workers start, they may look so without being it."""
    asked: list[int | None] = []
    plan = dataclasses.replace(PLAN, sample_loading_s=simulated_s)

    def command(size: int | None) -> Command:
        asked.append(size)
        return parse_command(["python", __file__])

    assert tuned_batch(with_sample_cost(plan, command, lambda filled: real_s)) == batch
    assert asked == [8]
    fast = dataclasses.replace(PLAN, sample_loading_s=1e-6)
    assert with_sample_cost(fast, command, lambda filled: 9.0) is fast and asked == [8]

    def fails(filled: Command) -> float:
        raise ScriptError("it came to no loader")

    assert with_sample_cost(plan, command, fails) is plan


def found(settings: LoaderSettings, shm: int | None) -> LoaderResult:
    probe = dataclasses.replace(result().probe, batch_size=8, batch_bytes=1 << 20)
    machine = dataclasses.replace(result().machine, shm_free_bytes=shm, available_bytes=1 << 40)
    return result(recommended=settings, probe=probe, machine=machine)


@given(st.integers(0, 16), st.integers(1, 8), st.integers(1, 500), st.integers(1, 1 << 30))
def test_batches_under_way_fit_the_shared_memory(
    workers: int, prefetch: int, batch: int, shm: int
) -> None:
    settings = LoaderSettings(workers, prefetch)
    kept = within_memory(found(settings, shm), batch)
    each = (1 << 20) * batch / 8
    fits = (kept.tokens + 1) * each <= shm
    assert fits or (kept.num_workers <= 1 and kept.prefetch_factor == 1) or batch <= 8
    if (settings.tokens + 1) * each <= shm or batch <= 8:
        assert kept == settings


def test_nothing_is_changed_where_nothing_is_known() -> None:
    settings = LoaderSettings(4)
    assert within_memory(found(settings, 1), None) == settings


def limited(rate: float, **changes: object) -> PlanResult:
    """A plan for batch size 24 instead of 8, whose DataLoader gives ``rate`` batches of 8."""
    step = StepSpeed(8, 0.01, (0.008, 0.0125), 0.01, 0.001, 0.0, "bandwidth", 800.0)
    best = LoaderSettings(4)
    candidate = Candidate(best, rate, 0.5, 4.0)
    probe = dataclasses.replace(result().probe, batch_size=8)
    tuned = result(recommended=best, candidates=(candidate,), confirmed=(), probe=probe)
    return dataclasses.replace(
        PLAN,
        speed=Speed(step, (), None, None, {}, ""),
        loading=DataLoading(tuned, 8),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("rate", "batch"), [(10.0, 8), (70.0, 8), (79.0, 24), (500.0, 24)])
def test_a_larger_batch_has_to_gain_something(rate: float, batch: int) -> None:
    """The GPU takes 640 samples/s at least: 80 batches of 8."""
    plan = kept_batch(limited(rate))
    assert plan.chosen.recommended_batch == batch
    assert (plan.now.limits is not None and "gains nothing" in plan.now.limits.reason) == (
        batch == 8
    )


@pytest.mark.parametrize(("rate", "batch"), [(39.0, 8), (41.0, 24)])
def test_a_rate_predicted_next_to_other_processes_has_to_be_lower_by_far(
    rate: float, batch: int
) -> None:
    plan = limited(rate)
    assert plan.loading is not None and plan.loading.result is not None
    doubt = Finding("busy_machine", "critical", "")
    busy = dataclasses.replace(plan.loading.result, doubts=(doubt,), confirmed=())
    loading = dataclasses.replace(plan.loading, result=busy)
    kept = kept_batch(dataclasses.replace(plan, loading=loading))
    assert kept.chosen.recommended_batch == batch
    reason = kept.now.limits.reason if kept.now.limits is not None else ""
    assert ("(predicted: the machine was busy)" in reason) == (batch == 8)


def test_it_stays_where_the_loader_is_not_known_or_the_job_does_not_fit() -> None:
    assert kept_batch(limited(10.0, batch_in_command=False)).chosen.recommended_batch == 24
    assert (
        kept_batch(dataclasses.replace(limited(1.0), loading=None)).chosen.recommended_batch == 24
    )
    tight = dataclasses.replace(PLAN.now, fits=False)
    assert kept_batch(limited(10.0, now=tight)).chosen.recommended_batch == 24
