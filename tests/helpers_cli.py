"""Runs the command ``trainfit`` as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest import mock

from helpers_warm import OUR_PATH, warm_runs
from trainfit.cli.main import main
from trainfit.plan.command.tunables import LOADER_TUNABLES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "training_scripts"
#: The verb that imports the user's code and times it in its own process.
_MEASURING = {"pace"}
#: Variables that are read when they are needed, not when a module is imported, or by what a call
#: starts alone.
_READ_LATER = {
    *("XDG_STATE_HOME", "TRAINFIT_CONFIG", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "STUB_TUNER"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def environment(**more: str) -> dict[str, str]:
    """This process's, with trainfit importable and without settings that change results."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_"))}
    return {**kept, "PYTHONPATH": OUR_PATH, **more}


def trainfit(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """One call; ``more`` are variables of its environment.

    In this process, which has imported PyTorch already, where that makes no difference: what
    runs the user's script are its children in either case. With variables that Python or an import
    reads, or a verb that measures in its own process, in one of its own.

    A plan leaves the DataLoader out, which takes half a minute, unless ``words`` ask for it by
    ``--loader`` or a placeholder.
    """
    called = _quick([str(word) for word in words])
    if more.keys() <= _READ_LATER and called[:1] and called[0] not in _MEASURING:
        return called_here(called, cwd, **more)
    return subprocess.run(
        [sys.executable, "-m", "trainfit", *called],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def called_here(words: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """``words`` given to the command's entry point, as its process would be."""
    out, err = _stream(), _stream()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, environment(**more), clear=True),
        warm_runs(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(words)
        except SystemExit as exit:  # argparse: bad options, --help
            code = exit.code if isinstance(exit.code, int) else 1
    return subprocess.CompletedProcess(words, code, _text(out), _text(err))


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    return cast(io.BytesIO, stream.buffer).getvalue().decode("utf-8")


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
