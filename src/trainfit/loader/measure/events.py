"""A discrete-event simulation whose processes share a machine's cores.

A process is a generator that yields what it waits for: :class:`Sleep` (time that needs no core),
:class:`CoreWork` (time on a core) or :class:`Take` (the next item of a queue, which the ``yield``
returns). Everything runs in one thread; nothing is random here.

Own code rather than SimPy: the cores are shared by all who work at once (processor sharing, of
unlike cores, under a quota), which SimPy's resources do not model.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from operator import truediv
from typing import Any, Final

Process = Generator[Any, Any, None]

#: From this speed on, relative to the fastest, an entry is a core and not a core's second thread.
_WHOLE: Final = 0.3

#: What two threads wait for one another that share the only free core, of what they wait while
#: none is free. With one of two cores busy a batch took 1.0 ms longer to receive, with both
#: 3 to 4 ms (2 cores, 6 tensors a batch).
_ONE_FREE: Final = 0.25

#: Work that is left below this is done: the rest of a subtraction of doubles, not of a batch.
_DONE: Final = 1e-12


@dataclass(frozen=True)
class Sleep:
    """Time in seconds that passes whoever else works: storage, a GPU, a timer."""

    seconds: float


@dataclass(frozen=True)
class CoreWork:
    """Seconds that this would take alone on ``width`` cores of speed 1 (to the next whole
    number), all of them busy."""

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
        sharing: what is lost where threads take turns on a core (each finds its caches filled
            by the others): with n of them it does 1 / (1 + sharing × (1 - 1/n)) of the work.
    """

    speeds: tuple[float, ...]
    quota: float | None = None
    contention: float = 0.0
    sharing: float = 0.0

    def __post_init__(self) -> None:
        if not self.speeds or min(self.speeds) <= 0:
            raise ValueError("a machine needs cores with a speed above 0")
        if self.quota is not None and self.quota <= 0:
            raise ValueError("a CPU quota must be above 0")
        if self.contention < 0 or self.sharing < 0:
            raise ValueError("contention and sharing must not be negative")

    def rate(self, busy: int) -> float:
        """The speed of each core while so many of them are busy.

        Unlike cores are taken for like ones of their average speed, the fastest first.
        """
        busy = min(busy, len(self.speeds))
        if busy == 0:
            return 0.0
        total = sum(sorted(self.speeds, reverse=True)[:busy])
        total /= 1 + self.contention * (busy - 1)
        if self.quota is not None:
            total = min(total, self.quota * total / busy)
        return total / busy


class _Queues:
    """Who runs where: each core has a queue, as under Linux, not all cores one.

    A thread that wakes goes to an idle core, else to the one with the fewest threads, and stays
    there. A core that runs dry takes one over from the fullest. So three threads on two cores
    are not a fair share each: one runs alone, two take turns.
    """

    def __init__(self, count: int, sharing: float) -> None:
        self._count, self._sharing = count, sharing
        self._threads: list[list[Process]] = []
        """Of each core that was used so far."""
        self._idle: list[int] = []
        self._homes: dict[Process, list[int]] = {}
        self._turns: dict[int, float] = {}

    @property
    def busy(self) -> int:
        """Cores that have something to run."""
        return len(self._threads) - len(self._idle)

    def share(self, process: Process) -> float:
        """The share of a core's speed that a process gets, of all its threads together."""
        homes = self._homes[process]
        if len(homes) == 1:  # nearly always
            return self._turn(len(self._threads[homes[0]]))
        return sum(self._turn(len(self._threads[core])) for core in homes)

    def _turn(self, threads: int) -> float:
        found = self._turns.get(threads)
        if found is None:
            found = 1 / (threads * (1 + self._sharing * (1 - 1 / threads)))
            self._turns[threads] = found
        return found

    def place(self, process: Process, threads: int) -> None:
        """Let a process run with so many threads."""
        homes = []
        for _ in range(threads):
            core = self._next()
            self._threads[core].append(process)
            homes.append(core)
        self._homes[process] = homes

    def remove(self, process: Process) -> None:
        """It waits now; its cores run what others have too much of."""
        homes = self._homes.pop(process)
        for core in homes:
            self._threads[core].remove(process)
        for core in dict.fromkeys(homes):
            if not self._threads[core]:
                self._steal(core)

    def _next(self) -> int:
        if self._idle:
            return self._idle.pop()
        if len(self._threads) < self._count:
            self._threads.append([])
            return len(self._threads) - 1
        lengths = list(map(len, self._threads))
        return lengths.index(min(lengths))

    def _steal(self, core: int) -> None:
        lengths = list(map(len, self._threads))
        maximum = max(lengths)
        if maximum < 2:
            self._idle.append(core)
            return
        fullest = lengths.index(maximum)
        moved = self._threads[fullest].pop()
        self._threads[core].append(moved)
        homes = self._homes[moved]
        homes[homes.index(fullest)] = core


