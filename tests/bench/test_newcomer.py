"""bench/newcomer.py: how it reads times and errors, and its list of bad command lines."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def newcomer() -> Iterator[Any]:
    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("newcomer")
    sys.path.remove(str(BENCH))
    for name in ("newcomer", "_bad_commands", "_bench", *filter(_of_the_walk, list(sys.modules))):
        if name not in before:
            sys.modules.pop(name, None)


def _of_the_walk(name: str) -> bool:
    return name.startswith("_walk")


def test_the_first_answer_is_timed_from_the_start(newcomer: Any) -> None:
    lines = [
        "100.5 start",
        "a line of the shell",
        "101.0 trainfit: simulating train.py …",
        "112,75 trainfit: first answer: the first steps fit, 932 MiB of 23.64 GiB",
        "150.0 trainfit: first answer: a later one",
    ]
    assert newcomer.first_answer(lines) == pytest.approx(12.25)
    assert newcomer.first_answer(lines[:3]) is None


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("trainfit: error: no file plan.json", True),
        ("usage: trainfit plan [options]", True),
        ("trainfit: reading plan.json …", False),
        ("", False),
    ],
)
def test_lines_of_an_error_are_counted(newcomer: Any, line: str, counts: bool) -> None:
    assert newcomer.progress(line) is not counts


def test_there_are_many_bad_command_lines(newcomer: Any, tmp_path: Path) -> None:
    lines = newcomer._bad_commands.COMMANDS
    assert len(set(lines)) == len(lines) >= 120
    assert all("trainfit" in shlex.split(line) for line in lines)
    newcomer._bad_commands.prepare(tmp_path)
    assert (tmp_path / "policy.py").is_file() and not (tmp_path / "train.py").exists()


def test_busy_loops_end_with_the_block(newcomer: Any) -> None:
    with newcomer.busy(0):
        pass
    with pytest.raises(KeyError), newcomer.busy(1):
        raise KeyError
