"""What the adapters share: nothing that fails in it reaches the training, and it pickles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import trainfit
from helpers_cli import ROOT, SCRIPTS, environment
from helpers_cli import trainfit as trainfit_command
from trainfit.integrations.watched_training import WatchedTraining
from trainfit.results.watch import WatchResult
from trainfit.watch import in_script

RESULT = trainfit.load(ROOT / "tests" / "fixtures" / "results" / "watch-v1.json")


class Watched:
    """In the place of what ``trainfit.watch()`` returns."""

    def __init__(self, result: object = RESULT, is_lowest_rank: bool = True) -> None:
        self.stops, self._result = 0, result
        self.is_lowest_rank = is_lowest_rank

    def stop(self) -> None:
        self.stops += 1

    def result(self) -> object:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def __reduce__(self) -> Any:
        raise TypeError("it is of this process alone")


def begun(watched: Watched) -> WatchedTraining:
    training = WatchedTraining()
    with mock.patch.object(in_script, "watch", lambda folder: watched):
        training.begin()
    return training


def test_the_numbers_go_to_each_logger_once() -> None:
    logged: list[dict[str, float]] = []
    training = begun(watched := Watched())
    training.end([logged.append, logged.append])
    training.end([logged.append])
    assert isinstance(RESULT, WatchResult)
    assert logged == [RESULT.metrics()] * 2 and logged[0] is not logged[1]
    assert watched.stops == 1 and training.result is RESULT


def test_of_several_ranks_the_lowest_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    training = begun(watched := Watched(is_lowest_rank=False))
    training.end([fails])
    assert watched.stops == 1 and training.result is None
    assert capsys.readouterr().err == ""


def test_a_training_that_raised_is_over_when_the_next_begins() -> None:
    training = begun(first := Watched())
    with mock.patch.object(in_script, "watch", lambda folder: Watched()):
        training.begin()
    assert first.stops == 1 and training.result is None


def fails(*_: Any) -> None:
    raise RuntimeError("the tracker is down")


def test_nothing_that_fails_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    training = WatchedTraining()
    with mock.patch.object(in_script, "watch", fails):
        training.begin()
    training.end([fails])  # it never began
    begun(Watched()).end([fails])
    begun(Watched(OSError("gone"))).end([fails])
    said = [line for line in capsys.readouterr().err.splitlines() if "not " in line]
    assert said == [
        "trainfit watch: not watched: RuntimeError: the tracker is down",
        "trainfit watch: not judged or not logged: RuntimeError: the tracker is down",
        "trainfit watch: not judged or not logged: OSError: gone",
    ]


def test_a_copy_watches_nothing() -> None:
    training = begun(watched := Watched())
    for other in (copy.deepcopy(training), pickle.loads(pickle.dumps(training))):
        other.end([fails])
        assert other.result is None
    assert watched.stops == 0


def test_importing_trainfit_imports_no_framework() -> None:
    code = (
        "import sys, trainfit, trainfit.integrations; "
        "names = {'lightning', 'pytorch_lightning', 'transformers', 'accelerate', 'torch'}; "
        "print(names & set(sys.modules), sorted(trainfit.integrations.__all__)); "
        "trainfit.integrations.Nothing"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.stdout.startswith("set() ['AccelerateTracker'"), done.stderr
    assert "has no attribute 'Nothing'" in done.stderr


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("AccelerateTracker", "accelerate"),
        ("TransformersCallback", "transformers"),
        ("LightningCallback", "lightning"),
    ],
)
def test_a_framework_that_is_not_installed_is_named(name: str, package: str) -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in "
        "('lightning', 'pytorch_lightning', 'transformers', 'accelerate'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"from trainfit.integrations import {name}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert "Error: " in last and package in last


def test_runs_of_trainfits_own_are_not_recorded(tmp_path: Path) -> None:
    """A plan simulates the script: that is no training."""
    script = tmp_path / "train.py"
    script.write_text(f"import trainfit\ntrainfit.watch()\n{(SCRIPTS / 'tiny.py').read_text()}")
    words = ["simulate", "--gpu", "T4", "--steps", "2", script]
    done = trainfit_command(*words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr
    assert "trainfit watch" not in done.stderr + done.stdout
    assert "the script wrote" not in done.stdout
