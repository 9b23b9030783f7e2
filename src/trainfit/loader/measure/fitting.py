"""Fits the model's costs to real runs of a loader.

All runs of a probe load the same batches in the same order, so what differs between two runs
of the same batches is the settings (and the machine's mood): contention is fitted to pairs of
batches, not to means of different ones.

A worker's time for one batch is split so:

    fetch (wall)  =  waiting + work on cores         work: CPU time of the worker meanwhile
    work          =  code of the data set, and collections of Python's garbage (``pauses``)
    gap           =  until it begins the next one    queues, and the sending thread's start
    send          =  CPU time of the process outside of fetch, beyond the gap: its sending thread
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.machine_limits import model_cores
from trainfit.loader.measure.model import (
    WARM_UP_ROUNDS,
    BatchCost,
    Load,
    Outcome,
    Pauses,
    Transfer,
    simulate,
)
from trainfit.loader.measure.records import (
    BEGAN,
    CPU,
    PROCESS_CPU,
    WALL,
    Records,
    Run,
    collected,
    local,
)
from trainfit.results.dataloader import LoaderMachine, LoaderSettings
from trainfit.results.runs.measurement import Consumer

#: A batch with more than this part of the longest one's collections holds a full collection.
_FULL: Final = 0.5
#: Batches that a prediction counts at least, and rounds of the workers: what is half made at
#: the beginning and the end of the count must not matter.
_LEAST, _ROUNDS = 400, 40
#: Periods of each worker's pauses, and how many batches are simulated for them at most.
_PERIODS, _MOST_PAUSED = 2, 1200
#: With this contention a second core gains nothing.
_MOST_CONTENTION = 1.0
#: Of its rate without contention, what a run has at most with the most of it, if cores bound it.
_BOUND = 0.8
#: Of the interval that is searched for a constant: a thousandth is far below a rate's noise.
_HALVINGS: Final = 10


@dataclass(frozen=True)
class Costs:
    """What each batch of the common order took in a worker, and what comes with each.

    ``wall_s`` and ``cpu_s`` are by the batch's place in the order (nan: not seen), without
    garbage collections. ``gap_s`` is a worker's time between two batches, ``send_s`` the CPU time
    of its sending thread.
    """

    wall_s: Records
    cpu_s: Records
    gap_s: float
    send_s: float

    @property
    def seen(self) -> NDArray[np.intp]:
        """Places in the order that were seen."""
        return np.flatnonzero(np.isfinite(self.wall_s))


def costs_of(run: Run) -> Costs | None:
    """The costs that a run with workers saw; ``None`` where there are too few.

    In order, worker w makes the batches w, w + W, w + 2 W, …; those of a worker that has not
    settled are left out.
    """
    count = run.settings.num_workers
    longest = max((len(records) for records in run.fetches), default=0)
    if count == 0 or longest < 2 or not run.settings.in_order:
        return None
    wall = np.full(count * longest, np.nan)
    cpu = np.full(count * longest, np.nan)
    gaps, outside = [], []
    for worker, records in enumerate(run.fetches):
        if len(records) < 2:
            continue
        first = run.settled(records)
        places = worker + count * np.arange(first, len(records))
        spent = collected(records[first:])
        worked = records[first:, CPU] - spent
        cpu[places] = worked * local(records[first:])
        wall[places] = records[first:, WALL] - spent - worked + cpu[places]
        before, after = records[first - 1 : -1], records[first:]
        gaps.append(after[:, BEGAN] - before[:, BEGAN] - before[:, WALL])
        outside.append(after[:, PROCESS_CPU] - before[:, PROCESS_CPU] - before[:, CPU])
    # A worker that waits for an index to work on has long gaps: the short ones are its own.
    gap = float(np.quantile(np.concatenate(gaps), 0.25))
    beyond = float(np.concatenate(outside).mean())
    return Costs(wall, cpu, gap, max(0.0, beyond - gap))


def merged(parts: Sequence[Costs]) -> Costs:
    """Several runs' costs as one, each brought to the pace of the first on common batches."""
    size = max(len(part.wall_s) for part in parts)
    reference = parts[0]
    walls, cpus = np.full((len(parts), size), np.nan), np.full((len(parts), size), np.nan)
    for row, part in enumerate(parts):
        walls[row, : len(part.wall_s)] = part.wall_s / ratio(part.wall_s, reference.wall_s)
        cpus[row, : len(part.cpu_s)] = part.cpu_s / ratio(part.cpu_s, reference.cpu_s)
    seen = np.isfinite(walls).any(axis=0)
    last = int(np.flatnonzero(seen)[-1]) + 1
    wall, cpu = np.full(last, np.nan), np.full(last, np.nan)
    wall[seen[:last]] = np.nanmedian(walls[:, :last][:, seen[:last]], axis=0)
    cpu[seen[:last]] = np.nanmedian(cpus[:, :last][:, seen[:last]], axis=0)
    gap = statistics.median(part.gap_s for part in parts)
    return Costs(wall, cpu, gap, statistics.median(part.send_s for part in parts))