class EventSimulation:
    """Runs processes until nothing happens any more."""

    def __init__(self, cores: Cores) -> None:
        self.now = 0.0
        self.busy_s = 0.0
        """Core seconds that were worked so far."""
        self._cores = cores
        #: Busy threads that leave no core; what a second thread of a core adds is not one.
        self._crowd = float(sum(speed >= _WHOLE for speed in cores.speeds))
        if cores.quota is not None:
            self._crowd = min(self._crowd, cores.quota)
        self._rates: dict[int, float] = {}
        self._timed: list[tuple[float, int, Process]] = []
        self._working: dict[Process, float] = {}
        self._queues = _Queues(len(cores.speeds), cores.sharing)
        self._widths: dict[Process, int] = {}
        #: In the order of those who work; empty: to be shared out.
        self._shares: list[float] = []
        self._count = 0

    @property
    def crowding(self) -> float:
        """How much two threads that answer one another are in each other's way: 0 while two
        cores are free for them, 1 while none is, 1/4 while they take turns on one."""
        free = self._crowd - self._queues.busy
        if free >= 2:
            return 0.0
        return 1.0 if free <= 0 else _ONE_FREE

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
        """Run until every process has ended or waits for what never comes."""
        timed, working = self._timed, self._working
        while timed or working:
            worked, rate = inf, 0.0
            if working:
                if not self._shares:
                    self._share_out()
                rate = self._rate()
                worked = self.now + min(map(truediv, working.values(), self._shares)) / rate
            due = timed[0][0] if timed else inf
            self._pass(min(worked, due), rate)
            if due <= worked:
                self._advance(heapq.heappop(timed)[2], None)
            else:
                self._finish()

    def _rate(self) -> float:
        """The speed of each busy core."""
        busy = self._queues.busy
        if busy not in self._rates:
            self._rates[busy] = self._cores.rate(busy)
        return self._rates[busy]

    def _share_out(self) -> None:
        """Set the share of a core's speed that each working process gets for each of its
        threads."""
        share, widths = self._queues.share, self._widths
        self._shares = [share(process) / widths[process] for process in self._working]

    def _pass(self, until: float, rate: float) -> None:
        seconds = until - self.now
        if self._working and seconds > 0:
            done = seconds * rate
            for process, share in zip(self._working, self._shares, strict=True):
                self._working[process] -= done * share
            self.busy_s += seconds * self._queues.busy
        self.now = until

    def _finish(self) -> None:
        """The processes whose work is done go on, in the order in which they began it."""
        left = list(map(truediv, self._working.values(), self._shares))
        limit = max(_DONE, min(left))
        ended = [
            process for process, each in zip(self._working, left, strict=True) if each <= limit
        ]
        for process in ended:
            del self._working[process]
            del self._widths[process]
            self._queues.remove(process)
        self._shares = []
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
                self._widths[process] = max(1, round(wanted.width))
                self._queues.place(process, self._widths[process])
                self._shares = []
                return
