"""Runs the command ``trainfit`` as a user does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainfit.plan.command.tunables import LOADER_TUNABLES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "training_scripts"


def environment(**more: str) -> dict[str, str]:
    """This process's, with trainfit importable and without settings that change results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_"))}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), **more}


def trainfit(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """One call; ``more`` are variables of its environment.

    A plan leaves the DataLoader out, which takes half a minute, unless ``words`` ask for it by
    ``--loader`` or a placeholder.
    """
    return subprocess.run(
        [sys.executable, "-m", "trainfit", *_quick([str(word) for word in words])],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def _quick(words: list[str]) -> list[str]:
    asked = any("{" + name in word for word in words for name in LOADER_TUNABLES)
    if words[:1] != ["plan"] or asked or {"--loader", "--no-loader"} & set(words):
        return words
    return ["plan", "--no-loader", *words[1:]]


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Standard output, which must be one JSON document and nothing else."""
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line in which a failed call says what was wrong."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("trainfit: error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr.partition("--- the script's own output ---")[0]
    return lines[0].removeprefix("trainfit: error: ")
