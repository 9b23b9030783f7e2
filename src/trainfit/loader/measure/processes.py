"""Processes of our own: calls in a fork under a time limit, their stderr, and their progress."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import psutil
import torch

from trainfit.results.files.decoding import write_whole
from trainfit.scripts.sandbox.ending import signal_group
from trainfit.simgpu.cuda_clocks import LONGEST, OwnTime

_T = TypeVar("_T")
#: Seconds that processes get to write their stacks before they are killed.
_STACKS_S: Final = 0.5
_TICK_S: Final = 0.05


@dataclass(frozen=True)
class CallOutcome(Generic[_T]):
    """How a call ended: its value, or what it raised, or how its process died.

    ``exit_code`` is negative for a signal; ``hung`` is whether it was ended at its time limit.
    """

    value: _T | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    hung: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error_type) or self.hung or self.exit_code is not None


def call(
    function: Callable[[], _T], limit_s: float, stacks_signal: signal.Signals | None = None
) -> CallOutcome[_T]:
    """Run ``function`` in a fork of this process, for ``limit_s`` seconds at most, not counting
    those for which others had the cores (up to :data:`LONGEST` times as many).

    Its value goes through a pipe. With ``stacks_signal``, all processes of a call that hangs
    get that signal before they are killed. The fork has one thread of PyTorch's pool: a pool
    that computed before a fork hangs in the child (GNU OpenMP does), and the DataLoader's
    workers are set to one thread too.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(function, sender), daemon=False)
    process.start()
    sender.close()
    group = process.pid
    assert group is not None
    with contextlib.suppress(OSError):  # the child was faster
        os.setpgid(group, group)
    try:
        ended: CallOutcome[_T] = _await(receiver, process, limit_s)
        if ended.hung and stacks_signal is not None:
            signal_group(group, stacks_signal)
            time.sleep(_STACKS_S)
        return ended
    finally:
        receiver.close()
        process.join(_TICK_S if process.exitcode is None else None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        process.join()


def call_here(function: Callable[[], _T], limit_s: float) -> CallOutcome[_T]:
    """Call ``function`` in this process (main thread), for one that needs all threads. What it
    waits for in other processes counts, whoever has the cores.

    At the time limit it is interrupted as soon as Python runs; C code that hangs stays.
    """
    if threading.current_thread() is not threading.main_thread():
        return _outcome(function)

    own = OwnTime()

    def late(*_: Any) -> None:
        left = limit_s - own()
        if left <= 0 or time.monotonic() - began >= LONGEST * limit_s:
            raise _Late
        signal.setitimer(signal.ITIMER_REAL, max(_TICK_S, left))

    former = signal.signal(signal.SIGALRM, late)
    began, (left_s, every_s) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return _outcome(function)
    except _Late:
        return CallOutcome(hung=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former if former is not None else signal.SIG_DFL)
        if left_s:  # somebody else's timer goes on
            left_s = max(0.001, left_s - (time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, left_s, every_s)


class _Late(BaseException):
    """The time limit of a call in this process."""


def _serve(function: Callable[[], Any], sender: Any) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    ended = _outcome(function)
    try:
        data = pickle.dumps(ended)
    except Exception as error:  # the value of a call of our own: a defect of ours
        data = pickle.dumps(CallOutcome(error_type=type(error).__name__, message=str(error)))
    sender.send_bytes(data)
    sender.close()


def _outcome(function: Callable[[], _T]) -> CallOutcome[_T]:
    try:
        return CallOutcome(function())
    except (_Late, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = traceback.format_exc()
        return CallOutcome(error_type=type(error).__name__, message=str(error), traceback=text)


def _without_core_s(pid: int) -> float:
    """Seconds for which a process and those that it started could have run, and others had the
    cores; 0 where the kernel does not count them. A process that hangs waits for none."""
    waited = 0
    with contextlib.suppress(psutil.Error):
        group = psutil.Process(pid)
        for child in (group, *group.children(recursive=True)):
            with contextlib.suppress(OSError, ValueError, IndexError):  # one that ends meanwhile
                text = Path(f"/proc/{child.pid}/schedstat").read_text()
                waited += int(text.split()[1])
    return waited * 1e-9


def _await(receiver: Any, process: Any, limit_s: float) -> CallOutcome[Any]:
    """The value, once it is there or the process is dead or late."""
    began = time.monotonic()
    deadline, last = began + limit_s, began + LONGEST * limit_s
    while not receiver.poll(min(_TICK_S, max(0.0, deadline - time.monotonic()))):
        if (now := time.monotonic()) >= deadline:
            own_s = now - began - _without_core_s(process.pid)
            if now >= last or own_s >= limit_s:
                return CallOutcome(hung=True)
            deadline = min(last, now + max(_TICK_S, limit_s - own_s))
        if process.exitcode is not None and not receiver.poll(0):
            return CallOutcome(exit_code=process.exitcode)
    try:
        ended: CallOutcome[Any] = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(1.0)
        return CallOutcome(exit_code=process.exitcode if process.exitcode is not None else -9)
    return ended


# ---
# What processes write to stderr, the only place where some faults are reported.
#
# A worker that cannot be started, or whose queue thread cannot send a batch, prints a traceback
# and says nothing to the process that waits for it.


#: Of what is written, the end that is kept.
_MOST_BYTES: Final = 1 << 16
_STDERR: Final = 2


class CapturedOutput:
    """What was written, once the block has ended."""

    text: str = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[CapturedOutput]:
    """Keep what this process and those that it starts write to stderr meanwhile.

    Nothing of it is shown; for a block that writes nothing itself (no progress bar).
    """
    output = CapturedOutput()
    with tempfile.TemporaryFile() as file:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        former = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        try:
            yield output
        finally:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.flush()
            os.dup2(former, _STDERR)
            os.close(former)
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            output.text = file.read().decode(errors="replace")


# ---
# Progress of a measurement: the current activity and the partial result.


class MeasurementProgress(Protocol):
    """A receiver of a measurement's progress and first results."""

    def __call__(self, text: str, share: float | None = None) -> None:
        """``text`` begins now ("2 workers"); ``share`` of everything is done (0 to 1)."""

    def keep(self, result: Any) -> None:
        """Keep a result (with ``to_json``) in case that what comes next ends the process."""


class NullProgress:
    """A progress that is reported to nobody."""

    def __call__(self, text: str, share: float | None = None) -> None:
        pass

    def keep(self, result: Any) -> None:
        pass


class PartialProgress:
    """A part of a larger measurement: its shares from 0 to 1 are some of the whole's."""

    def __init__(self, whole: MeasurementProgress, begin: float, end: float) -> None:
        self._whole, self._begin, self._end = whole, begin, end

    def __call__(self, text: str, share: float | None = None) -> None:
        part = None if share is None else self._begin + (self._end - self._begin) * share
        self._whole(text, part)

    def keep(self, result: Any) -> None:
        self._whole.keep(result)


class Reporter:
    """Tells the parent process, through files of a folder that it reads."""

    def __init__(self, folder: Path, alive: Callable[[], None] = lambda: None) -> None:
        self._folder, self._alive = folder, alive

    def __call__(self, text: str, share: float | None = None) -> None:
        self._alive()
        line = json.dumps({"text": text, "share": share})
        with (self._folder / "progress").open("a") as stream:
            stream.write(line + "\n")

    def keep(self, result: Any) -> None:
        write_whole(self._folder / "partial.json", result.to_json())


_current: MeasurementProgress = NullProgress()


def current() -> MeasurementProgress:
    """The progress of this process: the parent's where there is one (:mod:`.child`)."""
    return _current


def tell_to(progress: MeasurementProgress) -> None:
    """Make ``progress`` this process's."""
    global _current
    _current = progress
