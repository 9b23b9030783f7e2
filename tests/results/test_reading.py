"""What is no result file is refused by what it is, and before it is read whole."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from trainfit.lint.imports import UnreadableError, load
from trainfit.results import kinds
from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError
from trainfit.results.plan import PlanResult
from trainfit.results.runs.recording import Recording


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="Linux has it")
def test_a_device_without_an_end_is_not_read_to_it() -> None:
    endless = Path("/dev/zero")
    with pytest.raises(ResultFileError, match="not a result of trainfit"):
        documents.read(endless, "give another")
    with pytest.raises(ResultFileError, match="it is no regular file"):
        Recording.load(endless)


def test_a_device_is_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile looks for an archive's end in all that there is to read."""

    def reads(path: Path) -> bool:
        raise AssertionError(f"{path} would be read to its end")

    monkeypatch.setattr("zipfile.is_zipfile", reads)
    with pytest.raises(ResultFileError, match="it is empty"):
        kinds.read(Path(os.devnull))


def test_a_pipe_is_read_whole(tmp_path: Path) -> None:
    """As of `trainfit show <(…)`: its size is not known either."""
    text = json.dumps({"format": "trainfit-plan", "padding": "x" * 50_000})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(text))
    writer.start()
    assert documents.read(pipe, "give another") == text
    writer.join()


def test_what_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    with pytest.raises(ResultFileError, match="it is empty; re-create it"):
        PlanResult.load(tmp_path / "empty.json")
    with pytest.raises(ResultFileError, match="it is a folder; name the file in it"):
        PlanResult.load(tmp_path)
    with pytest.raises(ResultFileError, match="Not a directory; check the path"):
        Recording.load(tmp_path / "empty.json" / "r.trainfit")


@pytest.mark.parametrize("text", ['{"cells": [], "nbformat": 4}', "[1, 2]", '{"a": null}'])
def test_data_is_no_script(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    path.write_text(text)
    with pytest.raises(UnreadableError, match="it holds data"):
        load(path, "notebook.ipynb")


@pytest.mark.parametrize("text", ["", '"""Words."""', "[print(1)]\nx = 2", "print({})"])
def test_a_short_script_is_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert load(path, "train.py").name == "train.py"
