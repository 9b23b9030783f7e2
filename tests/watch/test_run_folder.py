"""A run's folder goes if nothing was recorded in it, and only then."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers_watch import HEADER, step_rows
from trainfit.results.runs.watched import Event
from trainfit.watch.rank_folder import new_folder, prune, remove_empty, unused_folder
from trainfit.watch.view import tail_run


@pytest.mark.parametrize(
    ("files", "removed"),
    [
        ({"rank0.json": "{}", "sampler.log": "", "machine.bin": "xx"}, True),
        ({}, True),
        ({"rank0.json": "{}", "rank0.steps.bin": ""}, True),
        ({"rank0.json": "{}", "rank0.steps.bin": "row"}, False),
        ({"rank0.json": "{}", "notes.txt": "mine"}, False),
    ],
)
def test_an_empty_runs_folder_is_removed(
    files: dict[str, str], removed: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    assert remove_empty(folder) is removed
    left = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert left == (set() if removed else set(files))


def test_a_folder_that_has_a_run_is_not_recorded_into(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert unused_folder(folder) == folder
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert unused_folder(folder) == folder
    (folder / "rank3.json").write_text("{}")
    assert unused_folder(folder) == tmp_path / "run-2"


# --- Old runs are removed, and nothing else -------------------------------------------------------
def make(folder: Path, number: int, files: Mapping[str, str] | None = None) -> Path:
    """A run of that many minutes after the first one."""
    run = folder / f"train-20260101-00{number:02}00-{100 + number}"
    (run / "also-7").mkdir(parents=True)
    usual = {"rank0.json": "{}", "rank0.steps.bin": "x", "machine.bin": "", "sampler.log": ""}
    usual |= {"also-7/rank0.json": "{}", "rank0.fetches.12.bin": "x", "memory-rank0.pickle": "x"}
    usual |= {
        "rank0.code.12": "",
        "ranks.jsonl": "",
        "noise-rank0.json": "{}",
        "memory.bin": "",
        "core_waits.bin": "",
    }
    for name, text in (usual | dict(files or {})).items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    os.utime(run, (1e9 + number, 1e9 + number))
    return run


def left(folder: Path) -> list[int]:
    """Numbers of the runs that are there."""
    return sorted(int(path.name.rpartition("-")[2]) - 100 for path in folder.iterdir())


def test_the_newest_runs_stay(tmp_path: Path) -> None:
    for number in range(8):
        make(tmp_path, number)
    assert prune(tmp_path, most=3) == 5
    assert left(tmp_path) == [5, 6, 7]
    assert prune(tmp_path, most=3) == 0 and prune(tmp_path / "none") == 0


def test_the_oldest_go_where_they_take_too_much_room(tmp_path: Path) -> None:
    for number in range(4):
        make(tmp_path, number, {"rank0.steps.bin": "x" * 200_000})
    assert prune(tmp_path, most_bytes=500_000) == 2
    assert left(tmp_path) == [2, 3]
    # The newest is never too large.
    assert prune(tmp_path, most_bytes=1) == 1
    assert left(tmp_path) == [3]


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"rank0.pt": "weights"},
        {"also-7/notes.txt": "mine"},
        {"checkpoints/rank0.json": "{}"},
        {"rank0.json": json.dumps({"ending": "running", "pid": os.getpid(),
                                   "host": socket.gethostname()})},
        {"rank0.json": json.dumps({"ending": "running", "pid": 1 << 22, "host": "another"})},
        {"also-7/rank1.json": "{"},
    ],
    ids=["note", "weights", "note-within", "folder", "alive", "elsewhere", "being-written"],
)  # fmt: skip
def test_a_folder_that_is_not_only_a_run_s_or_is_in_use_stays(
    files: Mapping[str, str], tmp_path: Path
) -> None:
    run = make(tmp_path, 0, files)
    before = sorted(path.name for path in run.rglob("*"))
    make(tmp_path, 1)
    assert prune(tmp_path, most=1) == 0
    assert sorted(path.name for path in run.rglob("*")) == before


def test_a_run_that_ended_without_a_word_goes(tmp_path: Path) -> None:
    dead = json.dumps({"ending": "running", "pid": 1 << 22, "host": socket.gethostname()})
    make(tmp_path, 0, {"rank0.json": dead, "rank0.died.4194304": "Fatal Python error"})
    make(tmp_path, 1)
    assert prune(tmp_path, most=1) == 1


def test_what_a_sampler_writes_into_stays(tmp_path: Path) -> None:
    run = make(tmp_path, 0)
    make(tmp_path, 1)
    with (run / "machine.bin").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert prune(tmp_path, most=1) == 0
    assert prune(tmp_path, most=1) == 1


def test_names_that_are_not_ours_and_links_stay(tmp_path: Path) -> None:
    elsewhere = make(tmp_path / "elsewhere", 0)
    folder = tmp_path / "watch"
    folder.mkdir()
    (folder / "train-20260101-000000-1").symlink_to(elsewhere)
    (folder / "thesis").mkdir()
    (folder / "train-20260101").mkdir()
    linked = make(folder, 2)
    (linked / "rank1.steps.bin").symlink_to(elsewhere / "rank0.steps.bin")
    make(folder, 3)
    assert prune(folder, most=1) == 0
    assert (elsewhere / "rank0.steps.bin").exists() and len(list(folder.iterdir())) == 5


def test_what_is_pruned_is_what_new_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for script, pid, host in (("a b.py", None, ""), ("x/train-3.py", 5, "node-1"), ("", 7, "")):
        new_folder(script, pid, host).mkdir(parents=True)
    made = tmp_path / "trainfit" / "watch"
    assert prune(made, most=1) == 2
    assert len(list(made.iterdir())) == 1


def test_what_a_script_did_once_is_known_while_it_goes_on(tmp_path: Path) -> None:
    """Who set the threads, and started a process: long before the steps that are looked at."""
    steps = step_rows(50, on_gpu=False)
    dataclasses.replace(HEADER, ending="running").save(tmp_path / "rank0.json")
    steps.tofile(tmp_path / "rank0.steps.bin")
    events = [Event(1.0, kind, 0, None, "train.py:3") for kind in ("threads", "child", "epoch")]
    lines = [json.dumps(dataclasses.asdict(each)) for each in events]
    (tmp_path / "rank0.events.jsonl").write_text("\n".join(lines) + "\n")
    found = tail_run(tmp_path)
    assert found is not None
    assert [each.kind for each in found.ranks[0].events] == ["threads", "child"]
