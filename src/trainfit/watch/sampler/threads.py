"""The threads of a process: which one is busiest, how long they wait for a core, and how often they
are switched."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Final

from trainfit.watch.sampler import proc_files
from trainfit.watch.sampler.proc_files import KeptFile, KeptFiles

#: Where CPU time is told in clock ticks only, shorter intervals tell nothing.
_LEAST_TICKS: Final = 50
#: Cost of reading a thread's context switches, in readings of its CPU time.
_SWITCHES_COST: Final = 6


@dataclasses.dataclass(slots=True)
class ThreadTimes:
    """Rates since the reading before; NaN is not measured. ``cost`` is the readings it took."""

    hottest: float = math.nan
    main_waits: float = math.nan
    """Seconds a second in which the process' first thread was ready to run and had no core."""
    waits: float = math.nan
    """Of all its threads together."""
    voluntary: float = math.nan
    involuntary: float = math.nan
    cost: int = 1


class _Thread:
    """A thread with what was read of it last; ``at`` is when."""

    __slots__ = ("at", "cpu_s", "file", "switches", "waited_s")

    def __init__(self, file: KeptFile) -> None:
        self.file = file
        self.at = math.nan
        self.cpu_s: float | None = None
        self.waited_s = math.nan
        self.switches: tuple[int, int] | None = None


class Threads:
    """The threads of one process, by readings some time apart.

    A thread that has started since the reading before counts from zero, so that pools that come
    and go are seen as well.
    """

    def __init__(self, files: KeptFiles, pid: int, tick_s: float) -> None:
        self._files, self._folder, self._tick_s = files, f"/proc/{pid}/task", tick_s
        self._first = str(pid)
        self._threads: dict[str, _Thread] = {}
        self._with_schedstat = True
        self._read_at = self._switches_at = math.nan

    def read(self, now: float, count: int, cores: float, switches: bool = True) -> ThreadTimes:
        """The times of the threads at ``now``, in seconds of ``time.monotonic()``.

        Args:
            count: threads that the process has; a single one need not be read.
            cores: CPU seconds a second of the process.
            switches: read context switches as well, which the kernel tells at ten times the cost of
                a thread's CPU time.
        """
        found = ThreadTimes()
        if count == 1 and not math.isnan(cores):
            return self._of_one(now, cores, switches)
        if not self._with_schedstat and now - self._read_at < _LEAST_TICKS * self._tick_s:
            return found
        names = self._files.names(self._folder)
        self._forget(set(names))
        rates = {name: rate for name in names if (rate := self._rates(name, now)) is not None}
        found.hottest = max((ran for ran, _ in rates.values()), default=math.nan)
        if rates:
            found.waits = sum(waited for _, waited in rates.values())
            _, found.main_waits = rates.get(self._first, (math.nan, math.nan))
        found.cost += len(names)
        if switches:
            self._put_switches(found, names, now)
        self._read_at = now
        return found

    def _of_one(self, now: float, cores: float, switches: bool) -> ThreadTimes:
        """The times of a process with one thread, whose number is the process'."""
        found = ThreadTimes(cores)
        self._forget({self._first})
        if self._with_schedstat and (rates := self._rates(self._first, now)) is not None:
            found.main_waits = found.waits = rates[1]
        elif not self._with_schedstat:
            # Should there be more threads later, what it has done until then is not theirs.
            self._threads.setdefault(self._first, _Thread(self._open(self._first))).cpu_s = None
        if switches:
            self._put_switches(found, [self._first], now)
        self._read_at = now
        return found

    def _put_switches(self, found: ThreadTimes, names: list[str], now: float) -> None:
        found.voluntary, found.involuntary = self._switched(names, now)
        found.cost += _SWITCHES_COST * len(names)

    def close(self) -> None:
        self._forget(set())

    def _forget(self, names: set[str]) -> None:
        for name in self._threads.keys() - names:
            self._threads.pop(name).file.close()

    def _rates(self, name: str, now: float) -> tuple[float, float] | None:
        """Seconds a second of a thread on a core, and ready without one (NaN: not told); ``None``:
        neither is told (yet)."""
        thread = self._threads.get(name)
        if thread is None:
            thread = self._threads[name] = _Thread(self._open(name))
            thread.at, thread.cpu_s, thread.waited_s = self._read_at, 0.0, 0.0
        cpu_s, waited_s = self._spent(thread, name)
        before, waited_before, at = thread.cpu_s, thread.waited_s, thread.at
        thread.cpu_s, thread.waited_s, thread.at = cpu_s, waited_s, now
        if cpu_s is None or before is None or not now > at or cpu_s < before:
            return None  # or its number was given to another
        return (cpu_s - before) / (now - at), (waited_s - waited_before) / (now - at)

    def _open(self, name: str) -> KeptFile:
        return self._files.file(
            f"{self._folder}/{name}/{'schedstat' if self._with_schedstat else 'stat'}"
        )

    def _spent(self, thread: _Thread, name: str) -> tuple[float | None, float]:
        """Seconds on a core so far (``None``: not told), and ready without one (NaN: not told)."""
        content = thread.file.read()
        if self._with_schedstat:
            if content is not None and (nano := proc_files.schedstat_ns(content)) is not None:
                return nano[0] / 1e9, nano[1] / 1e9
            if not self._is_without_schedstat(name, content):
                return (None, math.nan) if content is None else (0.0, 0.0)
            self._use_ticks()
            return None, math.nan
        stat = proc_files.process_stat(content or b"")
        return (None if stat is None else stat.cpu_ticks * self._tick_s), math.nan

    def _is_without_schedstat(self, name: str, content: bytes | None) -> bool:
        """Does this kernel have no such file, or one of zeros? (Else the thread has just ended,
        or just begun.)"""
        stat = proc_files.process_stat(self._files.content(f"{self._folder}/{name}/stat") or b"")
        return stat is not None and (content is None or stat.cpu_ticks > 1)

    def _use_ticks(self) -> None:
        self._with_schedstat = False
        for name, thread in self._threads.items():
            thread.file.close()
            thread.file = self._open(name)
            thread.cpu_s = None

    def _switched(self, names: list[str], now: float) -> tuple[float, float]:
        """Voluntary and involuntary switches a second, of all threads together."""
        seconds = now - self._switches_at
        voluntary = involuntary = 0
        for name in names:
            content = self._files.content(f"{self._folder}/{name}/status")
            counts = proc_files.switches(content) if content is not None else None
            if counts is None:  # it has ended
                continue
            thread = self._threads.setdefault(name, _Thread(self._open(name)))
            before = thread.switches or (0, 0)
            voluntary += max(0, counts[0] - before[0])
            involuntary += max(0, counts[1] - before[1])
            thread.switches = counts
        self._switches_at = now
        if not seconds > 0 or not names:
            return math.nan, math.nan
        return voluntary / seconds, involuntary / seconds


def tick_s() -> float:
    """Seconds of a clock tick of /proc."""
    with contextlib.suppress(OSError, ValueError):
        return 1.0 / os.sysconf("SC_CLK_TCK")
    return 0.01
