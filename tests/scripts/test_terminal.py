"""A script finds the terminal, or the file that it reads, in its simulated run, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.plan.command.parsing import parse_command, piped_input
from trainfit.results.runs.trace import Target

_SCRIPT = """
import os, pickle, sys
lines, columns = os.popen("stty size").read().split()
assert (lines, columns) == ("40", "100") and sys.stdin.isatty()
assert tuple(os.get_terminal_size()) == (100, 40)
assert pickle.loads(pickle.dumps(os.get_terminal_size)) is os.get_terminal_size
assert sys.stdin.read() == "" and sys.stdin.readline() == ""
try:
    input("name? ")
except EOFError:
    print("at its end")
"""


@pytest.mark.slow
def test_its_size_is_there_and_nothing_is_read_from_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    target = Target("script", str(script), (), terminal=(40, 100))
    code = (
        "from trainfit.results.runs.trace import Target\n"
        f"from trainfit.scripts.execute import execute\nexecute({target!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "name? at its end\n"), done.stderr


def test_it_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    command = parse_command(["python", "train.py"])
    size = os.terminal_size((100, 40))
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: size)
    assert command.target().terminal == (40, 100)

    def none(descriptor: int) -> os.terminal_size:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(os, "get_terminal_size", none)
    assert command.target().terminal is None


# --- A file as standard input -----------------------------------------------------------------


def test_a_file_on_standard_input_is_read_by_each_run(tmp_path: Path) -> None:
    """`trainfit plan … -- python train.py < text.txt`."""
    text, script = tmp_path / "text.txt", tmp_path / "train.py"
    text.write_text("one\ntwo\n")
    script.write_text("import sys\nprint([line.strip() for line in sys.stdin])\n")
    code = (
        "import sys\nfrom trainfit.plan.command.parsing import parse_command\n"
        "from trainfit.scripts.execute import execute\n"
        f"target = parse_command([sys.executable, {str(script)!r}]).target()\n"
        "execute(target)\nexecute(target)"
    )
    with text.open() as stream:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=stream, capture_output=True, text=True, timeout=300
        )
    assert done.stdout == "['one', 'two']\n" * 2, done.stderr


@pytest.mark.parametrize("kind", ["pipe", "closed", "device", "deleted"])
def test_what_is_no_file_is_read_by_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe may never end, and what comes through it comes once."""
    (tmp_path / "train.py").touch()
    (tmp_path / "text.txt").touch()
    monkeypatch.chdir(tmp_path)
    command = parse_command(["python", "train.py"])
    former = os.dup(0)
    pipe = os.pipe()
    try:
        if kind == "pipe":
            os.dup2(pipe[0], 0)
        elif kind == "closed":
            os.close(0)
        else:
            opened = os.open("text.txt" if kind == "deleted" else os.devnull, os.O_RDONLY)
            os.dup2(opened, 0)
            os.close(opened)
            (tmp_path / "text.txt").unlink()
        found = command.target().input_file
    finally:
        os.dup2(former, 0)
        for each in (former, *pipe):
            os.close(each)
    assert found == (f"/proc/{os.getpid()}/fd/0" if kind == "deleted" else "")


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("for line in sys.stdin: pass", "pipe", True),
        ("name = input('name? ')", "pipe", True),
        ("x = model(input)", "pipe", False),
        ("for line in sys.stdin: pass", "file", False),
        ("for line in sys.stdin: pass", "closed", False),
    ],
)
def test_a_script_that_reads_what_comes_once_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str, said: bool
) -> None:
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = parse_command(["python", "train.py"])
    former, pipe = os.dup(0), os.pipe()
    try:
        if kind == "pipe":
            os.dup2(pipe[0], 0)
        elif kind == "closed":
            os.close(0)
        else:
            opened = os.open("train.py", os.O_RDONLY)
            os.dup2(opened, 0)
            os.close(opened)
        found = piped_input(command)
    finally:
        os.dup2(former, 0)
        for each in (former, *pipe):
            os.close(each)
    assert ("< FILE" in found) is said
