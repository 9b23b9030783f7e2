"""The child processes of simulated runs: one of its own for each, or forked from a warm one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil

from trainfit.plan.command import Command

#: Starts a module of ours in the user's interpreter, whose environment stays as it is; simulated
#: GPUs in it keep time by the speed model.
_START = (
    "import sys; sys.path.append({source!r}); from trainfit.simgpu import clock; "
    "from trainfit.speed.device_clock import StepClock; clock.use(StepClock); "
    "from {module} import main; main()"
)

#: Seconds until a stopped run is taken to be gone; it is killed long before.
_END_S = 12.0


class Process(Protocol):
    """A running child."""

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); ``None`` while it runs."""

    def end(self) -> None:
        """End it and what it left running (loader workers, its own children)."""


class OwnProcess:
    """A run in a process of its own; output goes to ``folder/output.txt``."""

    def __init__(
        self,
        command: Command,
        folder: Path,
        environment: Mapping[str, str],
        module: str = "trainfit.simgpu.runner",
    ) -> None:
        words = [*_python(command, module), str(folder / "request.json")]
        with (folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def interrupt(self) -> None:
        """Let it end by itself, as upon Ctrl-C (only it, not what it started)."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        _end_group(self._process)


class WarmProcess:
    """Forks runs from a process that has imported PyTorch (:mod:`trainfit.simgpu.forking`)."""

    def __init__(self, command: Command, environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _python(command, "trainfit.simgpu.forking"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._log = log
        self._lock = threading.Lock()

    def start(self, folder: Path) -> Process:
        """Begin the run that ``folder/request.json`` asks for."""
        self.tell(f"run {folder}")
        return _ForkedProcess(self, folder)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(line) + b"\n")
            self._process.stdin.flush()

    def ended(self, folder: Path) -> int | None:
        """The process's own exit code, if it ended; its words are then the run's output."""
        code = self._process.poll()
        if code is not None and not (folder / "output.txt").exists():
            (folder / "output.txt").write_bytes(self._log.read_bytes())
        return code

    def close(self) -> None:
        """End it and all its runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        _end_group(self._process)


class _ForkedProcess:
    def __init__(self, warm: WarmProcess, folder: Path) -> None:
        self._warm = warm
        self._folder = folder

    def poll(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / "code").read_text())
        return self._warm.ended(self._folder)

    def end(self) -> None:
        if self.poll() is None:
            self._warm.tell(f"stop {self._folder}")
        deadline = time.monotonic() + _END_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)


def can_fork() -> bool:
    """Is forking after imports safe here? Frameworks of macOS do not bear it."""
    return sys.platform == "linux"


def _python(command: Command, module: str) -> list[str]:
    source = str(Path(__file__).resolve().parents[2])
    return [
        command.python,
        *("-u", *command.python_flags),  # what it printed is there when it is killed
        *("-c", _START.format(source=source, module=module)),
    ]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for kill, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, kill)
        except (ProcessLookupError, PermissionError):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.wait()
    _end_session(process.pid)


def _end_session(leader: int) -> None:
    """End what is left of a child's session: runs of a loader are groups of their own in it."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
