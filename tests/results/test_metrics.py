"""The flat dict of a result's numbers: stable names, and nothing that was not measured."""

from __future__ import annotations

import dataclasses
import math

import pytest

import trainfit
from helpers_cli import ROOT
from trainfit.results.files.contents import PREFIX, metric
from trainfit.results.kinds import KINDS
from trainfit.results.memory import RecordingSummary
from trainfit.results.plan import PlanResult
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.watch import WatchResult

FIXTURES = ROOT / "tests" / "fixtures" / "results"
METERED = [kind for kind in (*dict.fromkeys(KINDS.values()), RecordingSummary) if kind.METRICS]


@pytest.mark.parametrize("name", ["plan-v1", "loader-v1", "rehearsal-v1", "watch-v1", "pace-v1"])
def test_a_result_says_its_numbers_under_the_names_it_declares(name: str) -> None:
    result = trainfit.load(FIXTURES / f"{name}.json")
    found = result.metrics()
    assert found and set(result.quantities()) == set(type(result).METRICS)
    for key, value in found.items():
        assert key.startswith(PREFIX) and math.isfinite(value), key
        assert isinstance(value, int | float) and not isinstance(value, bool), key


@pytest.mark.parametrize("kind", METERED, ids=lambda kind: kind.__name__)
def test_short_names_are_unambiguous(kind: type[WatchResult]) -> None:
    short = [metric(key).short for key in kind.METRICS]
    assert len(set(short)) == len(short)
    assert all(kind.METRICS.values())


def test_the_numbers_are_those_of_the_result() -> None:
    watched = trainfit.load(FIXTURES / "watch-v1.json")
    assert isinstance(watched, WatchResult) and watched.step_s is not None
    found = watched.metrics()
    assert found["trainfit/step_ms"] == pytest.approx(1000 * watched.step_s)
    waiting = next(each.share for each in watched.phases if each.name == "input")
    assert found["trainfit/waiting_for_batches_share"] == waiting
    plan = trainfit.load(FIXTURES / "plan-v1.json")
    assert isinstance(plan, PlanResult)
    assert plan.metrics()["trainfit/device_gib"] == plan.now.memory.device_bytes / 2**30
    assert plan.metrics()["trainfit/recommended_batch"] == plan.chosen.recommended_batch


def test_what_was_not_measured_is_left_out_and_a_zero_is_not() -> None:
    watched = trainfit.load(FIXTURES / "watch-v1.json")
    assert isinstance(watched, WatchResult)
    empty = dataclasses.replace(
        watched, step_s=None, samples_per_s=None, phases=(), mfu=0.0, steps=0, findings=()
    )
    assert empty.metrics() == {"trainfit/mfu_share": 0.0}
    assert "trainfit/device_gib" not in watched.metrics()  # it ran on the CPU
    rehearsed = trainfit.load(FIXTURES / "rehearsal-v1.json")
    assert isinstance(rehearsed, Rehearsal)
    short = dataclasses.replace(rehearsed, steady=None, epoch_s=None)
    assert set(short.metrics()) == {"trainfit/step_ms"}
    not_finite = dataclasses.replace(rehearsed, epoch_s=math.nan)
    assert "trainfit/epoch_s" not in not_finite.metrics()


@pytest.mark.parametrize(
    ("key", "short", "unit"),
    [
        ("step_ms", "step", "s"),
        ("epoch_s", "epoch", "s"),
        ("device_gib", "device", "bytes"),
        ("samples_per_s", "samples/s", "1/s"),
        ("loader_batches_per_s", "loader", "1/s"),
        ("mfu_share", "mfu", "share"),
        ("reached_hz", "reached", "1/s"),
        ("largest_batch", "largest_batch", "count"),
    ],
)
def test_a_key_says_its_unit(key: str, short: str, unit: str) -> None:
    assert (metric(key).short, metric(key).unit) == (short, unit)
