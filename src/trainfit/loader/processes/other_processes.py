"""CPU time that other processes used while a loader ran: rates measured meanwhile reflect both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from trainfit.hardware.cpu.idle_usage import busy_seconds
from trainfit.hardware.host.cgroup import shared_quota
from trainfit.hardware.host.system import System
from trainfit.results.loader.candidates import DISTURBED_CORES

#: Measurements in a row that others disturb before no more are made: the machine stays busy.
MOST_DISTURBED: Final = 3
#: Cores that a process has to keep busy to be named.
_WORTH_NAMING: Final = 0.1
#: Seconds in a nanosecond.
_NS: Final = 1e-9


def is_disturbed(cores: float | None) -> bool:
    """Did other processes that took so many cores disturb? (``None``, not told, is no.)"""
    return (cores or 0.0) > DISTURBED_CORES


def stays_busy(cores: Sequence[float | None]) -> bool:
    """Were the last measurements disturbed, one after the other, by what took so many cores?"""
    last = cores[-MOST_DISTURBED:]
    return len(last) == MOST_DISTURBED and all(map(is_disturbed, last))


def waits_for_cores(
    processes: Sequence[psutil.Process], root: Path = Path("/")
) -> tuple[float, ...]:
    """Seconds that each process' first thread, which makes a worker's batches, has waited for a
    core although it could have run (Documentation/scheduler/sched-stats); empty where that is not
    told of all of them."""
    found = []
    for process in processes:
        try:
            text = (root / f"proc/{process.pid}/schedstat").read_text()
            on_core, waited, times = map(int, text.split())
        except (OSError, ValueError):
            return ()
        if not on_core and not times:  # some kernels have a file of zeros
            return ()
        found.append(waited * _NS)
    return tuple(found)


class OtherProcessLoad:
    """Counts from when it is made: others are all but the process ``root`` (by default this one)
    and what it has started.

    They are in the way on the cores that may be used, and in the quota of a container that they
    share.
    """

    def __init__(self, root: int | None = None, system: System | None = None) -> None:
        self._root, self._system = root, system or System()
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._quota = shared_quota(self._system)
        self._before = self._now()

    def cores(self) -> float | None:
        """That others kept busy since, on average, beyond those that idled: where as many idle,
        nobody is in the way. ``None`` where unknown."""
        now, before = self._now(), self._before
        if now is None or before is None or now.at <= before.at:
            return None
        seconds, mine = now.at - before.at, now.mine - before.mine
        shares = [(float(len(self._cpus)), now.everyone - before.everyone)]
        if self._quota is not None and now.in_quota is not None and before.in_quota is not None:
            shares.append((self._quota.cores, now.in_quota - before.in_quota))
        found = []
        for cores, everyone in shares:
            idle = max(0.0, cores - everyone / seconds)
            found.append(max(0.0, (everyone - mine) / seconds - idle))
        return max(found)

    def _now(self) -> _Used | None:
        """What has been used so far."""
        if not self._cpus:  # a system that does not tell which cores may be used
            return None
        with contextlib.suppress(Exception):  # no /proc, or a worker dies just now: nobody knows
            everyone = busy_seconds(self._cpus)
            in_quota = self._quota.used_s(self._system) if self._quota is not None else None
            me = psutil.Process(self._root)
            mine = sum(map(_worked_s, (me, *me.children(recursive=True))))
            return _Used(time.monotonic(), everyone, mine, in_quota)
        return None


class OtherProcesses:
    """Which processes are busy, from when it is made: all but the process ``root`` (by default this
    one) and what it has started."""

    def __init__(self, root: int | None = None) -> None:
        self._root = root
        self._began, self._before = time.monotonic(), _worked_by_process()

    def busiest(self, most: int = 3) -> dict[str, float]:
        """Cores that each kept busy since, by name, the busiest first: those with a tenth of a core
        or more. Empty where that cannot be told."""
        seconds = time.monotonic() - self._began
        found: dict[str, float] = {}
        with contextlib.suppress(psutil.Error):
            me = psutil.Process(self._root)
            mine = {me.pid, *(each.pid for each in me.children(recursive=True))}
            for key, (name, worked_s) in _worked_by_process().items():
                if key[0] not in mine and seconds > 0:
                    used = worked_s - self._before.get(key, (name, 0.0))[1]
                    found[name] = found.get(name, 0.0) + used / seconds
        busy = sorted(found.items(), key=lambda each: -each[1])
        return {name: cores for name, cores in busy[:most] if cores >= _WORTH_NAMING}


def _worked_by_process() -> dict[tuple[int, float], tuple[str, float]]:
    """Name and CPU seconds of each process, by its number and when it began."""
    found = {}
    for each in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = each.info["cpu_times"]
        if times is not None:
            key = each.pid, float(each.info["create_time"] or 0.0)
            found[key] = str(each.info["name"] or each.pid), float(times.user + times.system)
    return found


@dataclass(frozen=True)
class _Used:
    """CPU seconds until the time ``at``: of the cores that may be used by ``everyone``, of our own
    processes (``mine``), and of all in our quota."""

    at: float
    everyone: float
    mine: float
    in_quota: float | None


def _worked_s(process: psutil.Process) -> float:
    """CPU seconds of a process, and of those of its own that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
