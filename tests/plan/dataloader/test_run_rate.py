"""How fast a planned run will be: by the slower of DataLoader and GPU, as every report says it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from helpers_loader import probe, result
from helpers_report import plan_screen, plan_text
from tests.report.plan.test_text import PLAN
from trainfit.report.page import Entry, page_of
from trainfit.report.sections.plan_facts import answer
from trainfit.report.writers.markdown import markdown
from trainfit.results.dataloader import Candidate, Confirmed, LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.plan import HostCpu, PlanResult, run_rate, with_run_rate
from trainfit.results.speed import DataLoading, Speed, StepSpeed

NONE, TWO = LoaderSettings(0), LoaderSettings(2)
BUSY = Finding("busy_machine", "critical", "others kept 1 core busy", cause="re-run")


def candidate(settings: LoaderSettings, rate: float) -> Candidate:
    return Candidate(settings, rate, 0.5, 1.0, alone_batches_per_s=rate)


def loading(**changes: Any) -> DataLoading:
    """The issue's: 2 workers 8.44 batches/s, no workers 1.46, the GPU 15.8."""
    values = {
        "step_s": 1 / 15.8,
        "present": NONE,
        "recommended": TWO,
        "candidates": (candidate(NONE, 1.46), candidate(TWO, 8.44)),
        "confirmed": (),
        "probe": probe(batch_size=1),
    }
    return DataLoading(result(**values | changes), 1, True, "loader", 1.87)


def plan(found: DataLoading | None, batch: int = 1, **changes: Any) -> PlanResult:
    """A step of ``batch`` samples needs 1/12.6 s on the GPU; an epoch has 169 of them."""
    step = StepSpeed(
        batch, 1 / 12.6, (1 / 15.8, 0.1), 0.05, 0.01, 0.0, "bandwidth", 12.6 * batch, 0.01
    )
    now = dataclasses.replace(PLAN.now, batch_size=batch, recommended_batch=batch)
    values = {"now": now, "speed": Speed(step, (), None, None, {}, ""), "samples": 169 * batch}
    whole = {**values, "loading": found, "loader_at": "train.py:9", "amp_choice": None, **changes}
    return dataclasses.replace(PLAN, **whole)


def test_the_headline_is_what_the_run_will_have() -> None:
    found = plan(loading(doubts=(BUSY,)))
    run = run_rate(found)
    assert run is not None and (run.limit, run.loader) == ("loader", "busy")
    assert run.samples_per_s == pytest.approx(8.44) and run.epoch_s == pytest.approx(20.0, abs=0.1)
    assert run.gpu_samples_per_s == pytest.approx(12.6)
    said = (
        "(118 ms a step, 8.44 samples/s: the DataLoader is the limit, predicted: the machine was "
        "busy; the GPU alone would do 12.6)"
    )
    assert said in answer(found)
    for text in (plan_screen(found), plan_text(found), markdown(page_of([Entry("plan", found)]))):
        flat = " ".join(text.split())
        assert said in flat and "20 s" in flat
    assert "epoch 20 s (by the DataLoader)" in " ".join(plan_screen(found).split())
    kept = PlanResult.from_json(with_run_rate(found).to_json(), Path("x"))
    assert kept.run == run


@pytest.mark.parametrize(("rate", "limit"), [(12.5, "gpu"), (12.1, "gpu"), (11.9, "loader")])
def test_what_differs_by_what_can_be_measured_keeps_up(rate: float, limit: str) -> None:
    confirmed = (Confirmed(TWO, 9.0, rate, 0.1, 50, 4.0),)
    run = run_rate(plan(loading(confirmed=confirmed)))
    assert run is not None and (run.limit, run.loader) == (limit, "measured")
    assert run.step_s == pytest.approx(1 / (rate if limit == "loader" else 12.6))


def test_a_loader_measured_at_another_batch_size_has_the_same_samples() -> None:
    """8.44 batches/s of 4 samples are 33.8 samples/s, whatever the batch that is launched."""
    run = run_rate(plan(loading(probe=probe(batch_size=4)), batch=8))
    assert run is not None and run.samples_per_s == pytest.approx(33.76)
    assert run.step_s == pytest.approx(8 / 33.76)


def test_without_workers_the_step_comes_on_top() -> None:
    """The rate is with the shortest step that is likely; the predicted one is longer."""
    run = run_rate(plan(loading(recommended=NONE)))
    assert run is not None
    assert run.step_s == pytest.approx(1 / 1.46 + 1 / 12.6 - 1 / 15.8)


def test_what_was_not_measured_is_said() -> None:
    assert "; GPU step only: the DataLoader was not measured)" in answer(plan(None))
    hangs = DataLoading(None, 1, failure="it hangs")
    assert "; GPU step only: the DataLoader could not be measured)" in answer(plan(hangs))
    unknown = plan(loading(candidates=()))
    assert "; GPU step only: the DataLoader's rate is not known)" in answer(unknown)
    assert "DataLoader" not in answer(plan(None, loader_at=None))


def test_another_processor_gives_its_rate_at_best() -> None:
    there = dataclasses.replace(loading(), input_at_most=4.0, input_range=(3.0, 5.0))
    found = plan(there, cpu=HostCpu(2.0, 3e9))
    run = run_rate(found)
    assert run is not None and run.is_bound and run.samples_per_s == pytest.approx(4.0)
    assert "(at least 250 ms a step, at most 4.00 samples/s: the DataLoader is the limit" in answer(
        found
    )
    sure = dataclasses.replace(there, input_range=(3.0, 13.0))
    run = run_rate(plan(sure, cpu=HostCpu(2.0, 3e9)))
    assert run is not None and run.limit == "gpu"
