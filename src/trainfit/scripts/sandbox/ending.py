"""How a protected process ends, and what becomes of the processes that a script leaves running."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import ClassVar

from trainfit.scripts.sandbox import mounts
from trainfit.scripts.sandbox.layer import Layer

# ---
# The protected process.


class _Ending:
    """How this process is to end."""

    hastens: bool | None = None  # not asked for yet
    locks: ClassVar[set[tuple[int, int]]] = set()  # files that are open for its layers


def hasten(layer: Layer | None) -> None:
    """Let this process end without taking apart all that it has imported, for PyTorch a second.

    For one whose writes ``layer`` takes, and are dropped; ``None``: it ends as any other. What
    Python promises of an end comes in either case: threads are waited for, ``atexit`` handlers
    run, streams are flushed. Objects that still exist are no longer searched for cycles, and their
    ``__del__`` need not be called, which Python's reference ("Data model") does not promise.
    """
    if _Ending.hastens is None:
        # The first to be registered is the last to be run: the script's are over by then.
        atexit.register(_freeze)
    _Ending.hastens = layer is not None
    if layer is not None:
        _Ending.locks |= layer.locks()


def _freeze() -> None:
    # What an object has not yet written counts as written: it may be in a cycle.
    if _Ending.hastens and not _writes_files():
        gc.freeze()


def _writes_files() -> bool:
    """Is a file with a name still open for writing, other than the standard streams?"""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except (OSError, ValueError):
        return True  # who knows
    return any(descriptor > 2 and _writes_file(descriptor) for descriptor in descriptors)


def _writes_file(descriptor: int) -> bool:
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        status = os.fstat(descriptor)
    except OSError:  # closed: it was that of the list
        return False
    if mode == os.O_RDONLY or not stat.S_ISREG(status.st_mode) or not status.st_nlink:
        return False
    return (status.st_dev, status.st_ino) not in _Ending.locks


# ---
# The process that supervises it: what the script leaves running becomes a child of this one.

#: Seconds for processes that clear up behind the script.
_CLEAR_UP_S = 0.3


def adopt() -> None:
    """Become the parent of what the script leaves running, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        mounts.adopt_orphans()


def end_as(status: int) -> None:
    """End this process as another one did."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    time.sleep(1.0)
    os._exit(128 - code)


def end_children() -> int:
    """End all descendants of this process; how many were in a session of their own (daemons)."""
    daemons, own = 0, os.getsid(0)
    while sys.platform == "linux" and _has_children():
        # While one ends the kernel may leave out another (proc_pid_children(5)): it is next.
        children = _children()
        for pid in children:
            with contextlib.suppress(OSError):
                daemons += os.getsid(pid) != own
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return daemons


def wait_for_children() -> None:
    """A moment for those that end by themselves: Python's resource tracker, which removes
    shared memory that the script left (an overlay drops it)."""
    deadline = time.monotonic() + _CLEAR_UP_S
    while _has_children() and time.monotonic() < deadline:
        time.sleep(0.01)
        reap_others(-1)


def reap_others(pid: int) -> None:
    """Wait for children that have ended, up to ``pid``, which is waited for elsewhere."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == pid:
                break
            os.waitpid(ended.si_pid, 0)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _has_children() -> bool:
    """Are some alive, or not yet waited for?"""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Children of this process that are alive or not yet waited for."""
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):  # not every kernel has these
        found += path.read_text().split()
    if found:
        return [int(each) for each in found]
    import psutil  # reads of every process whose child it is

    return [child.pid for child in psutil.Process().children()]
