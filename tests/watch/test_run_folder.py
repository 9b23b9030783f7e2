"""A run's folder goes if nothing was recorded in it, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.watch.run_folder import remove_empty, unused_folder


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
