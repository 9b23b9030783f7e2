"""Recorded runs of a real machine, each with its symptom: read, they give the verdict they gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_cli import ROOT, json_of, trainfit
from helpers_symptoms import SYMPTOMS
from trainfit.results.runs.watched import load_run
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge

FOLDER = ROOT / "tests" / "fixtures" / "watched_runs"
RUNS = sorted(path for path in FOLDER.iterdir() if path.is_dir() and path.name in SYMPTOMS)
MOST_BYTES = 60_000


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_recorded_run_is_read_and_judged_as_it_was(folder: Path) -> None:
    done = trainfit("watch", "--read", folder, "--json", cwd=ROOT)
    result = WatchResult.from_json(done.stdout, folder)
    SYMPTOMS[folder.name].check(result)
    assert json_of(done)["folder"] == str(folder)
    assert result.steps + 10 == len(load_run(folder).ranks[0].steps)
    # The part of it that a live view sees gives no other limit.
    assert judge(load_run(folder)).limit == result.limit


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_recorded_run_is_small_and_tells_nothing_of_its_machine(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    header = load_run(folder).header
    assert header.host == "host" and header.command.startswith("python symptoms.py ")
    for path in folder.iterdir():
        data = path.read_bytes()
        assert b"/home" not in data and b"/work" not in data and b"/tmp" not in data, path


def test_two_recorded_runs_are_compared() -> None:
    done = trainfit("compare", "--json", FOLDER / "starved", FOLDER / "fed", cwd=ROOT)
    document = json_of(done)
    assert (done.returncode, document["verdict"]) == (0, "faster"), done.stderr
    differs = {each["what"]: (each["before"], each["after"]) for each in document["differences"]}
    assert differs["num_workers"] == ("1", "8")
