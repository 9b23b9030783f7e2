"""A discrete-event simulation whose processes share a machine's cores.

A process is a generator that yields what it waits for: :class:`Sleep` (time that needs no core),
:class:`Work` (time on a core) or :class:`Take` (the next item of a queue, which the ``yield``
returns). Everything runs in one thread; nothing is random here.

Own code rather than SimPy: the cores are shared by all who work at once (processor sharing, of
unlike cores, under a quota), which SimPy's resources do not model.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

Process = Generator[Any, Any, None]

#: Work that is left below this is done: the rest of a subtraction of doubles, not of a batch.
_DONE: Final = 1e-12


@dataclass(frozen=True)
class Sleep:
    """Time in seconds that passes whoever else works: storage, a GPU, a timer."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Seconds that this would take alone on ``width`` cores of speed 1, all of them busy."""

    seconds: float
    width: float = 1.0


@dataclass(frozen=True)
class Take:
    """The next item of a queue, when there is one."""

    queue: Queue


class Queue:
    """Items in the order they came; as many as come."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.takers: deque[Process] = deque()


@dataclass(frozen=True)
class Cores:
    """What works at once, and how fast.

    Attributes:
        speeds: of each core that the job may use, fastest first; 1 is the core that costs were
            measured on.
        quota: cores of time that may be used on average (a cgroup's limit), or ``None``.
        contention: by how much one more busy core slows all of them (shared caches, memory
            bandwidth, clocks that fall): n busy cores run at 1 / (1 + contention × (n - 1)).
    """

    speeds: tuple[float, ...]
    quota: float | None = None
    contention: float = 0.0

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) <= 0:
            raise ValueError("a machine needs cores with a speed above 0")
        if self.quota is not None and self.quota <= 0:
            raise ValueError("a CPU quota is above 0")
        if self.contention < 0:
            raise ValueError("contention is 0 or more")

    def rate(self, working: float) -> float:
        """The speed of each of so many threads: the scheduler gives all the same share.

        Between whole numbers the last core is busy for that part of the time.
        """
        busy = min(working, float(len(self.speeds)))
        if busy <= 0:
            return 0.0
        whole = math.floor(busy)
        speeds = sorted(self.speeds, reverse=True)
        total = sum(speeds[:whole])
        if busy > whole:
            total += (busy - whole) * speeds[whole]
        total /= 1 + self.contention * max(0.0, busy - 1)
        if self.quota is not None:
            total = min(total, self.quota * total / busy)
        return total / working


class Simulation:
    """Runs processes until nothing happens any more."""

    def __init__(self, cores: Cores) -> None:
        self.now = 0.0
        self.busy_s = 0.0
        """Core seconds that were worked so far."""
        self._cores = cores
        self._rates: dict[float, float] = {}
        self._timed: list[tuple[float, int, Process]] = []
        self._working: dict[Process, float] = {}
        self._widths: dict[Process, float] = {}
        self._width = 0.0
        self._count = 0

    def start(self, process: Process) -> None:
        """Begin a process now."""
        self._advance(process, None)

    def put(self, queue: Queue, item: Any) -> None:
        """Put an item into a queue; who waits for it goes on at once."""
        if queue.takers:
            self._advance(queue.takers.popleft(), item)
        else:
            queue.items.append(item)

    def run(self) -> None:
        """Until every process has ended or waits for what never comes."""
        while self._timed or self._working:
            rate = self._rate()
            left = min(self._working.values(), default=0.0)
            worked = self.now + left / rate if self._working else float("inf")
            due = self._timed[0][0] if self._timed else float("inf")
            self._pass(min(worked, due), rate)
            if due <= worked:
                self._advance(heapq.heappop(self._timed)[2], None)
            else:
                self._finish()

    def _rate(self) -> float:
        # Without those wider than one core the sum is exact.
        working = self._width
        if working not in self._rates:
            self._rates[working] = self._cores.rate(working)
        return self._rates[working]

    def _pass(self, until: float, rate: float) -> None:
        seconds = until - self.now
        if self._working and seconds > 0:
            done = seconds * rate
            for process in self._working:
                self._working[process] -= done
            self.busy_s += seconds * min(self._width, len(self._cores.speeds))
        self.now = until

    def _finish(self) -> None:
        """The processes whose work is done go on, in the order in which they began it."""
        least = min(self._working.values())
        limit = max(_DONE, least)
        ended = [process for process, left in self._working.items() if left <= limit]
        for process in ended:
            del self._working[process]
            self._width -= self._widths.pop(process)
        if not self._working:
            self._width = 0.0
        for process in ended:
            self._advance(process, None)

    def _advance(self, process: Process, item: Any) -> None:
        """Let a process go on until it waits."""
        while True:
            try:
                wanted = process.send(item)
            except StopIteration:
                return
            item = None
            if isinstance(wanted, Take):
                if not wanted.queue.items:
                    wanted.queue.takers.append(process)
                    return
                item = wanted.queue.items.popleft()
            elif isinstance(wanted, Sleep):
                if wanted.seconds > 0:
                    self._count += 1
                    due = self.now + wanted.seconds
                    heapq.heappush(self._timed, (due, self._count, process))
                    return
            elif wanted.seconds > 0:
                self._working[process] = wanted.seconds
                self._widths[process] = wanted.width
                self._width += wanted.width
                return
