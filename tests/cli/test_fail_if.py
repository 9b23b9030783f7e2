"""``--fail-if``: exit code 1 where a number of the result is so, or is not known."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from helpers_cli import ROOT, SCRIPTS, json_of, trainfit
from trainfit.cli.automation import condition
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.watch import WatchResult

FIXTURES = ROOT / "tests" / "fixtures" / "results"
PLAN = FIXTURES / "plan-v1.json"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("device > 22GiB", 22 * 2**30),
        ("device>=800 MiB", 800 * 2**20),
        ("step < 100ms", 0.1),
        ("epoch > 2h", 7200.0),
        ("epoch > 1.5min", 90.0),
        ("samples/s < 100", 100.0),
        ("loader < 12.5/s", 12.5),
        ("mfu < 20%", 0.2),
        ("mfu < 0.2", 0.2),
        ("recommended_batch <= 8", 8.0),
    ],
)
def test_a_quantity_has_the_unit_of_its_name(text: str, limit: float) -> None:
    assert condition(PlanResult, text).limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devise > 1GiB", "did you mean 'device'"),
        ("nothing > 1", "it has: allocated, "),
        ("device", "expected NAME, one of < <= > >="),
        ("device = 1GiB", "expected NAME, one of < <= > >="),
        ("device > ", "expected NAME, one of < <= > >="),
        ("device > 1", "such as 22GiB"),  # bytes, by accident
        ("device > 5ms", "such as 22GiB"),
        ("step > 5", "such as 100ms"),
        ("step > -5ms", "such as 100ms"),
        ("mfu > 5ms", "such as 20%"),
        ("largest_batch > 8%", "such as 8"),
        ("samples/s > 5GiB", "such as 30"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        condition(PlanResult, text)
    assert str(caught.value).startswith(f"{text!r}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("device > 22GiB", 0, ""),
        ("device > 200MiB", 1, "--fail-if 'device > 200MiB': it is 238 MiB"),
        ("device <= 238MiB", 1, "it is 238 MiB"),
        ("device < 238MiB", 0, ""),
        ("step < 5ms", 1, "it is 386 µs"),
        ("loader < 5", 1, "cannot tell: it was neither measured nor predicted"),
        ("loader > 5", 1, "cannot tell"),
        ("devise > 1GiB", 2, "this result has no 'devise'"),
    ],
)
def test_a_stored_result_is_judged(text: str, code: int, said: str, tmp_path: Path) -> None:
    done = trainfit("show", PLAN, "--json", "--fail-if", text, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert (said in done.stderr) if said else not done.stderr
    if code < 2:
        assert json_of(done)["format"] == "trainfit-plan"


def test_both_ways_to_refuse_a_condition_name_the_option_once(tmp_path: Path) -> None:
    """A plan's are checked with the options, those of `show` when the kind of result is known."""
    words = ("--fail-if", "devise > 1GiB")
    early = trainfit("plan", *words, "--", "python", "x.py", cwd=tmp_path)
    late = trainfit("show", PLAN, *words, cwd=tmp_path)
    for done in (early, late):
        assert done.returncode == 2
        assert done.stderr.count("--fail-if") == 1
        assert "--fail-if: 'devise" in done.stderr or "--fail-if 'devise" in done.stderr


def test_every_condition_is_looked_at(tmp_path: Path) -> None:
    fails = ["--fail-if", "device > 1MiB", "--fail-if=step > 1s", "--fail-if", "mfu < 1"]
    done = trainfit("show", PLAN, *fails, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2


def test_a_result_without_numbers_has_no_condition(tmp_path: Path) -> None:
    done = trainfit("show", FIXTURES / "doctor-v1.json", "--fail-if", "bad > 1", cwd=tmp_path)
    assert done.returncode == 2 and "it has: none" in done.stderr and not done.stdout


def test_a_bad_name_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for verb in ("plan", "simulate", "loader", "rehearse", "watch", "pace", "verify"):
        done = trainfit(verb, "--fail-if", "nonsense > 1", "--", "no-such-command", cwd=tmp_path)
        assert done.returncode == 2, verb
        assert "this result has no 'nonsense'" in done.stderr, verb


def test_a_simulation_is_judged(tmp_path: Path) -> None:
    words = ["simulate", "--gpu", "T4", "--steps", "2", SCRIPTS / "tiny.py"]
    done = trainfit(*words[:3], "--fail-if", "device > 1MiB", *words[3:], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "--fail-if 'device > 1MiB': it is" in done.stderr
    recording = tmp_path / "recording.trainfit"
    assert trainfit("show", recording, "--fail-if", "device > 20GiB", cwd=tmp_path).returncode == 0
    assert trainfit("show", recording, "--fail-if", "device < 20GiB", cwd=tmp_path).returncode == 1


@pytest.mark.usefixtures("brief")
def test_a_plan_is_judged(tmp_path: Path) -> None:
    command = ["--", "python", SCRIPTS / "tiny.py"]
    words = ["plan", "--gpu", "T4", "--steps", "2", "--fail-if", "device > 14GiB"]
    assert trainfit(*words, *command, cwd=tmp_path).returncode == 0
    done = trainfit(*words, "--fail-if", "step > 1us", *command, cwd=tmp_path)
    assert done.returncode == 1
    assert "--fail-if 'step > 1us': it is" in done.stderr


def test_names_of_other_results() -> None:
    assert condition(WatchResult, "waiting_for_batches > 10%").limit == pytest.approx(0.1)
    assert condition(PaceResult, "p99 > 33ms").limit == pytest.approx(0.033)
