"""Which Python a command names, what is said where it cannot run it, and how it gets our code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers_commands import parse, refused
from helpers_python import answering, environment_with_torch, environment_without_torch, program
from trainfit.plan.command import interpreter
from trainfit.plan.command.interpreter import Interpreter, own_interpreter
from trainfit.plan.command.prefix import words_to_start
from trainfit.plan.command.tunables import CommandError

OWN = Path(sys.executable)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def test_our_own_interpreter_needs_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(OWN.parent))
    for line in ("python train.py", f"{OWN} train.py", f"PATH={OWN.parent} python3 train.py"):
        command = parse(line)
        assert (command.python, command.interpreter.note) == (sys.executable, "")
        assert command.line() == line


def test_the_interpreter_on_path_runs_the_command(folder: Path) -> None:
    other = answering(folder / "bin" / "python", torch="2.9.1+cu128")
    found = parse("python train.py").interpreter
    assert (found.path, found.is_own, found.torch) == (str(other), False, "2.9.1+cu128")
    assert found.note == f"run by python ({other}, Python 3.12.1, torch 2.9.1+cu128)"


@pytest.mark.parametrize("before", ["env PATH={}", "PATH={}", "PATH=/nowhere nice env PATH={}"])
def test_the_commands_own_path_decides(folder: Path, before: str) -> None:
    other = answering(folder / "elsewhere" / "python3.12")
    answering(folder / "bin" / "python3.12", torch=None)
    found = parse(f"{before.format(other.parent)} python3.12 train.py")
    assert found.python == str(other)


def test_a_relative_path_and_a_named_version(folder: Path) -> None:
    other = answering(folder / "venv" / "bin" / "python")
    assert parse("venv/bin/python train.py").python == "venv/bin/python"
    named = answering(folder / "bin" / "python3.13")
    assert parse("python3.13 -m pkg").python == str(named)
    assert parse(f"{other} -O train.py").python_flags == ("-O",)


@pytest.mark.parametrize("name", ["python", "python3"])
def test_plain_python_without_torch_gives_way_and_says_so(folder: Path, name: str) -> None:
    bare = answering(folder / "bin" / name, torch=None)
    command = parse(f"{name} train.py")
    assert command.python == sys.executable
    assert command.line() == f"{name} train.py"
    assert command.interpreter.note.startswith(f"{name} ({bare}, Python 3.12.1) has no torch: ")
    assert f"trainfit's own Python ({sys.executable}) runs the command" in command.interpreter.note


def test_plain_python_that_does_not_exist_or_run_gives_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(folder / "bin" / "python", "#!/bin/sh\necho 'no version is set' >&2\nexit 127\n")
    assert "does not run (no version is set)" in parse("python train.py").interpreter.note
    monkeypatch.setenv("PATH", str(folder))
    command = parse("python train.py")
    assert command.interpreter.note.startswith("python is not on PATH: trainfit's own")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("python3.12 train.py", "'python3.12': there is no such program on PATH"),
        ("./venv/python train.py", "'./venv/python': there is no such program; check the path"),
        ("bare/python train.py", "bare/python (Python 3.12.1) has no torch; install it there"),
        ("bare/python train.py", "(bare/python -m pip install torch)"),
        ("old/python train.py", "old/python (Python 3.10.4, torch 2.9.0): trainfit's code needs"),
        ("old/python train.py", "Python 3.11 or later"),
        ("torch/python train.py", "trainfit needs torch 2.8 or later; update it there"),
        ("lone/python train.py", "has no numpy, which trainfit needs there; install it"),
        ("free/python train.py", "has no psutil, which trainfit needs there; install it"),
        ("shim/python3.14 train.py", "does not run (pyenv: python3.14: command not found)"),
        ("text/python train.py", "does not run ("),
    ],
)
def test_another_interpreter_that_cannot_be_used_is_refused(
    folder: Path, line: str, says: str
) -> None:
    answering(folder / "bare" / "python", torch=None)
    answering(folder / "old" / "python", torch="2.9.0", version=(3, 10, 4))
    answering(folder / "torch" / "python", torch="2.7.1+cu118")
    answering(folder / "lone" / "python", has=("psutil",))
    answering(folder / "free" / "python", has=("numpy",), abi="t")
    fails = "#!/bin/sh\nprintf 'pyenv: python3.14: command not found\\nmore\\n' >&2\nexit 127\n"
    program(folder / "shim" / "python3.14", fails)
    program(folder / "text" / "python", "no program at all")
    assert says in refused(line)


def test_an_interpreter_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(folder / "bin" / "python")
    asked, run = [], subprocess.run

    def noted(words: list[str], **more: Any) -> Any:
        asked.append(words)
        return run(words, **more)

    monkeypatch.setattr(interpreter.subprocess, "run", noted)
    for _ in range(3):
        parse("python train.py")
    assert len(asked) == 1


def test_an_executable_script_is_run_by_its_first_line(folder: Path) -> None:
    other = answering(folder / "bin" / "python3")
    program(folder / "run.py", "#!/usr/bin/env python3\n")
    command = parse("./run.py --lr 1")
    assert (command.python, command.name) == (str(other), "./run.py")
    program(folder / "bin" / "fit", f"#!{other} -sE\n")
    command = parse("fit --lr 1")
    assert (command.python, command.python_flags) == (str(other), ("-sE",))
    program(folder / "bin" / "gone", "#!/opt/no/python3\n")
    assert "'gone': the interpreter of its first line, '/opt/no/python3', does not" in refused(
        "gone"
    )


def test_a_program_next_to_our_python_is_found_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(folder / "own" / "lerobot-fit", f"#!{OWN}\n")
    monkeypatch.setattr(sys, "executable", str(folder / "own" / "python"))
    (folder / "own" / "python").symlink_to(OWN)
    command = parse("lerobot-fit")
    assert command.name == str(folder / "own" / "lerobot-fit")
    assert command.interpreter.note.startswith("lerobot-fit is not on PATH: ")
    words, said = words_to_start(["nice", "lerobot-fit", "x"])
    assert words == ["nice", command.name, "x"] and said == command.interpreter.note


# -- commands that are run for real --------------------------------------------------------------


def test_a_command_is_started_with_the_python_of_its_plan(folder: Path) -> None:
    answering(folder / "bin" / "python", torch=None)
    words, said = words_to_start(["taskset", "-c", "0", "python", "train.py"])
    assert words == ["taskset", "-c", "0", sys.executable, "train.py"]
    assert said == parse("python train.py").interpreter.note


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sh -c 'python x'", ""),
        ("sudo python x", ""),
        ("uv run python x", ""),
        ("make train", ""),
        ("good/python x", ""),
        ("bare/python x", "bare/python (Python 3.12.1) has no torch: it runs as it is"),
        ("old/python x", "old/python is Python 3.10.4, and 3.11 is needed to record: it runs"),
    ],
)
def test_other_commands_are_started_as_they_are(folder: Path, line: str, says: str) -> None:
    answering(folder / "good" / "python", has=())
    answering(folder / "bare" / "python", torch=None)
    answering(folder / "old" / "python", version=(3, 10, 4))
    words, said = words_to_start(shlex.split(line))
    assert words == shlex.split(line)
    assert said.startswith(says) and bool(said) == bool(says)


def test_a_python_that_does_not_exist_is_not_started() -> None:
    with pytest.raises(CommandError, match=r"'python3\.99': there is no such program on PATH"):
        words_to_start(["nice", "python3.99", "train.py"])


# -- our code in it ------------------------------------------------------------------------------

_WHERE = """
import psutil, multiprocessing
import trainfit.version, trainfit.plan.runs
print(trainfit.version.__file__, psutil.__file__, importlib.util.find_spec("rich"), sys.path[-1])
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(pool.apply(trainfit.version.__dict__.get, ("__version__",)))
"""


def output(found: Interpreter, code: str) -> str:
    words = found.start(f"import importlib.util\n{code}", "-I")
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_our_own_has_all_that_it_has() -> None:
    assert "None" not in output(own_interpreter(), _WHERE)


def test_another_environment_gets_trainfit_and_what_it_lacks_and_nothing_else(
    folder: Path,
) -> None:
    """Nothing of the folder in which trainfit is installed is seen there."""
    python = environment_without_torch(folder / "venv")
    ours, psutil, rich, path = output(
        Interpreter(str(python), "python", lacks=("psutil",), is_own=False), _WHERE
    ).splitlines()[0].split()  # fmt: skip
    assert ours == str(Path(interpreter.__file__).parents[2] / "version.py")
    assert psutil.startswith(path) and rich == "None"
    assert sorted(os.listdir(path)) == ["psutil", "trainfit"]


def test_a_real_environment_is_asked(folder: Path) -> None:
    bare = environment_without_torch(folder / "bare")
    assert f"{bare} (Python {'.'.join(map(str, sys.version_info[:3]))}) has no torch" in refused(
        f"{bare} train.py"
    )
    found = parse(f"{environment_with_torch(folder / 'torch')} train.py").interpreter
    assert (found.lacks, found.version) == (("psutil", "threadpoolctl"), sys.version_info[:3])
    assert found.torch == parse(f"{OWN} train.py").interpreter.torch or found.torch
