"""PyTorch's DataLoader as a closed queueing network, simulated batch by batch.

What is modelled is `torch/utils/data/dataloader.py` and `_utils/worker.py` of PyTorch 2.6 to
2.13, of map-style data sets:

- ``prefetch_factor × num_workers`` batches are asked for at the start; each batch that is handed
  to the user lets one more be asked for (so out-of-order batches that wait occupy tokens).
- In order, the next batch is asked of the next worker in turn, whatever it has to do; with
  ``in_order=False`` of the next that has fewer than ``prefetch_factor`` outstanding.
- A worker makes its batches one after the other. Results come through one queue.
- With ``pin_memory`` one thread takes them, in the order they come, and copies them to pinned
  memory; without, the main thread takes them while it looks for the one that is due.
- ``num_workers=0``: the main thread makes each batch when it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainfit.loader.measure.events import (
    Cores,
    CoreWork,
    EventSimulation,
    Process,
    Queue,
    Sleep,
    Take,
)
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

# ---
# Pauses of Python's garbage collection, which recur with a worker's count of batches.
#
# CPython starts a full collection when enough objects were made since the last: a data set that
# makes many of them for each sample sets one off every so many batches. Workers that are forked
# from one process begin with the same count, so theirs come at the same batch of each.


@dataclass(frozen=True)
class Pauses:
    """Seconds of CPU time for collections in each batch of a worker, by how many it made before.

    After the last of ``seconds``, the last ``period`` of them come again and again.
    """

    seconds: tuple[float, ...] = ()
    period: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.period <= len(self.seconds) or not self.seconds):
            raise ValueError("expected a period from 1 to the number of pauses")

    def of(self, number: int) -> float:
        """The seconds of pauses in a worker's batch ``number``; its first is number 0."""
        if not self.seconds:
            return 0.0
        if number >= len(self.seconds):
            first = len(self.seconds) - self.period
            number = first + (number - first) % self.period
        return self.seconds[number]

    @property
    def mean(self) -> float:
        """The pauses' seconds per batch, in the long run."""
        return sum(self.seconds[-self.period :]) / self.period if self.seconds else 0.0

    def scaled(self, factor: float) -> Pauses:
        """The same pauses, ``factor`` times as long."""
        return Pauses(tuple(value * factor for value in self.seconds), self.period)


# ---
# What a DataLoader has to do: the costs of its batches and of passing them on.


@dataclass(frozen=True)
class BatchCost:
    """Cost of producing one batch, in seconds: waiting (storage), and work on ``width`` cores
    (more than one where a library decodes with several threads)."""

    wait_s: float
    work_s: float
    width: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """Cost of transferring one batch, in seconds.

    Work on a core: ``send_s`` is paid by a thread of the worker, which makes its next batch
    meanwhile, ``disturb_s`` by that batch, if it is begun at once (they share the interpreter);
    ``receive_s`` by who takes the batch from the workers' queue (the main thread, or the pinning
    thread); ``pin_s`` by the pinning thread; ``next_s`` by the main thread for each batch that
    it hands out, and ``pinned_next_s`` where a pinning thread did the rest.

    Waits: ``latency_s`` passes in pipes and until threads wake: from the asking for a batch to the
    worker's start, and from its end to the arrival, together; ``crowded_latency_s`` comes on top
    while all cores are busy (the threads that pass it on wait for one). Shared memory is handed
    over as file descriptors, by a thread of the worker that answers some messages for each tensor:
    who takes a batch waits ``receive_wait_s`` for it. It also busy-waits ``busy_wait_s``, at most
    until that is made, while the worker that made it makes its next one, as the answers need the
    worker's interpreter lock (5 ms a time, ``sys.getswitchinterval``, where the worker runs Python
    code), and ``crowded_wait_s`` while all cores are busy (a part of it while one is free): each
    message wakes a thread that has to wait for its turn.
    """

    receive_s: float = 0.0
    pin_s: float = 0.0
    next_s: float = 0.0
    latency_s: float = 0.0
    busy_wait_s: float = 0.0
    send_s: float = 0.0
    receive_wait_s: float = 0.0
    crowded_wait_s: float = 0.0
    pinned_next_s: float | None = None
    disturb_s: float = 0.0
    crowded_latency_s: float = 0.0

    def next_of(self, settings: LoaderSettings) -> float:
        """Seconds of the main thread in ``next``, for a batch that is there."""
        if settings.pin_memory and self.pinned_next_s is not None:
            return self.pinned_next_s
        return self.next_s


