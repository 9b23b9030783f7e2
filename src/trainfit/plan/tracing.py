"""Runs a command on the simulated GPU in a child process and reads back what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from trainfit.plan.command import Command
from trainfit.results.recording import Recording
from trainfit.results.trace import TraceOutcome, TraceRequest

#: Seconds between the outcome and the end of the process before it is killed.
_GRACE_S = 20.0


class Trace:
    """One simulated run: its outcome, its recording, and what the script printed."""

    def __init__(self, outcome: TraceOutcome, recording: Recording | None, output: str) -> None:
        self.outcome = outcome
        self.recording = recording
        self.output = output


class Tracer:
    """Runs traces of one command; a context manager that owns a scratch directory."""

    def __init__(
        self,
        command: Command,
        gpu: str,
        *,
        gpu_memory_bytes: int | None = None,
        steps: int = 3,
        limited: bool = False,
        time_limit_s: float = 600.0,
    ) -> None:
        self._command = command
        self._common: dict[str, Any] = {
            "gpu": gpu,
            "gpu_memory_bytes": gpu_memory_bytes,
            "steps": steps,
            "limited": limited,
            "time_limit_s": time_limit_s,
        }
        self._limit = time_limit_s
        self._count = 0

    def __enter__(self) -> Tracer:
        self._scratch = tempfile.TemporaryDirectory(prefix="trainfit-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scratch.cleanup()

    def trace(
        self,
        values: Mapping[str, str] | None = None,
        *,
        loader: tuple[int, int] | None = None,
        amp: str | None = None,
    ) -> Trace:
        """Simulate the command with ``values`` in its placeholders."""
        self._count += 1
        folder = Path(self._scratch.name) / f"trace-{self._count}"
        folder.mkdir()
        request = TraceRequest(
            target=self._command.target(**(values or {})),
            recording=str(folder / "recording.trainfit"),
            outcome=str(folder / "outcome.json"),
            loader=loader,
            amp=amp,  # type: ignore[arg-type]
            **self._common,
        )
        (folder / "request.json").write_text(request.to_json())
        return self._run(folder)

    def _run(self, folder: Path) -> Trace:
        command = [
            self._command.python,
            *self._command.python_flags,
            "-m",
            "trainfit.simgpu.runner",
            str(folder / "request.json"),
        ]
        started = time.monotonic()
        log = folder / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
            try:
                self._wait(process, folder / "outcome.json")
            finally:
                _end_group(process)
        text = log.read_text(errors="replace")
        outcome = self._outcome(folder, process.returncode, time.monotonic() - started)
        saved = folder / "recording.trainfit"
        return Trace(outcome, Recording.load(saved) if saved.is_file() else None, text)

    def _environment(self) -> dict[str, str]:
        """The user's, with trainfit importable also where only this process has it."""
        source = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ) | dict(self._command.environment)
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, source])
        return environment

    def _wait(self, process: subprocess.Popen[bytes], outcome: Path) -> None:
        """Until the process ends; not for long once the outcome is written."""
        deadline = time.monotonic() + self._limit + 60.0
        while process.poll() is None:
            if outcome.is_file():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    @staticmethod
    def _outcome(folder: Path, code: int | None, seconds: float) -> TraceOutcome:
        path = folder / "outcome.json"
        if path.is_file():
            return TraceOutcome.load(path)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return TraceOutcome(
            status="died", steps=0, seconds=seconds, message=f"the process ended with {how}"
        )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the script left running (loader workers, its own children)."""
    for kill, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, kill)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


Progress = Callable[[str], None]
