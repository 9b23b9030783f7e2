"""A script that is started in a terminal finds it in its simulated run, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.plan.command.parsing import parse_command
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
