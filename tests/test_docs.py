"""The commands that README and docs show: each is one that this version takes."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cli import ROOT, trainfit
from trainfit.cli.command_line.parser import read_words
from trainfit.results.files.errors import TrainfitError

TUTORIAL = ROOT / "docs" / "getting-started.md"
PAGES = [
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "how-it-works").glob("*.md")),
]  # fmt: skip


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that begin with `trainfit`, continued lines joined, remarks left out."""
    fenced, text = False, ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        if not (fenced or line.startswith("    ")):
            text = ""
            continue
        text += line.strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text.startswith("trainfit "):
            yield text.partition("  #")[0].strip()
        text = ""


COMMANDS = [
    pytest.param(command, id=f"{page.relative_to(ROOT)}: {command}"[:120])
    for page in PAGES
    for command in commands(page)
]


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 60
    assert len(list(commands(TUTORIAL))) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_its_options_are_known(command: str) -> None:
    words = shlex.split(command)[1:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read_words(words)
    except (SystemExit, TrainfitError) as error:
        pytest.fail(f"{command}: {said.getvalue().strip() or error}")


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Its commands one after the other, but for those of a machine with a GPU."""
    for name in ("examples", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    ran = 0
    for command in commands(TUTORIAL):
        _, *words = shlex.split(command.replace("train.py …", "x"))
        if words[0] in ("doctor", "verify") or "…" in command:
            continue
        done = trainfit(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        ran += 1
    assert ran >= 6
