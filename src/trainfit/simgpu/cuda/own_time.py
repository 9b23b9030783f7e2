"""Seconds that work took by itself, however busy the machine was meanwhile.

What limits a simulation, or what it looks at, decides what is answered: a machine with other work
must come to the answer of an idle one, only later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainfit.simgpu.cuda.clocks import core_waits

#: Nanoseconds that each thread of this process waited for a core though it could run: the second
#: number (Documentation/scheduler/sched-stats).
_THREADS: Final = Path("/proc/self/task")
_NS: Final = 1e-9
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
    """Likewise of the calling thread alone, from now on."""
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
