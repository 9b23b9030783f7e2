"""Calls a function in a forked process under a time limit, so that its crash or hang does no harm.

What is tried out here may crash, be killed or hang; its processes are a group of their own and
end with the call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch

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
    """Run ``function`` in a fork of this process, for ``limit_s`` seconds at most.

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
            _signal_all(group, stacks_signal)
            time.sleep(_STACKS_S)
        return ended
    finally:
        receiver.close()
        process.join(_TICK_S if process.exitcode is None else None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        process.join()


def call_here(function: Callable[[], _T], limit_s: float) -> CallOutcome[_T]:
    """The same in this process (main thread), where ``function`` needs all threads.

    At the time limit it is interrupted as soon as Python runs; C code that hangs stays.
    """
    if threading.current_thread() is not threading.main_thread():
        return _outcome(function)

    def late(*_: Any) -> None:
        raise _Late

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


def _await(receiver: Any, process: Any, limit_s: float) -> CallOutcome[Any]:
    """The value, once it is there or the process is dead or late."""
    deadline = time.monotonic() + limit_s
    while not receiver.poll(min(_TICK_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return CallOutcome(hung=True)
        if process.exitcode is not None and not receiver.poll(0):
            return CallOutcome(exit_code=process.exitcode)
    try:
        ended: CallOutcome[Any] = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(1.0)
        return CallOutcome(exit_code=process.exitcode if process.exitcode is not None else -9)
    return ended


def _signal_all(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
