"""Runs a command and watches when it answers and what processor time its process tree takes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

#: How often the process tree is looked at, in seconds.
_EVERY_S = 0.2
#: How the line of the first answer begins.
_FIRST = b"trainfit: first answer: "


@dataclass(frozen=True)
class Done:
    """``first_*`` are those at the first answer (``None``: there was none): trainfit's line that
    says so on standard error, or else the first line of standard output.

    ``cpu_s`` is of the whole tree, as far as it was seen (a look every 0.2 s). ``returncode`` is
    ``None`` where the time limit ended it.
    """

    returncode: int | None
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    first_wall_s: float | None
    first_cpu_s: float | None


class _Clock:
    """Processor time of a tree of processes, also of those in it that have ended."""

    def __init__(self, pid: int) -> None:
        self.root, self.seen = psutil.Process(pid), dict[tuple[int, float], float]()

    def seconds(self) -> float:
        """Each process's own time, the last that was seen of it."""
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.Error:
            tree = []
        for each in tree:
            try:
                times = each.cpu_times()
                self.seen[each.pid, each.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        return sum(self.seen.values())


def run(words: Sequence[str | Path], cwd: Path, env: dict[str, str], limit_s: float) -> Done:
    """Run it with nothing on standard input; after ``limit_s`` it is killed with its children."""
    start = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    clock, out, err = _Clock(process.pid), list[bytes](), list[bytes]()
    first: list[tuple[float, float]] = []

    def read(pipe: IO[bytes], into: list[bytes], begins: bytes) -> None:
        for line in iter(pipe.readline, b""):
            if not first and line.strip() and line.startswith(begins):
                first.append((time.monotonic() - start, clock.seconds()))
            into.append(line)

    readers = [
        threading.Thread(target=read, args=(process.stdout, out, b""), daemon=True),
        threading.Thread(target=read, args=(process.stderr, err, _FIRST), daemon=True),
    ]
    for reader in readers:
        reader.start()
    code = _wait(process, clock, start + limit_s)
    wall = time.monotonic() - start
    _kill_group(process.pid)  # workers that outlived it, and the pipes that they hold
    for reader in readers:
        reader.join(timeout=5)
    wall_first, cpu_first = first[0] if first else (None, None)
    return Done(
        code,
        b"".join(out).decode(errors="replace"),
        b"".join(err).decode(errors="replace"),
        wall,
        clock.seconds(),
        wall_first,
        cpu_first,
    )


def _wait(process: subprocess.Popen[bytes], clock: _Clock, until: float) -> int | None:
    while time.monotonic() < until:
        try:
            return process.wait(timeout=_EVERY_S)
        except subprocess.TimeoutExpired:
            clock.seconds()
    _kill_group(process.pid)
    process.wait()
    return None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
