"""What a call of ``trainfit`` imports before it knows what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers_cli import environment
from trainfit.cli import machine_options, results_options
from trainfit.cli.parser import VERBS
from trainfit.cli.verbs.report import FORMS
from trainfit.doctor.checks import NAMES
from trainfit.watch.verify import LEAST_RUNS, ORDER

#: What takes most of the time where it is imported.
_SLOW = ("torch", "numpy", "rich", "psutil", "trainfit.plan.planner", "trainfit.cli.verbs.plan")


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS), ["paln"]])
def test_help_and_usage_errors_import_nothing_that_takes_time(words: list[str]) -> None:
    code = (
        "import atexit, sys; from trainfit.cli.main import main; "
        f"atexit.register(lambda: print([m for m in {_SLOW} if m in sys.modules], "
        "len(sys.modules) < 200)); "
        f"main({words!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == (2 if words == ["paln"] else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "[] True"


def test_no_verb_imports_pytorch() -> None:
    """It takes seconds, and only processes that verbs start need it."""
    code = (
        "import sys; from trainfit.cli.parser import VERBS; "
        "[each.code() for each in VERBS.values()]; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_what_the_options_name_is_what_there_is() -> None:
    """They write it down, so that the help need not import what has it."""
    assert machine_options.NAMES == NAMES
    assert tuple(FORMS) == results_options.ENDS
    assert (LEAST_RUNS, len(ORDER)) == (results_options.VERIFY_RUNS, results_options._VERIFY_CYCLE)
