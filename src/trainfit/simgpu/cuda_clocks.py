"""The clocks of a simulation: the device's, the host's, and waits for a busy core."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.simgpu.device.recorder import RecordingBuilder
from trainfit.simgpu.patching import CollectionTimes, PatchSet, in_child

#: Seconds that a kernel takes at least; an order of magnitude, not a measurement.
LAUNCH_SECONDS = 5e-6
#: Bytes moved for each byte of result: two operands read, one result written.
TRAFFIC = 3


class Clock(Protocol):
    """Time in seconds since the start, worked out from the recording when asked."""

    def now(self, stream: int | None = None) -> float:
        """When the device (or a stream of it) is done with everything submitted so far."""

    def host(self) -> float:
        """When the CPU has submitted everything; where it had to wait for the device, later."""

    def pause(self, seconds: float) -> None:
        """The CPU did something else before it goes on to submit."""


class TrafficClock:
    """The lower bound by traffic alone, on a computer that waits for each operator."""

    def __init__(self, recorder: RecordingBuilder, gpu: GpuSpec) -> None:
        self._recorder = recorder
        self._bandwidth = gpu.bandwidth_bytes_per_s
        self._seconds = 0.0
        self._ops = 0
        self._allocs = 0

    def now(self, stream: int | None = None) -> float:
        """See :class:`Clock`."""
        ops, nbytes, owners = self._recorder.since(self._ops, self._allocs)
        if ops:
            traffic = np.bincount(np.maximum(owners - self._ops, 0), weights=nbytes, minlength=ops)
            seconds = np.maximum(traffic * TRAFFIC / self._bandwidth, LAUNCH_SECONDS)
            self._seconds += float(seconds.sum())
        self._ops += ops
        self._allocs += len(nbytes)
        return self._seconds

    def host(self) -> float:
        """See :class:`Clock`."""
        return self.now()

    def pause(self, seconds: float) -> None:
        """See :class:`Clock`."""
        self._seconds += seconds


_make: Callable[[RecordingBuilder, GpuSpec], Clock] = TrafficClock


def use(maker: Callable[[RecordingBuilder, GpuSpec], Clock]) -> None:
    """Let simulations of this process keep time with another clock from now on."""
    global _make
    _make = maker


def clock_of(recorder: RecordingBuilder, gpu: GpuSpec) -> Clock:
    """The clock of a new simulation."""
    return _make(recorder, gpu)


# ---
# Time that a thread waited for a busy core.
#
# That is no work of the thread's, and no waiting of its own choice (for a file, a lock, a worker):
# on another computer, or at another time, it would not have waited.


#: What the kernel knows of the calling thread: nanoseconds on a core, nanoseconds that it waited
#: for one although it could run, and how often it got one (Documentation/scheduler/sched-stats).
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
_NS: Final = 1e-9


class CoreWaitClock(Protocol):
    """Tells how long the calling thread waited for a core between two points in time."""

    def mark(self) -> Any:
        """A point in time, of the calling thread."""

    def since(self, mark: Any, passed: float) -> float:
        """Seconds of waiting in the ``passed`` ones since ``mark``; 0 where another thread made
        the mark."""

    def install(self, patches: PatchSet) -> None:
        """Watch what it has to, until ``patches`` is restored."""


class KernelsCount:
    """How long a thread waited for a core, as Linux counts it, to the nanosecond.

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
        """See :class:`CoreWaitClock`."""
        return threading.get_ident(), self._waited_ns()

    def since(self, mark: tuple[int, int], passed: float) -> float:
        """See :class:`CoreWaitClock`."""
        thread, waited = mark
        if thread != threading.get_ident():
            return 0.0
        return min(passed, max(0, self._waited_ns() - waited) * _NS)

    def install(self, patches: PatchSet) -> None:
        """See :class:`CoreWaitClock`; there is nothing to watch."""

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
    """Waits for a core where the kernel does not tell them: what is neither time on a core nor in
    calls that wait.

    Those are known by name: sleeping, and waiting for a lock of :mod:`threading`, for another
    process or for what it sends. Reading a slow disk or network is not among them.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def mark(self) -> tuple[int, float, float]:
        """See :class:`CoreWaitClock`."""
        return threading.get_ident(), time.thread_time(), self._blocked_s()

    def since(self, mark: tuple[int, float, float], passed: float) -> float:
        """See :class:`CoreWaitClock`."""
        thread, on_core, blocked = mark
        if thread != threading.get_ident():
            return 0.0
        known = time.thread_time() - on_core + self._blocked_s() - blocked
        return max(0.0, passed - known)

    def install(self, patches: PatchSet) -> None:
        """See :class:`CoreWaitClock`."""
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


def core_waits() -> CoreWaitClock:
    """The best that there is on this system."""
    return KernelsCount() if KernelsCount.is_there() else Remainder()


# ---
# Host clock of a script during a simulation.
#
# Simulating an operator takes other time than launching it on a GPU does. So ``time.time`` and its
# like show the script what its own computer would take: the operators' launches and the waits for
# the GPU as the clock has them, and all else (reading a batch, sleeping, other computations) as
# long as it took here, without the time for which others had the cores (:mod:`simgpu.core_waits`):
# how busy this machine is must not show in a prediction. Such a clock never stands still, so that
# code that polls it comes to its end.


#: What a script does between two operators counts as its own from so many seconds on, or when it
#: looks at the time meanwhile. Below, it is most likely Python on its way to the next operator:
#: slowed by the simulation, and part of what the clock takes for launching one.
OWN_WORK_S: Final = 2e-3
#: What passes at the least between two looks at the time with an operator between them: about what
#: the CPU needs to launch one.
_LOOK_S: Final = 5e-6

#: Functions of the module ``time``, each a clock that goes on by itself, and their units a second.
_SHOWN: Final = {
    "time": 1, "perf_counter": 1, "monotonic": 1,
    "time_ns": 10**9, "perf_counter_ns": 10**9, "monotonic_ns": 10**9,
}  # fmt: skip


class ScriptTime:
    """Divides what passes between the simulator and the script, and shows the script its time.

    ``in_framework`` says whether PyTorch's own Python is what lies between two operators;
    ``real`` is this machine's clock, in seconds; ``waits`` tells how long a thread waited for a
    core.
    """

    def __init__(
        self,
        clock: Clock,
        in_framework: Callable[[], bool] = lambda: False,
        real: Callable[[], float] = time.perf_counter,
        waits: CoreWaitClock | None = None,
    ) -> None:
        self._clock, self._in_framework, self._real = clock, in_framework, real
        self._waits = core_waits() if waits is None else waits
        self._mark = self._waits.mark()
        #: What Python took to look for garbage: mostly among what the simulation keeps.
        self._collections, self._seen = CollectionTimes(), PatchSet()
        self._simulating = self._looked = False
        #: The thread that runs the simulator.
        self._inside = 0
        self._left = real()
        self._shown_s = self._host_s = 0.0
        # Reentrant: the handler of a signal may run operators, too.
        self._lock = threading.RLock()
        #: Are its functions installed, and is this the process of the simulation?
        self.runs = False

    def enter(self) -> bool:
        """The simulator runs from now on; ``False`` if it already did."""
        if self._simulating or not self.runs:
            return False
        with self._lock:  # of a thread that looks at the time, and reads what was recorded
            self._simulating, self._inside = True, threading.get_ident()
        passed = self._real() - self._left
        if self._collections.stops:
            passed -= self._collections.take()
        if self._looked or (passed >= OWN_WORK_S and not self._in_framework()):
            own = self._own(passed)
            if self._looked or own >= OWN_WORK_S:
                self._looked = False
                with self._lock:
                    self._clock.pause(own)
        return True

    def _own(self, passed: float) -> float:
        """Seconds of the script itself, of those that passed since it resumed."""
        return max(0.0, passed - self._waits.since(self._mark, passed)) if passed > 0 else 0.0

    def leave(self) -> None:
        """Back to the script."""
        if self._collections.stops:
            self._collections.take()  # the simulator's, whose time is none of the script's
        self._left, self._mark = self._real(), self._waits.mark()
        self._simulating = False

    def leave_out(self, seconds: float) -> None:
        """Count so many seconds of the script's as the simulator's."""
        self._left += seconds

    @contextlib.contextmanager
    def simulating(self) -> Iterator[None]:
        """What is done inside costs the script no time."""
        entered = self.enter()
        try:
            yield
        finally:
            if entered:
                self.leave()

    def now(self, stream: int) -> float:
        """When a stream is done with everything submitted so far, as the clock has it."""
        with self.simulating():
            return self._clock.now(stream)

    def elapsed(self) -> float:
        """Seconds since the simulation began, as the script is shown them; they never decrease.

        A look may have taken for the script's own work what turns out to be a wait for a core.
        Where operators were launched since, some time passes nevertheless: scripts divide by it.
        """
        with self._lock:
            if self._simulating and self._inside != threading.get_ident():
                return self._shown_s  # what another thread records is not whole yet
            if not self._simulating:
                self.leave_out(self._collections.take())
            began = self._real()
            # Also in the simulator, where callbacks of the script may poll the time.
            own = self._own(began - self._left)
            self._looked = self._looked or not self._simulating
            host = self._clock.host()
            least = self._shown_s + min(_LOOK_S, max(0.0, host - self._host_s))
            self._shown_s, self._host_s = max(least, host + own), host
            self.leave_out(self._real() - began)
            return self._shown_s

    def install(self, patches: PatchSet) -> None:
        """Show this time in place of the machine's."""
        for name, units in _SHOWN.items():
            patches.set(time, name, _ShownClock(self, name, units))
        timer = vars(time)["perf_counter"]
        patches.set(timeit, "default_timer", timer)
        for owner, name in ((timeit, "timeit"), (timeit, "repeat"), (timeit.Timer, "__init__")):
            patches.set(owner, name, _with_timer(vars(owner)[name], timer))
        self._waits.install(patches)
        self._seen.see_collections(self._real, self._collections.starts, self._collections.stops)
        in_child(self.stop)
        self._left, self._mark = self._real(), self._waits.mark()
        self.runs = True

    def stop(self) -> None:
        """Whoever kept one of the functions has the machine's time from now on; as have children
        that are forked."""
        self.runs = False
        self._seen.restore()