@dataclass(frozen=True)
class Load:
    """A DataLoader's work: what is simulated with any settings.

    Attributes:
        costs: of batches in their order, as measured or drawn; after the last comes the first.
        start_s: until one worker runs, in seconds; workers are started one after the other.
        worker_speeds: how fast each worker is (a slow core, a busy neighbour), repeated as
            needed; a speed of 0.5 doubles wait and work.
        alone: costs of batches in the main process (``num_workers=0``), where they differ, with
            all that ``next`` takes; ``alone_pinned`` the same with pinning.
        locked_share: of a batch's wait and work in a worker, the part that happens under a lock
            that all workers share (a file's, a library's), its last part.
        convoy: by what share each further worker that waits for the lock prolongs the time that
            the next one holds it (those who wait are woken, look, and wait again), as far as there
            are cores to wake them on: with it, too many workers are slower than fewer.
        pauses: of a worker, for garbage collections, on top of what its batches cost.
    """

    costs: Sequence[BatchCost]
    transfer: Transfer = field(default_factory=Transfer)
    consumer: Consumer = field(default_factory=lambda: Consumer(0.0))
    cores: Cores = field(default_factory=lambda: Cores((1.0,) * 1024))
    start_s: float = 0.0
    worker_speeds: Sequence[float] = (1.0,)
    alone: Sequence[BatchCost] = ()
    alone_pinned: Sequence[BatchCost] = ()
    locked_share: float = 0.0
    convoy: float = 0.0
    pauses: Pauses = field(default_factory=Pauses)

    def __post_init__(self) -> None:
        for name in ("costs", "worker_speeds", "alone", "alone_pinned"):  # so that it is hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.costs:
            raise ValueError("a load needs the cost of at least one batch")
        if not 0 <= self.locked_share <= 1:
            raise ValueError("the locked share of a batch's cost must be between 0 and 1")


#: Of a simulated run, batches that are not counted: the queues are full at first, and it takes
#: some rounds until they are as full as they will be.
WARM_UP_ROUNDS: Final = 3
#: How often who waits for a busy worker looks whether it still is: the time's resolution.
_LOOK_S: Final = 1e-3
#: A batch that both waits and works (each more than this share) does so in turn, sample by
#: sample; this many turns keep workers from falling into step.
_MIXED: Final = 0.1
_SLICES: Final = 4


