"""What other processes took of the cores while a loader ran: a run beside them tells of both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from trainfit.hardware.idle_usage import busy_seconds
from trainfit.results.loader import BESIDE_OTHERS

#: Seconds in a nanosecond.
_NS: Final = 1e-9


def is_beside_others(cores: float | None) -> bool:
    """Did other processes that took so many cores disturb? (``None``, not told, is no.)"""
    return (cores or 0.0) > BESIDE_OTHERS


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


class OthersWork:
    """Counts from when it is made: others are all but the process ``root`` (by default this one)
    and what it has started."""

    def __init__(self, root: int | None = None) -> None:
        self._root = root
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._before = self._now()

    def cores(self) -> float | None:
        """That others kept busy since, on average, beyond those that idled: where as many idle,
        nobody is in the way. ``None`` where it cannot be told."""
        now = self._now()
        if now is None or self._before is None:
            return None
        seconds, everyone, mine = (
            after - then for after, then in zip(now, self._before, strict=True)
        )
        if seconds <= 0:
            return None
        idle = max(0.0, len(self._cpus) - everyone / seconds)
        return max(0.0, (everyone - mine) / seconds - idle)

    def _now(self) -> tuple[float, float, float] | None:
        """The time, and CPU seconds of the cores that may be used and of our own processes."""
        if not self._cpus:  # a system that does not tell which cores may be used
            return None
        with contextlib.suppress(Exception):  # no /proc, or a worker dies just now: nobody knows
            everyone = busy_seconds(self._cpus)
            me = psutil.Process(self._root)
            mine = sum(map(_worked_s, (me, *me.children(recursive=True))))
            return time.monotonic(), everyone, mine
        return None


def _worked_s(process: psutil.Process) -> float:
    """CPU seconds of a process, and of those of its own that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