class _ShownClock:
    """A function of the module ``time`` as scripts see it.

    An object, as a built-in function is none that a class would bind to its instances. It is
    pickled by its name, as those are.
    """

    def __init__(self, script_time: ScriptTime, name: str, units: int) -> None:
        self._real = vars(time)[name]
        self._began = self._real()
        self._script_time, self._units = script_time, units
        self.__module__, self.__name__, self.__qualname__ = "time", name, name
        self.__doc__, self.__wrapped__ = self._real.__doc__, self._real

    def __call__(self) -> float | int:
        if not self._script_time.runs or _asked_by_us():
            return self._real()  # type: ignore[no-any-return]
        elapsed = self._script_time.elapsed()
        began: float | int = self._began
        return began + (elapsed if self._units == 1 else round(elapsed * self._units))

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<function time.{self.__name__}, simulated>"


def _with_timer(function: Callable[..., Any], timer: _ShownClock) -> Callable[..., Any]:
    """``function``, which took the machine's clock for its parameter ``timer`` when it was made."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.setdefault("timer", timer)
        return function(*bound.args, **bound.kwargs)

    return timed


def _asked_by_us() -> bool:
    """Does the simulator itself, or what runs the script in it, look at the time?"""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] == "trainfit"


# ---
# Seconds that work took by itself, however busy the machine was meanwhile.
#
# What limits a simulation, or what it looks at, decides what is answered: a machine with other work
# must come to the answer of an idle one, only later.


#: Nanoseconds that each thread of this process waited for a core though it could run: the second
#: number (Documentation/scheduler/sched-stats).
_THREADS: Final = Path("/proc/self/task")
#: A run ends at so many times its limit, whoever had the cores.
LONGEST: Final = 4.0


class OwnTime:
    """Seconds since it was made, without those for which this process could have run, and others
    had the cores.

    What it waits for by its own choice counts (a worker, a file, a lock). It is at least the time
    that its threads had on cores, and never more than has passed; where the kernel does not count,
    it is what has passed.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._cpu_s, self._waited_s = time.process_time(), _waited_s()

    def __call__(self) -> float:
        passed = time.monotonic() - self.began
        on_cores = time.process_time() - self._cpu_s
        return min(passed, max(on_cores, passed - max(0.0, _waited_s() - self._waited_s)))


def stopwatch() -> Callable[[], float]:
    """A stopwatch of the calling thread alone, from now on: seconds without its waits for a
    core."""
    waits, began = core_waits(), time.monotonic()
    mark = waits.mark()

    def own() -> float:
        passed = time.monotonic() - began
        return max(0.0, passed - waits.since(mark, passed))

    return own


def _waited_s() -> float:
    """Seconds that the threads of this process have waited for a core, all together."""
    waited = 0
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # one that ends meanwhile
                waited += int((thread / "schedstat").read_text().split()[1])
    return waited * _NS
