"""Result files that trainfit wrote are read and shown; those of another version are refused.

They lie in ``tests/fixtures/results``, as KIND-vVERSION; ``make.py`` there writes those of the
present version by the commands that users call.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import ROOT, error_line, trainfit
from helpers_machines import MACHINES
from trainfit import results
from trainfit.hardware.machine import recorded
from trainfit.results.files.documents import Format
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs.watched import RunHeader

sys.path.insert(0, str(ROOT / "bench"))

import _truth_files
from _truth_files import Truth, read_truth

FOLDER = ROOT / "tests" / "fixtures" / "results"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".json", ".trainfit"))

#: Kinds that are printed or handed to other programs, and that nothing here reads again.
WRITTEN_ONLY = {"memory-report", "memory-by-hand", "verification"}


def shown(path: Path) -> str:
    """What ``trainfit show`` prints of it."""
    done = trainfit("show", path, cwd=ROOT)
    if done.returncode:
        raise ResultFileError(path, error_line(done), "")
    return done.stdout


def paged(path: Path) -> str:
    """What ``trainfit report`` prints of it."""
    done = trainfit("report", path, "-o", "-", cwd=ROOT)
    if done.returncode:
        raise ResultFileError(path, error_line(done), "")
    return done.stdout


def measured_truth(path: Path) -> str:
    truth = read_truth(path)
    assert isinstance(truth, Truth) and truth.memory.max_allocated_bytes > 0
    return truth.case.model


#: How each kind is read, and made a text.
READ: dict[str, Callable[[Path], str]] = {
    **dict.fromkeys(
        ("plan", "recording", "loader", "rehearsal", "pace", "doctor", "profile"), shown
    ),
    **dict.fromkeys(("watch", "watch-comparison", "watch-verification"), shown),
    **dict.fromkeys(("batch", "noise-scale", "gpus", "gpu-comparison"), shown),
    **dict.fromkeys(("memory-snapshot", "sweep"), shown),
    "report": paged,
    "watched-run": lambda path: RunHeader.load(path).command,
    "gpu-truth": measured_truth,
    "machine": lambda path: str(recorded.read_machine(path)["about"]),
}


def formats() -> dict[str, int]:
    """Every kind of file that has a version, with the current one."""
    names = [each.name for each in pkgutil.walk_packages(results.__path__, "trainfit.results.")]
    values = [each for name in names for each in vars(importlib.import_module(name)).values()]
    kinds = [getattr(each, "FILE", each) for each in values]
    found = {each.name: each.version for each in kinds if isinstance(each, Format)}
    found |= {each.FORMAT: each.VERSION for each in (recorded, _truth_files)}
    return {name.removeprefix("trainfit-"): version for name, version in found.items()}


def kind_and_version(path: Path) -> tuple[str, int]:
    found = re.fullmatch(r"(.+)-v(\d+)", path.stem)
    assert found is not None, path
    return found[1], int(found[2])


def test_every_kind_has_a_file_of_its_present_version() -> None:
    there = {kind_and_version(path) for path in FILES}
    there |= {("machine", json.loads(path.read_text())["version"]) for path in MACHINES.iterdir()
              if path.suffix == ".json"}  # fmt: skip
    wanted = formats()
    assert set(wanted) == set(READ) | WRITTEN_ONLY, "say how the kind is read"
    absent = {(kind, wanted[kind]) for kind in READ} - there
    assert not absent, "run tests/fixtures/results/make.py --only KIND"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_and_shown(path: Path) -> None:
    kind, version = kind_and_version(path)
    assert document_of(path)["version"] == version
    assert READ[kind](path).strip()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_a_newer_version_is_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    kind, _ = kind_and_version(path)
    newer = tmp_path / path.name
    write(newer, path, {**document_of(path), "version": formats()[kind] + 1})
    with pytest.raises(ResultFileError) as refused:
        READ[kind](newer)
    said = str(refused.value)
    assert "version" in said and "upgrade trainfit" in said and "\n" not in said


@pytest.mark.parametrize("number", [1, 13])
@pytest.mark.parametrize(
    "path", [path for path in FILES if "truth" not in path.stem], ids=lambda path: path.stem
)
def test_a_file_from_before_formats_restarted_is_refused_in_one_line(
    path: Path, number: int, tmp_path: Path
) -> None:
    """Whatever its number: it names no trainfit that wrote it."""
    document = {**document_of(path), "version": number}
    del document["written_by"]
    kind, _ = kind_and_version(path)
    write(tmp_path / path.name, path, document)
    with pytest.raises(ResultFileError, match=f"wrote it, in version {number} of its") as refused:
        READ[kind](tmp_path / path.name)
    said = str(refused.value)
    assert re.search(r"re-(create|record|run)", said) and "\n" not in said


def document_of(path: Path) -> dict[str, Any]:
    """The document; a recording's header."""
    if not zipfile.is_zipfile(path):
        return dict(json.loads(path.read_text()))
    with zipfile.ZipFile(path) as archive:
        return dict(json.loads(archive.read("header.json")))


def write(target: Path, source: Path, document: dict[str, Any]) -> None:
    """The file with another document; a recording's other members as they are."""
    text = json.dumps(document)
    if not zipfile.is_zipfile(source):
        target.write_text(text)
        return
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, text if name == "header.json" else old.read(name))
