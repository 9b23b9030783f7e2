"""Starts the user's command as it is, with the recorder in every Python process of it.

Nothing of the user's is edited: the environment names the folder of the run, and PYTHONPATH a
folder whose ``sitecustomize`` Python imports by itself. A Python that ignores its environment
(``-I``, ``-E``, ``-S``) is not recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import platform
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trainfit.hardware.gpu_figures import GpuNameError
from trainfit.hardware.gpu_lookup import find_gpu
from trainfit.hardware.machine.cgroup import OomKills, between, oom_kills
from trainfit.results.files.errors import ResultFileError, TrainfitError
from trainfit.results.runs.watched import OOM_KILLED, Ending, RunHeader, WatchedGpu
from trainfit.results.text import count
from trainfit.version import __version__
from trainfit.watch.recorder.process import COMMAND, FOLDER, MEMORY_HISTORY, NOISE_SCALE, STARTED

_INJECTED: Final = Path(__file__).with_name("recorder") / "inject"
#: A module of one file that the recorder needs, and that a user's Python may be without.
_LENT: Final = "threadpoolctl"
#: Signals that are passed on; SIGINT only where no terminal sends it to both of us.
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class WatchError(TrainfitError):
    """A command that cannot be started, or a folder that cannot be written to."""


def injected(
    folder: Path | None, command: str, environment: Mapping[str, str], started: tuple[float, float]
) -> dict[str, str]:
    """``environment`` with which Python records into ``folder``; unchanged where there is none, or
    ``TRAINFIT_WATCH`` says that nothing shall be.

    ``started`` is what times count from, by ``time.time()`` and ``time.monotonic()``.
    """
    if folder is None or environment.get(FOLDER, "off") in ("", "0"):
        return dict(environment)
    lent = importlib.util.find_spec(_LENT)
    path = [str(_INJECTED), *filter(None, [environment.get("PYTHONPATH", "")])]
    return {
        **environment,
        FOLDER: str(folder.resolve()),
        STARTED: f"{started[0]!r} {started[1]!r}",
        COMMAND: command,
        "TRAINFIT_WATCH_LENT": f"{_LENT}={lent.origin}" if lent is not None else "",
        "PYTHONPATH": os.pathsep.join(path),
    }


class WatchedCommand:
    """A command that runs, recorded; :meth:`poll` while something else is done, :meth:`wait` to
    its end. As a context manager it passes signals on (from the main thread only).

    It is recorded in ``folder``; ``None``: it is not. ``output`` is a file descriptor for what the
    command prints, ``errors`` one for its stderr alone; ``None``: where ours goes. ``typed`` is the
    command as the user typed it, where that differs (placeholders); ``measures_noise``: the
    gradient noise scale is measured, too, ``keeps_memory_history``: the history of the GPU's memory
    is recorded.

    Raises :class:`WatchError` where the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | None,
        output: int | None = None,
        typed: Sequence[str] | None = None,
        *,
        errors: int | None = None,
        measures_noise: bool = False,
        keeps_memory_history: bool = False,
    ) -> None:
        self.folder = folder
        self.started = time.time(), time.monotonic()
        self._command = shlex.join(command if typed is None else typed)
        self._finished = False
        self.interrupted_s: float | None = None
        """When it was interrupted first, by ``time.monotonic()``."""
        self._oom_kills = oom_kills()
        self._signals = contextlib.ExitStack()
        self.recorded = folder is not None and os.environ.get(FOLDER, "off") not in ("", "0")
        """Is the recorder switched on?"""
        try:
            if self.recorded and folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            environment = injected(folder, self._command, os.environ, self.started)
            if self.recorded:
                environment[NOISE_SCALE] = "1" if measures_noise else ""
                environment[MEMORY_HISTORY] = "1" if keeps_memory_history else ""
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output if errors is None else errors,
            )
        except OSError as error:
            what = error.filename if error.filename is not None else (command or ["?"])[0]
            reason = error.strerror or str(error)
            raise WatchError(f"{str(what)!r}: {reason}; check the command and --folder") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> WatchedCommand:
        self._signals.enter_context(_passing_on(self._process, self._interrupted))
        return self

    def __exit__(self, *_: Any) -> None:
        self._signals.close()

    def _interrupted(self) -> None:
        self.interrupted_s = self.interrupted_s or time.monotonic()

    def poll(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        code = self._process.poll()
        return None if code is None else self._end(code)

    def wait(self, seconds: float | None = None) -> int:
        """The exit code, when it has ended. Raises ``subprocess.TimeoutExpired`` if it has not
        after ``seconds``."""
        return self._end(self._process.wait(seconds))

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        self._process.send_signal(number)

    def _end(self, code: int) -> int:
        if self.recorded and self.folder is not None and not self._finished:
            self._finished = True
            with contextlib.suppress(OSError):  # a full disk takes the headers, not the exit code
                note = _oom_note(between(self._oom_kills, oom_kills())) if code else ""
                finish_headers(self.folder, self.pid, code, self._ended_at_once, note)
        return code if code >= 0 else 128 - code

    def _ended_at_once(self) -> RunHeader:
        """The header of a command that ended before it trained."""
        return RunHeader(
            command=self._command,
            rank=0,
            world_size=1,
            pid=self.pid,
            host=socket.gethostname(),
            started_unix=self.started[0],
            started_monotonic=self.started[1],
            trainfit=__version__,
            python=platform.python_version(),
            notes=("the command ended before its first training step",),
        )


def _oom_note(killed: OomKills) -> str:
    """What the kernel's counters say of the time of a run that failed; empty: nothing."""
    kills, of = (killed.cgroup, "this cgroup") if killed.cgroup else (killed.machine, "the machine")
    if not kills:
        return ""
    processes = count(kills, "process", "processes")
    return f"{OOM_KILLED} ended {processes} of {of} during the run: memory (RAM) ran out"


def finish_headers(folder: Path, pid: int, code: int, otherwise: Any, note: str) -> None:
    """What processes could not say themselves at their end: exit codes, and that they were killed;
    and the GPUs' peak rates. ``otherwise`` makes a header where there is none; ``note`` is said
    first of each.

    Raises ``OSError``.
    """
    paths = sorted(folder.glob("**/rank*.json"))
    for path in paths:
        with contextlib.suppress(ResultFileError):
            header = _noted(RunHeader.load(path), note)
            _replace(path, _finished(header, code if header.pid == pid else None, code))
    if not paths:
        header = dataclasses.replace(otherwise(), ending=_ending(code), exit_code=code)
        _replace(folder / "rank0.json", _noted(header, note))


def _noted(header: RunHeader, note: str) -> RunHeader:
    return dataclasses.replace(header, notes=(note, *header.notes)) if note else header


def _finished(header: RunHeader, own: int | None, code: int) -> RunHeader:
    gpus = tuple(map(with_peak_rate, header.gpus))
    header = dataclasses.replace(header, gpus=gpus)
    if own is not None:
        return dataclasses.replace(header, ending=_ending(own), exit_code=own)
    if header.ending != "running":
        return header
    # It is gone without a word: killed, or os._exit.
    ending: Ending = "failed" if code == 0 else _ending(code)
    return dataclasses.replace(header, ending=ending)


def _ending(code: int) -> Ending:
    if code in (-signal.SIGINT, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        return "interrupted"
    return "failed" if code else "finished"


def with_peak_rate(gpu: WatchedGpu) -> WatchedGpu:
    """The same GPU with the rate of matmuls in 16 bits that the catalogue has for its name, if
    any."""
    if gpu.tensor_flops_per_s is not None:
        return gpu
    try:
        rates = find_gpu(gpu.name).tensor_flops
    except GpuNameError:
        return gpu
    rate = rates.get("bfloat16", rates.get("float16"))
    return dataclasses.replace(gpu, tensor_flops_per_s=rate)


def _replace(path: Path, header: RunHeader) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(header.to_json(), encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def _passing_on(
    process: subprocess.Popen[bytes], interrupted: Callable[[], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    passed: set[int] = set()

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.add(number)
        if number == signal.SIGINT:
            interrupted()
        process.send_signal(number)

    def leave(number: int, _: FrameType | None) -> None:
        """The terminal has sent it to the command, too, which decides what comes of it."""
        interrupted()

    handlers: dict[int, Any] = dict.fromkeys(_PASSED_ON, pass_on)
    handlers[signal.SIGINT] = leave if _in_foreground() else pass_on
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        if signal.SIGTERM in passed:
            # Sent once more (`timeout`, Slurm), it is not to end what tells of the run.
            before[signal.SIGTERM] = lambda number, frame: None
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Is there a terminal whose keys go to this process and its children?"""
    try:  # not stdin: it may be a file or a pipe, and Ctrl-C is sent to both of us all the same
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
