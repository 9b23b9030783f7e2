"""The child processes of simulated runs: one of its own for each, or forked from a warm one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from trainfit.plan.command.parsing import Command
from trainfit.results.runs.sandbox import SandboxRequest

#: Starts a module of ours in the user's interpreter, whose environment stays as it is; simulated
#: GPUs in it keep time by the speed model.
_START = (
    "{before}from trainfit.torch_private.tested import tells_parent\n"
    "with tells_parent():\n"
    "    from trainfit.simgpu.cuda import clock\n"
    "    from trainfit.speed.model.device_clock import StepClock; clock.use(StepClock)\n"
    "    from {module} import main; main()"
)
#: Before that: the user's script runs in this very process.
_PROTECTED = (
    "from pathlib import Path; from trainfit.scripts import sandbox; "
    "sandbox.begin(Path(sys.argv[1]).parent); "
)

#: Seconds until a stopped run is taken to be gone; it is killed long before.
_END_S = 15.0
#: Seconds that a process has to end upon SIGTERM: it ends its own, and drops what they wrote.
_TERM_S = 10.0


class Process(Protocol):
    """A running child."""

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); ``None`` while it runs."""

    def end(self) -> None:
        """End it and what it left running (loader workers, its own children)."""


class OwnProcess:
    """A run in a process of its own; output goes to ``folder/output.txt``.

    ``runs_script``: what the user's script writes there goes to a layer, as the command says.
    ``wrapper`` starts it (``taskset -c 0``).
    """

    def __init__(
        self,
        command: Command,
        folder: Path,
        environment: Mapping[str, str],
        module: str = "trainfit.scripts.trace_run",
        *,
        runs_script: bool = True,
        wrapper: Sequence[str] = (),
    ) -> None:
        if runs_script:
            sandbox_request(command).save(folder)
        before = _PROTECTED if runs_script else ""
        words = [*wrapper, *_python(command, module, before), str(folder / "request.json")]
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
    """Forks runs from a process that has imported PyTorch (:mod:`trainfit.scripts.fork_server`)."""

    def __init__(self, command: Command, environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _python(command, "trainfit.scripts.fork_server"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._command, self._log = command, log
        self._lock = threading.Lock()

    def start(self, folder: Path, *, grow: bool = False) -> Process:
        """Begin the run that ``folder/request.json`` asks for.

        ``grow``: it differs from others in nothing that shows before a script looks at its
        arguments (:mod:`trainfit.scripts.template_process`).
        """
        sandbox_request(self._command).save(folder)
        self.tell(f"{'grow' if grow else 'run'} {folder}")
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
            self._process.wait(_TERM_S)
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


def sandbox_request(command: Command) -> SandboxRequest:
    """How the next run of ``command`` is protected; what the first one writes is kept, where
    the user asks for that."""
    request = command.sandbox
    with _keeping:
        if request.keep in _kept:
            return dataclasses.replace(request, keep="")
        if request.keep:
            _kept.add(request.keep)
    return request


#: Folders that have got (or will get) what a run wrote.
_kept: set[str] = set()
_keeping = threading.Lock()


def _python(command: Command, module: str, before: str = "") -> list[str]:
    # Unbuffered: what it printed is there when it is killed.
    code = _START.format(module=module, before=before)
    return command.interpreter.start(code, "-u", *command.python_flags)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for kill, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, 10.0)):
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
