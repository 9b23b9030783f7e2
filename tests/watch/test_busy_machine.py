"""Runs that were recorded on two cores that other programs used 75 to 90% of, with the faults that
they have: scripts of bench/case_scripts, as they are or with their fault fixed.

What is recorded is what those programs made of the runs; that it is judged right does not depend on
what this machine does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_cli import ROOT
from helpers_watch import finding
from trainfit.report.watch import answer
from trainfit.results.runs.watched import load_run
from trainfit.watch.judge import judge
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.view import RunView, clean

FOLDER = ROOT / "tests" / "fixtures" / "busy_runs"
RUNS = tuple(sorted(path.name for path in FOLDER.iterdir()))
#: What weighs in each run, in its order, and what its first line says.
SAID = {
    "handed-late": (["cpu_contention"], "Other programs use the cores: 1.5 of 2"),
    "log-fixed": (["cpu_contention"], "Other programs use the cores: 1.7 of 2"),
    "lock": (["input_bound", "cpu_contention"], "workers wait for a lock, at train.py:12"),
    "one-slow": (["input_bound", "cpu_contention"], "few of them take long, at train.py:9"),
    "threads": (["thread_oversubscription", "cpu_contention"], "16 threads in the main process"),
}


@pytest.mark.parametrize("name", RUNS)
def test_other_programs_neither_make_nor_hide_a_fault(name: str) -> None:
    result = judge(load_run(FOLDER / name))
    kinds, first = SAID[name]
    assert [each.kind for each in result.findings if each.severity != "info"] == kinds
    assert first in answer(result)


@pytest.mark.parametrize("name", RUNS)
def test_the_machine_was_as_busy_as_that(name: str) -> None:
    waits = CoreWaits(RunView(clean(load_run(FOLDER / name))).judged)
    assert (waits.by_others or 0) >= 0.74 and (waits.main_thread or 0) >= 0.3


def test_a_lock_is_no_lack_of_workers() -> None:
    found = finding(judge(load_run(FOLDER / "lock")), "input_bound")
    assert "would not help" in found.fix.action and not found.fix.settings


def test_without_what_was_counted_the_waits_would_be_the_inputs(tmp_path: Path) -> None:
    """An older recording: that it has no such table is why more is said."""
    for each in (FOLDER / "handed-late").iterdir():
        if each.name != "core_waits.bin":
            (tmp_path / each.name).write_bytes(each.read_bytes())
    result = judge(load_run(tmp_path))
    assert (finding(result, "input_bound").share or 0.0) > 0.05