def ratio(one: Records, other: Records) -> float:
    """What the batches that both saw took in one, divided by the other; 1 if there are none."""
    size = min(len(one), len(other))
    both = np.isfinite(one[:size]) & np.isfinite(other[:size])
    total = float(other[:size][both].sum())
    return float(one[:size][both].sum()) / total if total > 0 else 1.0


def batch_costs(costs: Costs) -> tuple[BatchCost, ...]:
    """The costs of batches as the model uses them, by their places: one that was not seen (while
    workers settle) costs what those that were seen do on average.

    A batch whose CPU time is above its wall time is work on several cores.
    """
    made = []
    seen = np.isfinite(costs.wall_s)
    walls, cpus = (np.where(seen, each, each[seen].mean()) for each in (costs.wall_s, costs.cpu_s))
    for wall, cpu in zip(walls.tolist(), np.maximum(0.0, cpus).tolist(), strict=True):
        if cpu > wall > 0:
            made.append(BatchCost(0.0, wall + costs.gap_s, cpu / wall))
        else:
            made.append(BatchCost(wall - cpu, cpu + costs.gap_s))
    return tuple(made)


def alone_costs(runs: Sequence[Run]) -> tuple[BatchCost, ...]:
    """The costs of batches in runs without workers; the other work of ``next`` is part of them, and
    so is the long-run cost of garbage collections."""
    runs = [run for run in runs if run.fetches and len(run.fetches[0]) > 1]
    # One process: what it has made when a run ends counts in the next.
    pause_s = pauses_of([np.concatenate([run.fetches[0] for run in runs])]).mean if runs else 0.0
    return tuple(
        dataclasses.replace(cost, work_s=cost.work_s + pause_s)
        for run in runs
        for cost in _without_pauses(run)
    )


def _without_pauses(run: Run) -> tuple[BatchCost, ...]:
    first = run.settled(run.fetches[0])
    records, taken = run.fetches[0][first:], run.next_cpu[first:]
    count = min(len(records), len(taken))
    other_work = taken[:count].mean() - records[:count, CPU].mean() if count else 0.0
    spent = collected(records)
    gap = max(0.0, float(other_work))
    return batch_costs(Costs(records[:, WALL] - spent, records[:, CPU] - spent, gap, 0.0))


def pauses_of(workers: Sequence[Records]) -> Pauses:
    """What the records of some workers say: of the longest when collections come, of all how long
    full ones take.

    From the first full collection to the last are whole periods: with a count that ends anywhere
    the long run would have too many or too few.
    """
    series = [collected(records) for records in workers]
    every = np.concatenate([np.zeros(1), *series])
    if not every.max() > 0:
        return Pauses()
    least = _FULL * every.max()
    seconds = max(series, key=len).copy()
    places = np.flatnonzero(seconds > least)
    seconds[places] = every[every > least].mean()
    if len(places) < 2:
        return Pauses(tuple(map(float, seconds)), len(seconds))
    end = int(places[-1]) + 1
    return Pauses(tuple(map(float, seconds[:end])), end - 1 - int(places[0]))


@dataclass(frozen=True)
class Fitted:
    """A loader as the model sees it: any settings, any consumer.

    ``locked_share`` is of a batch's cost what a lock lets one worker do at a time, ``convoy`` what
    each that waits for it adds to that, ``parallel_share`` of its work what PyTorch's threads
    share, where a worker has several. ``pauses`` are a worker's garbage collections; those of a
    process without workers are part of ``alone`` and ``alone_pinned``. ``transfer`` is that of a
    loop that never sleeps, ``cold_transfer`` that of one whose steps do: caches and clocks are cold
    when the main thread wakes.
    """

    costs: tuple[BatchCost, ...]
    alone: tuple[BatchCost, ...]
    transfer: Transfer
    cold_transfer: Transfer
    cores: Cores
    start_s: float
    locked_share: float = 0.0
    convoy: float = 0.0
    alone_pinned: tuple[BatchCost, ...] = ()
    parallel_share: float = 0.0
    pauses: Pauses = field(default_factory=Pauses)

    def load(self, consumer: Consumer, worker_threads: int = 1) -> Load:
        """What is simulated with this consumer."""
        transfer = self.cold_transfer if consumer.step_s > consumer.work_s else self.transfer
        return Load(
            threaded(self.costs, self.parallel_share, worker_threads),
            transfer,
            consumer,
            self.cores,
            self.start_s,
            alone=self.alone,
            alone_pinned=self.alone_pinned,
            locked_share=self.locked_share,
            convoy=self.convoy,
            pauses=self.pauses,
        )

    def predict(
        self, settings: LoaderSettings, consumer: Consumer, batches: int | None = None
    ) -> Outcome:
        """Simulate so many batches; by default as many as :func:`enough` says."""
        if batches is None:
            batches = enough(settings, len(self.costs), self.pauses)
        # As many more as can be in the making: a loader that runs dry at the end would hand
        # over what was made before the count began.
        load = self.load(consumer, settings.worker_threads)
        if not settings.num_workers:
            # What one process takes was measured with all of its threads busy, and nothing else.
            free = dataclasses.replace(self.cores, contention=0.0, sharing=0.0)
            load = dataclasses.replace(load, cores=free)
        outcome = simulate(load, settings, batches + settings.tokens)
        return outcome.first(batches)

    def with_contention(self, contention: float) -> Fitted:
        """The same costs on cores with this contention."""
        return dataclasses.replace(
            self, cores=dataclasses.replace(self.cores, contention=contention)
        )


