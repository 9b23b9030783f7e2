"""At which batch size a plan measures the DataLoader."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_loader import result
from test_report import PLAN
from trainfit.plan.dataloader.tuned_batch import launched_batch, scaled, tuned_batch, within_memory
from trainfit.results.loader import LoaderResult, LoaderSettings
from trainfit.results.runs.loading import StepTime

STEP = StepTime(0.24, 0.12, source="given")


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
