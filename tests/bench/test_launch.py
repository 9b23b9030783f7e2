"""The figures of launch lines follow from rates; the rates are of real rehearsals."""

from __future__ import annotations

import importlib
import math
import shlex
from typing import Any

import pytest

from trainfit.plan.command.parsing import parse_command
from trainfit.results.dataloader import LoaderSettings


@pytest.fixture(scope="module")
def bench(bench_scripts: None) -> Any:
    return importlib.import_module("launch")


def keys(bench: Any) -> tuple[Any, Any, Any]:
    return tuple(bench.Key(("python", "x.py"), LoaderSettings(count)) for count in (0, 1, 2))


def test_regret_is_what_the_launch_lacks_to_the_best_of_other_rounds(bench: Any) -> None:
    launch, best, lucky = keys(bench)
    rates = {launch: [9.0] * 4, best: [10.0] * 4, lucky: [20.0, 1.0, 1.0, 1.0]}
    # The lucky one is taken for the best by the first half, and judged by the second.
    assert bench.regret({launch: [9.0] * 4, best: [10.0] * 4}, launch) == pytest.approx(10.0)
    assert bench.regret(rates, launch) < 10.0
    assert bench.regret({launch: [10.0] * 4, best: [9.0] * 4}, launch) == 0.0


def test_a_line_that_does_not_run_is_all_regret(bench: Any) -> None:
    launch, best, _ = keys(bench)
    assert bench.regret({launch: [None] * 4, best: [10.0] * 4}, launch) == 100.0


def test_a_script_that_failed_reaches_no_goal(bench: Any) -> None:
    good = {"regret": 1.0, "slower": 0.0, "same_line": True}
    assert all(figure.holds for figure in bench.figures([good]))
    bad = {"regret": None, "slower": None, "same_line": False}
    assert not any(figure.holds for figure in bench.figures([good, bad]))
    assert math.isnan(bench.figures([good, bad])[0].value)


def test_the_grid_has_every_setting_once(bench: Any) -> None:
    own, launch, _ = keys(bench)
    found = bench.settings_of(own, launch, ((1, 2), (0, 1, 2), (1, 2)))
    assert len(found) == len(set(found)) == 3 * (1 + 2 * 2)
    assert {key.line[-2:] for key in found} == {("python", "x.py")}


def test_the_users_line_is_judged_with_the_arguments_of_the_launch(bench: Any) -> None:
    launch = ["OMP_NUM_THREADS=1", "taskset", "-c", "0", "python", "x.py", "--batch=16"]
    found = bench.in_place(["python", "x.py", "--batch={batch_size:8}"], launch)
    assert found == ("python", "x.py", "--batch=16")


def test_every_case_is_a_command_with_its_script(bench: Any) -> None:
    for name, words in bench.CASES.items():
        command = parse_command(["python", *shlex.split(words)])
        assert command.target().name.endswith(".py"), name


@pytest.mark.slow
def test_a_rate_is_that_of_a_rehearsal(bench: Any) -> None:
    line = ("OMP_NUM_THREADS=1", "python", str(bench.SCRIPTS / "tokenise.py"), "-b", "4")
    assert bench.rate(bench.Key(line, LoaderSettings(1)), 0.1, 2.0) == pytest.approx(10, rel=0.3)
