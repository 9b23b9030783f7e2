"""A process that has imported PyTorch once and forks one child for each simulated run.

Importing takes longer than most runs do. Nothing of PyTorch has computed before the fork, so
a child is what a fresh process would be; the user's script and all that it imports run in the
child alone.

Lines on standard input are ``run FOLDER`` and ``stop FOLDER``. A run reads
``FOLDER/request.json`` and prints to ``FOLDER/output.txt``; when its process has ended, its
exit code (negative: signal) is in ``FOLDER/code``. The end of the input ends everything.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
from pathlib import Path

#: Seconds between looks for children that ended.
_TICK_S = 0.02
#: Seconds that a stopped run has before it is killed.
_PATIENCE_S = 2.0


class _Server:
    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._kill_at: dict[int, float] = {}

    def serve(self) -> str | None:
        """Returns twice or more: in each child its folder, at last in the server ``None``."""
        waiting, is_open = b"", True
        while is_open:
            if select.select([0], [], [], _TICK_S if self._running else None)[0]:
                data = os.read(0, 1 << 16)
                is_open = bool(data)
                waiting += data
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                verb, _, folder = os.fsdecode(line).partition(" ")
                if verb == "run" and self._fork(folder):
                    return folder
                if verb == "stop":
                    self._stop(folder)
            self._reap()
        for pid in self._running:
            _signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None

    def _fork(self, folder: str) -> bool:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            return True
        with contextlib.suppress(OSError):  # the child was faster, or is gone
            os.setpgid(pid, pid)
        self._running[pid] = folder
        return False

    def _stop(self, folder: str) -> None:
        for pid, each in self._running.items():
            if each == folder:
                _signal_group(pid, signal.SIGTERM)
                self._kill_at[pid] = time.monotonic() + _PATIENCE_S

    def _reap(self) -> None:
        for pid, at in self._kill_at.items():
            if time.monotonic() >= at and pid in self._running:
                _signal_group(pid, signal.SIGKILL)
        for pid in list(self._running):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # What it left running goes too, while its number cannot be another's.
            _signal_group(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            folder = self._running.pop(pid)
            self._kill_at.pop(pid, None)
            with contextlib.suppress(OSError):
                part = Path(folder) / "code.part"
                part.write_text(str(code))
                part.replace(Path(folder) / "code")


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _become_run(folder: str) -> None:
    """The child's standard streams and arguments, as a process of its own would have them."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    sys.argv = [sys.argv[0], str(Path(folder) / "request.json")]


def main() -> None:
    """The server's entry point, and that of every run."""
    runner = importlib.import_module("trainfit.simgpu.runner")
    importlib.import_module("torch._dynamo")  # every simulation needs it, and the catalogue
    importlib.import_module("trainfit.hardware").catalogue()
    folder = _Server().serve()
    if folder is None:
        os._exit(0)  # nothing to take down, and that takes seconds
    _become_run(folder)
    runner.main()
