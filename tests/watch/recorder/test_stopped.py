"""A process that the kernel has stopped is found by its state."""

from __future__ import annotations

import os
from pathlib import Path

from trainfit.watch.recorder.looks.locked import stopped_process


def made(root: Path, parent: int, children: dict[int, str]) -> None:
    tasks = root / str(parent) / "task" / str(parent)
    tasks.mkdir(parents=True)
    (tasks / "children").write_text("".join(f"{pid} " for pid in children))
    for pid, state in children.items():
        (root / str(pid)).mkdir()
        (root / str(pid) / "stat").write_text(f"{pid} (a) b) {state} {parent} 1")


def test_a_child_or_a_sibling_that_is_stopped(tmp_path: Path) -> None:
    made(tmp_path, os.getpid(), {11: "S", 12: "T"})
    assert stopped_process(tmp_path) == 12
    made(tmp_path / "other", os.getppid(), {21: "R", 22: "t"})
    assert stopped_process(tmp_path / "other") == 22


def test_none_is_where_all_run_or_sleep(tmp_path: Path) -> None:
    made(tmp_path, os.getpid(), {11: "S", 12: "D", 13: "Z"})
    assert stopped_process(tmp_path) is None
    assert stopped_process(tmp_path / "none") is None
