"""Time that a thread waited for a busy core.

That is no work of the thread's, and no waiting of its own choice (for a file, a lock, a worker):
on another computer, or at another time, it would not have waited.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, Protocol

from trainfit.simgpu.patching import PatchSet

#: What the kernel knows of the calling thread: nanoseconds on a core, nanoseconds that it waited
#: for one although it could run, and how often it got one (Documentation/scheduler/sched-stats).
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
_NS: Final = 1e-9


class CoreWaits(Protocol):
    """Tells how long the calling thread waited for a core between two points in time."""

    def mark(self) -> Any:
        """A point in time, of the calling thread."""

    def since(self, mark: Any, passed: float) -> float:
        """Seconds of waiting in the ``passed`` ones since ``mark``; 0 where another thread made
        the mark."""

    def install(self, patches: PatchSet) -> None:
        """Watch what it has to, until ``patches`` is restored."""


class KernelsCount:
    """As Linux counts it for every thread, to the nanosecond.

    Threads that work for this one (OpenMP's, workers of a DataLoader) may wait for a core, too:
    that this one waits for them is not taken out.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    @staticmethod
    def is_there() -> bool:
        """Does this kernel count? Some have no such file, others one of zeros."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            on_core, _, times = map(int, _SCHEDSTAT.read_text().split())
            return on_core > 0 and times > 0
        return False

    def mark(self) -> tuple[int, int]:
        """See :class:`CoreWaits`."""
        return threading.get_ident(), self._waited_ns()

    def since(self, mark: tuple[int, int], passed: float) -> float:
        """See :class:`CoreWaits`."""
        thread, waited = mark
        if thread != threading.get_ident():
            return 0.0
        return min(passed, max(0, self._waited_ns() - waited) * _NS)

    def install(self, patches: PatchSet) -> None:
        """See :class:`CoreWaits`; there is nothing to watch."""

    def _waited_ns(self) -> int:
        file = getattr(self._own, "file", None)
        if file is None or file.process != os.getpid():
            file = self._own.file = _OpenFile(_SCHEDSTAT)
        return int(os.pread(file.descriptor, 64, 0).split()[1])


class _OpenFile:
    """Kept open, for opening takes longer than reading; closed with its thread."""

    def __init__(self, path: Path) -> None:
        self.process = os.getpid()
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class Remainder:
    """Where the kernel does not say: what is neither time on a core nor in calls that wait.

    Those are known by name: sleeping, and waiting for a lock of :mod:`threading`, for another
    process or for what it sends. Reading a slow disk or network is not among them.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def mark(self) -> tuple[int, float, float]:
        """See :class:`CoreWaits`."""
        return threading.get_ident(), time.thread_time(), self._blocked_s()

    def since(self, mark: tuple[int, float, float], passed: float) -> float:
        """See :class:`CoreWaits`."""
        thread, on_core, blocked = mark
        if thread != threading.get_ident():
            return 0.0
        known = time.thread_time() - on_core + self._blocked_s() - blocked
        return max(0.0, passed - known)

    def install(self, patches: PatchSet) -> None:
        """See :class:`CoreWaits`."""
        for owner, name in (
            (time, "sleep"),
            (threading.Condition, "wait"),
            (connection, "wait"),
            (subprocess.Popen, "wait"),
        ):
            patches.set(owner, name, self._watched(vars(owner)[name]))

    def _blocked_s(self) -> float:
        return float(getattr(self._own, "blocked_s", 0.0))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._blocking():
                return function(*args, **kwargs)

        return watched

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """What passes inside off a core is waiting of the thread's own choice."""
        clock: Callable[[], float] = _monotonic
        before, began, on_core = self._blocked_s(), clock(), time.thread_time()
        try:
            yield
        finally:
            passed = clock() - began - (time.thread_time() - on_core)
            self._own.blocked_s = before + max(0.0, passed)  # calls inside of calls count once


#: The machine's clock, whatever ``time`` shows a script.
_monotonic: Final = time.monotonic


def core_waits() -> CoreWaits:
    """The best that there is on this system."""
    return KernelsCount() if KernelsCount.is_there() else Remainder()