def threaded(
    costs: tuple[BatchCost, ...], parallel_share: float, threads: int
) -> tuple[BatchCost, ...]:
    """Batches whose work so many threads share (Amdahl's law: the rest is done by one).

    What several threads of another library work at already stays as it is.
    """
    if threads == 1 or not parallel_share:
        return costs
    shorter = 1 - parallel_share + parallel_share / threads
    return tuple(
        BatchCost(cost.wait_s, cost.work_s * shorter, 1 / shorter) if cost.width == 1 else cost
        for cost in costs
    )


def enough(settings: LoaderSettings, costs: int, pauses: Pauses) -> int:
    """Batches to simulate, so that what counts of them are whole rounds of the measured costs:
    settings are then compared on the same batches. Of workers that pause, so many that one pause
    more or less makes no difference."""
    rounds = max(1, settings.tokens)
    warm = WARM_UP_ROUNDS * rounds
    counted = max(_LEAST, _ROUNDS * settings.num_workers)
    if pauses.mean:
        paused = _PERIODS * pauses.period * settings.num_workers
        counted = max(counted, min(_MOST_PAUSED, paused))
    return warm + 1 + costs * math.ceil(counted / costs)


def same_rate(fitted: Fitted, run: Run, consumer: Consumer) -> float:
    """The rate that the model has for a run's settings, in batches a second, if it went on and on
    with the batches and the collections that the run counted: that a slow batch was among them,
    or one collection more, is no constant of the machine's.
    """
    costs = fitted.costs[run.warm + 1 : len(run.handed)] or fitted.costs
    count = max(1, run.settings.num_workers)
    rounds = slice((run.warm + 1) // count, len(run.handed) // count + 1)
    spent = [collected(records[rounds]) for records in run.fetches if len(records[rounds])]
    pauses = fitted.pauses
    if spent and pauses.mean:
        pauses = pauses.scaled(float(np.concatenate(spent).mean()) / pauses.mean)
    same = dataclasses.replace(fitted, costs=costs, pauses=pauses)
    return same.predict(run.settings, consumer).batches_per_s


def fit_contention(
    fitted: Fitted, predicted: Callable[[Fitted], float], rate: float, cpu_ratio: float
) -> float:
    """The contention of the cores: by how much one more busy core slows all of them.

    Where cores bound the run it is the contention with which the model gives the rate that was
    measured (``predicted`` gives its rate for that run); elsewhere the rate says nothing of it,
    and ``cpu_ratio`` does: what the same batches took of CPU time in this run, divided by what
    they took one worker.
    """

    def with_contention(contention: float) -> float:
        return predicted(fitted.with_contention(contention))

    if with_contention(_MOST_CONTENTION) > _BOUND * with_contention(0.0):
        return min(_MOST_CONTENTION, max(0.0, cpu_ratio - 1))
    return bisect(with_contention, rate, _MOST_CONTENTION)


def bisect(falling: Callable[[float], float], wanted: float, most: float) -> float:
    """The place, from 0 to ``most``, at which a falling function has a value; 0 where it never had
    it."""
    if falling(0.0) <= wanted:
        return 0.0
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2


def share_of(fitted: Fitted, machine: LoaderMachine, ranks: int) -> Fitted:
    """A model of a loader that has the machine to itself, for one of ``ranks`` on its share of it
    (``machine``), with the others running alike.

    With n busy cores of each rank, all of n × ranks slow one another (see
    :class:`~trainfit.loader.measure.events.Cores`): 1 + c (n r - 1) = (1 + c (r - 1)) (1 + c' (n -
    1)) with c' = c r / (1 + c (r - 1)).
    """
    whole = fitted.cores
    share = model_cores(machine, 0.0)
    others = 1 + whole.contention * (ranks - 1)
    cores = dataclasses.replace(
        whole,
        speeds=tuple(speed / others for speed in share.speeds),
        quota=share.quota,
        contention=whole.contention * ranks / others,
    )
    return dataclasses.replace(fitted, cores=cores)
