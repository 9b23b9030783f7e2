"""What comes after a script's loops, as its source says."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trainfit.scripts.phases.loops import Course, course_of

_SCRIPT = """
def step(log):
    found.append(course_of(sys._getframe()))
    log.append(1)
    update_average(log)

def update_average(log):
    pass

def main():
    log = []
    for epoch in range(2):
        for batch in range(2):
            step(log)
{after}

main()
"""


def _course(folder: Path, after: str, text: str = _SCRIPT) -> Course:
    script = folder / "train.py"
    script.write_text(text.format(after=after))
    found: list[Course] = []
    code = compile(script.read_text(), str(script), "exec")
    exec(code, {"found": found, "course_of": course_of, "sys": sys})
    return found[0]


def test_what_a_step_of_its_own_function_does_next_is_not_after_the_loops(tmp_path: Path) -> None:
    assert _course(tmp_path, "    return log").after is None


def test_what_follows_the_loops(tmp_path: Path) -> None:
    after = _course(tmp_path, "    update_average(log)").after
    assert after is not None
    assert after.endswith("train.py:15")


#: An epoch in a function of its own.
_EPOCH = """
def epoch_of(log):
    for batch in range(2):
        found.append(course_of(sys._getframe()))
    update_average(log)

def update_average(log):
    pass

def main():
    for epoch in range(2):
        epoch_of([])
{after}

main()
"""


@pytest.mark.parametrize(("after", "line"), [("    return", None), ("    update_average(1)", 13)])
def test_what_follows_an_epochs_own_loop_is_not_after_all(
    tmp_path: Path, after: str, line: int | None
) -> None:
    found = _course(tmp_path, after, _EPOCH).after
    assert found == (None if line is None else f"{tmp_path / 'train.py'}:{line}")


#: A library's engine has the loop: it calls the script's function for each step.
_ENGINE = """
import functools
def train_step(batch):
    found.append(course_of(sys._getframe()))
    return update_average(batch)

def update_average(log):
    pass

def main():
    functools.reduce(lambda _, batch: call(train_step, batch), range(2), None)
{after}

main()
"""


@pytest.mark.parametrize(("after", "line"), [("    print()", None), ("    update_average(1)", 12)])
def test_what_follows_a_librarys_loop(tmp_path: Path, after: str, line: int | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ENGINE.format(after=after))
    found: list[Course] = []
    engine: dict[str, Any] = {}
    exec(compile("def call(step, batch): step(batch)", threading.__file__, "exec"), engine)
    space = {"found": found, "course_of": course_of, "sys": sys, "call": engine["call"]}
    exec(compile(script.read_text(), str(script), "exec"), space)
    assert found[0].after == (None if line is None else f"{script}:{line}")
