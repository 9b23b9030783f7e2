"""What other processes took of the cores while a loader ran: a run beside them tells of both."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

import psutil

from trainfit.hardware.idle_usage import busy_seconds

#: Cores that others keep busy on average, above which a run is one beside others.
BESIDE_OTHERS: Final = 0.25


class OthersWork:
    """Counts from when it is made: others are all but this process and what it has started."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._began, self._all_s, self._own_s = self._now()

    def cores(self) -> float | None:
        """That others kept busy since, on average, beyond those that idled: where as many idle,
        nobody is in the way. ``None`` where it cannot be told."""
        at, all_s, own_s = self._now()
        seconds = at - self._began
        if not self._cpus:  # a system that does not tell which cores may be used
            return None
        if all_s is None or own_s is None or self._all_s is None or self._own_s is None:
            return None
        if seconds <= 0:
            return None
        busy = (all_s - self._all_s) / seconds
        others = busy - (own_s - self._own_s) / seconds
        idle = max(0.0, len(self._cpus) - busy)
        return max(0.0, others - idle)

    def _now(self) -> tuple[float, float | None, float | None]:
        """The time, and CPU seconds of the cores that may be used and of our own processes."""
        everyone = mine = None
        with contextlib.suppress(Exception):  # no /proc, or a worker dies just now: nobody knows
            everyone = busy_seconds(self._cpus)
            me = psutil.Process()
            mine = sum(map(_worked_s, (me, *me.children(recursive=True))))
        return time.monotonic(), everyone, mine


def _worked_s(process: psutil.Process) -> float:
    """CPU seconds of a process, and of those of its own that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