@dataclass(frozen=True)
class Outcome:
    """A simulated run.

    Attributes:
        handed_s: when each batch was handed to the user, in seconds from the first ``iter``.
        waited_s: how long the user waited for each.
        finished_s: when the user was done with the last.
        busy_cores: cores that were busy, on average.
        rounds: batches that make one round of the queues.
    """

    handed_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    finished_s: float
    busy_cores: float
    rounds: int

    def first(self, batches: int) -> Outcome:
        """The same run as if it had been left after so many batches."""
        handed, waited = self.handed_s[:batches], self.waited_s[:batches]
        return dataclasses.replace(self, handed_s=handed, waited_s=waited)

    @property
    def warm(self) -> int:
        """The first batch that counts for the steady state."""
        return min(WARM_UP_ROUNDS * self.rounds, len(self.handed_s) // 2)

    @property
    def batches_per_s(self) -> float:
        """The rate of the user's loop in the steady state; infinite if nothing needs time."""
        seconds, batches = self._steady
        return batches / seconds if seconds > 0 else math.inf

    @property
    def waiting_share(self) -> float:
        """The share of the steady state's time that the user spends waiting for batches."""
        seconds, batches = self._steady
        waited = sum(self.waited_s[len(self.waited_s) - batches :])
        return waited / seconds if seconds > 0 else 0.0

    @property
    def _steady(self) -> tuple[float, int]:
        """Seconds and batches from the first returned batch to the last (of one batch: of the
        run)."""
        batches = len(self.handed_s) - 1 - self.warm
        if batches == 0:
            return self.finished_s, 1
        return self.handed_s[-1] - self.handed_s[self.warm], batches


#: Simulated runs that are kept: those of one choice of settings, with what bounds it.
_KEPT: Final = 256


@functools.lru_cache(maxsize=_KEPT)
def simulate(load: Load, settings: LoaderSettings, batches: int, epochs: int = 1) -> Outcome:
    """Run a DataLoader for ``epochs`` of so many batches each.

    Without ``persistent_workers`` the workers are restarted for each epoch. The same run is
    simulated once: a choice is explained after each real run, with the same questions.
    """
    if batches < 1 or epochs < 1:
        raise ValueError("a run needs at least one batch and one epoch")
    run = _QueueRun(load, settings, batches, epochs)
    return run.outcome()


class _QueueRun:
    """One simulated run: its processes and what they note down."""

    def __init__(self, load: Load, settings: LoaderSettings, batches: int, epochs: int) -> None:
        self.load, self.settings = load, settings
        self.batches, self.epochs = batches, epochs
        self.simulation = EventSimulation(load.cores)
        self.epoch = 0
        self.handed: list[float] = []
        self.waited: list[float] = []

    def outcome(self) -> Outcome:
        self.simulation.start(self._main())
        self.simulation.run()
        now = self.simulation.now
        busy = self.simulation.busy_s / now if now > 0 else 0.0
        rounds = max(1, self.settings.tokens)
        return Outcome(tuple(self.handed), tuple(self.waited), now, busy, rounds)

    def cost(self, index: int) -> BatchCost:
        """The cost of a batch of the current epoch."""
        costs = self._costs()
        return costs[(self.epoch * self.batches + index) % len(costs)]

    def _costs(self) -> Sequence[BatchCost]:
        load = self.load
        if self.settings.num_workers:
            return load.costs
        pinned = load.alone_pinned if self.settings.pin_memory else ()
        return pinned or load.alone or load.costs

    # --- The main thread ----------------------------------------------------------------------
    def _main(self) -> Process:
        pool: _Pool | None = None
        for epoch in range(self.epochs):
            self.epoch = epoch
            if self.settings.num_workers == 0:
                yield from self._alone()
                continue
            asked = self.simulation.now
            if pool is None or not self.settings.persistent_workers:
                pool = _Pool(self)
                yield from pool.start()
            yield from self._epoch(pool, asked)

    def _alone(self) -> Process:
        transfer = self.load.transfer
        for index in range(self.batches):
            asked = self.simulation.now
            cost = self.cost(index)
            yield Sleep(cost.wait_s)
            yield CoreWork(cost.work_s, cost.width)
            if self._costs() is self.load.costs:  # measured alone, it is part of the cost
                yield CoreWork(transfer.next_s)
            if self.settings.pin_memory and not self.load.alone_pinned:
                yield CoreWork(transfer.pin_s)
            self._hand_over(asked)
            yield from self._consume()

    def _epoch(self, pool: _Pool, asked: float) -> Process:
        pool.begin(self.batches)
        for due in range(self.batches):
            while True:
                if self.settings.in_order and due in pool.early:
                    worker = pool.early.pop(due)
                    break
                index, worker = yield Take(pool.ready)
                if not self.settings.pin_memory:
                    yield from pool.receive(worker)
                if index == due or not self.settings.in_order:
                    break
                pool.early[index] = worker
            pool.outstanding[worker] -= 1
            pool.ask()
            # Mostly the former batch, which is freed once this one is there.
            yield CoreWork(self.load.transfer.next_of(self.settings))
            self._hand_over(asked)
            yield from self._consume()
            asked = self.simulation.now

    def _hand_over(self, asked: float) -> None:
        self.handed.append(self.simulation.now)
        self.waited.append(self.simulation.now - asked)

    def _consume(self) -> Process:
        consumer = self.load.consumer
        if not self.settings.pin_memory:
            yield CoreWork(consumer.pageable_s)
        yield CoreWork(consumer.work_s)
        yield Sleep(consumer.step_s - consumer.work_s)


class _Pool:
    """The workers of one DataLoader iterator, with their queues."""

    def __init__(self, run: _QueueRun) -> None:
        self._run, self._settings = run, run.settings
        count = run.settings.num_workers
        self._indices = [Queue() for _ in range(count)]
        self._results = Queue()
        #: Where the main thread looks: behind the pinning thread, if there is one.
        self.ready = Queue() if run.settings.pin_memory else self._results
        self.early: dict[int, int] = {}
        self.outstanding = [0] * count
        self._is_making = [False] * count
        self._is_paused = [False] * count
        self._lock = Queue()
        self._lock.items.append(None)
        self._next: Iterator[int] = iter(())
        self._turn: Iterator[int] = iter(())

    def start(self) -> Process:
        """Start the workers one after the other, as the DataLoader does."""
        speeds = itertools.cycle(self._run.load.worker_speeds)
        for worker, speed in zip(range(self._settings.num_workers), speeds, strict=False):
            yield Sleep(self._run.load.start_s)
            self._run.simulation.start(self._work(worker, speed))
        if self._settings.pin_memory:
            self._run.simulation.start(self._pin())

    def begin(self, batches: int) -> None:
        """A new epoch: ask for as many batches as there are tokens."""
        self._next = iter(range(batches))
        self._turn = itertools.cycle(range(self._settings.num_workers))
        for _ in range(self._settings.tokens):
            self.ask()

    def ask(self) -> None:
        """Ask for the next batch, if there is one left, of the worker whose turn it is."""
        index = next(self._next, None)
        if index is None:
            return
        for worker in itertools.islice(self._turn, self._settings.num_workers):
            free = self.outstanding[worker] < self._settings.prefetch_factor
            if self._settings.in_order or free:
                break
        else:
            return
        self.outstanding[worker] += 1
        self._run.simulation.put(self._indices[worker], index)

    def _work(self, worker: int, speed: float) -> Process:
        for number in itertools.count():
            self._is_making[worker] = False
            at_once = bool(self._indices[worker].items)
            index = yield Take(self._indices[worker])
            self._is_making[worker] = True
            if at_once:
                yield CoreWork(self._run.load.transfer.disturb_s)
            cost = self._run.cost(index)
            locked = self._run.load.locked_share
            pause_s = self._run.load.pauses.of(number) / speed
            free = 1 - locked
            if pause_s:  # somewhere amid the batch
                free /= 2
                yield from self._make(cost, free / speed)
                yield from self._pause(worker, pause_s)
            yield from self._make(cost, free / speed)
            if locked:
                yield from self._locked(cost, locked / speed)
            self._run.simulation.start(self._deliver((index, worker)))

    def _pause(self, worker: int, seconds: float) -> Process:
        """A collection: the worker's sending thread cannot answer meanwhile."""
        self._is_paused[worker] = True
        yield CoreWork(seconds)
        self._is_paused[worker] = False

    def _make(self, cost: BatchCost, times: float) -> Process:
        """A process of ``times`` the cost, by samples: each waits for storage and then works."""
        wait_s, work_s = cost.wait_s * times, cost.work_s * times
        mixed = min(wait_s, work_s) > _MIXED * (wait_s + work_s)
        slices = _SLICES if mixed else 1
        for _ in range(slices):
            yield Sleep(wait_s / slices)
            yield CoreWork(work_s / slices, cost.width)

    def _locked(self, cost: BatchCost, times: float) -> Process:
        """The part that one worker does at a time."""
        yield Take(self._lock)
        load = self._run.load
        slowed = 1 + load.convoy * min(len(self._lock.takers), len(load.cores.speeds))
        yield from self._make(cost, times * slowed)
        self._run.simulation.put(self._lock, None)

    def _deliver(self, result: tuple[int, int]) -> Process:
        yield CoreWork(self._run.load.transfer.send_s)
        transfer = self._run.load.transfer
        crowding = self._run.simulation.crowding
        yield Sleep(transfer.latency_s + crowding * transfer.crowded_latency_s)
        self._run.simulation.put(self._results, result)

    def receive(self, worker: int) -> Process:
        """Take over a batch that this worker made."""
        transfer = self._run.load.transfer
        crowding = self._run.simulation.crowding
        yield Sleep(transfer.receive_wait_s + crowding * transfer.crowded_wait_s)
        left_s = transfer.busy_wait_s
        while left_s > 0 and self._is_making[worker]:
            look_s = min(left_s, _LOOK_S)
            yield Sleep(look_s)
            left_s -= look_s
        while self._is_paused[worker]:
            yield Sleep(_LOOK_S)
        yield CoreWork(transfer.receive_s)

    def _pin(self) -> Process:
        while True:
            item = yield Take(self._results)
            yield from self.receive(item[1])
            yield CoreWork(self._run.load.transfer.pin_s)
            self._run.simulation.put(self.ready, item)
