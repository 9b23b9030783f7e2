"""A worker that ends within a batch leaves the stack that it ended in."""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from trainfit.findings.tracebacks import parse_stacks
from trainfit.watch.recorder.worker_hooks import WorkerDeath, deaths


def decode(how: str) -> None:
    if how in ("exit", "after"):
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)


def work(how: str, stem: Path) -> None:
    faulthandler.disable()  # pytest's own
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    death = WorkerDeath(stem, lambda: how != "after")
    decode(how)
    death.close()


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("exit", 3, "os._exit(3)"),
        ("crash", -signal.SIGSEGV, "string_at"),
        ("after", 3, None),
        ("returns", 0, None),
    ],
)
def test_the_stack_is_left(how: str, code: int, line: str | None, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=work, args=(how, tmp_path / "r"))
    process.start()
    process.join(60)
    assert process.exitcode == code
    found = [stack.where for text in deaths(tmp_path / "r") for stack in parse_stacks(text)]
    lines, first = inspect.getsourcelines(decode)
    expected = [first + at for at, text in enumerate(lines) if line is not None and line in text]
    assert [frame.line for frame in found if frame is not None] == expected
