"""The model's constants, from a probe's runs.

What can be read is read (costs, CPU times). What only shows in a rate is fitted to the run that
depends on it most, one after the other: contention to two workers, waiting on crowded cores to
the tight step, pinning to the pinned run. Rates of runs that were only made alongside other
processes tell of these, too: nothing is fitted to them, least of all a lock.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import (
    Costs,
    Fitted,
    alone_costs,
    batch_costs,
    bisect,
    costs_of,
    fit_contention,
    merged,
    pauses_of,
    ratio,
    same_rate,
)
from trainfit.loader.measure.model import BatchCost, Pauses, Transfer
from trainfit.loader.measure.noise_correction import without_core_waits
from trainfit.loader.measure.probe_runs import Readings, mean, start_s
from trainfit.loader.measure.records import (
    BEGAN,
    CLOCK,
    CPU,
    DONE,
    PLACE,
    TOOK,
    WALL,
    WORKED,
    Records,
    Run,
    collected,
)
from trainfit.results.runs.measurement import Consumer

# ---
# What passing a batch on costs, as a probe's runs tell it.


#: A collection that took at least so many seconds, and this part of what a batch was waited for
#: meanwhile, held it up.
_LEAST_PAUSE_S: Final = 5e-3
_HELD_UP: Final = 0.5


def transfer_of(readings: Readings, costs: Costs) -> Transfer:
    """The costs of transfer to a main thread that never sleeps."""
    ones, pinned = readings.of("one"), readings.of("pinned")
    receive = mean([run.received[run.warm :, WORKED] for run in ones])
    took = mean([run.next_cpu[run.warm :] for run in ones])
    waited = mean([receive_waits(run) for run in ones])
    busy = [both for run in ones if (both := costs_of(run))]
    slower = statistics.fmean(ratio(both.wall_s, costs.wall_s) for both in busy) if busy else 1.0
    batch_s = float(np.nanmean(costs.wall_s))
    # A worker is idle when its batch is taken in both: but for what a garbage collection holds up
    # in one with a next batch to make.
    idle = min(
        [
            mean([receive_waits(run) for run in runs])
            for name in ("paced", "turn")
            if (runs := readings.of(name))
        ],
        default=waited,
    )
    return Transfer(
        receive_s=receive,
        pin_s=mean([_pinning(run) for run in pinned]),
        next_s=max(0.0, took - receive),
        latency_s=_latency(readings, costs),
        busy_wait_s=max(0.0, waited - idle),
        send_s=costs.send_s,
        receive_wait_s=min(idle, waited),
        pinned_next_s=mean([run.next_cpu[run.warm :] for run in pinned]) if pinned else None,
        disturb_s=max(0.0, slower - 1) * batch_s,
        crowded_latency_s=_crowded_latency(readings),
    )


def cold_transfer_of(readings: Readings, hot: Transfer) -> Transfer:
    """The costs of transfer to a main thread whose steps sleep."""
    paced = readings.of("paced")
    if not paced:
        return hot
    receive = mean([run.received[run.warm :, WORKED] for run in paced])
    took = mean([run.next_cpu[run.warm :] for run in paced])
    return dataclasses.replace(hot, receive_s=receive, next_s=max(0.0, took - receive))


def receive_waits(run: Run) -> Any:
    """How long receiving each batch waited, except where a garbage collection of their
    worker held up: the model has these collections themselves."""
    counted = run.received[run.warm :]
    waits = counted[:, TOOK] - counted[:, WORKED]
    return waits[[not _is_held_up(run, receipt) for receipt in counted]]


def _is_held_up(run: Run, receipt: Records) -> bool:
    """Was its worker meanwhile at a batch whose collection lasted about as long as this was
    waited for? (One of those that it makes ahead: the next, or the last that it may.)"""
    made_by = _made_by(run, receipt)
    if made_by is None:
        return False
    records, _ = made_by
    begun = records[:, BEGAN] < receipt[DONE]
    ended = records[:, BEGAN] + records[:, WALL] < receipt[DONE] - receipt[TOOK]
    spent = collected(records[begun & ~ended])
    least = max(_LEAST_PAUSE_S, _HELD_UP * (receipt[TOOK] - receipt[WORKED]))
    return bool((spent > least).any())


def _made_by(run: Run, receipt: Records) -> tuple[Records, int] | None:
    """The records of the worker that made the batch that was taken over, and which of them is its;
    ``None`` where that is not told."""
    count = run.settings.num_workers
    if not count or not run.settings.in_order or len(receipt) <= PLACE:
        return None
    if not math.isfinite(receipt[PLACE]):
        return None
    round_, worker = divmod(int(receipt[PLACE]), count)
    records = run.fetches[worker]
    return (records, round_) if round_ < len(records) else None


def _pinning(run: Run) -> Any:
    """CPU time of the pinning thread for each batch, without receiving it."""
    count, first = min(len(run.pinned), len(run.received)), max(1, run.warm)
    if count < first + 2:
        return run.pinned[:, WORKED]
    every = np.diff(run.pinned[first - 1 : count, CLOCK])
    return np.maximum(run.pinned[first:count, WORKED], every - run.received[first:count, WORKED])


def _latency(readings: Readings, costs: Costs) -> float:
    """The mean latency of batches that come one at a time, in seconds; 0 alongside other processes,
    where it would be waits for cores."""
    if "turn" in readings.disturbed():
        return 0.0
    return mean([_turn_latency(run, costs) for run in readings.of("turn")])


def _turn_latency(run: Run, costs: Costs) -> Any:
    """The latency in a run with one batch at a time, in seconds: what is neither a batch's making
    nor its passing on."""
    made, first = run.fetches[0][:, WALL], run.warm
    count = min(len(made), len(run.handed), len(run.received))
    if count < first + 2:
        return np.zeros(0)
    periods = np.diff(run.handed[first - 1 : count])
    # The next batch is asked for before the main thread goes on with this one.
    rest = periods - made[first:count] - costs.gap_s - run.received[first:count, TOOK]
    # The median: a batch that was made slowly for another's sake is no latency.
    return np.maximum(0.0, np.median(rest, keepdims=True))


def _crowded_latency(readings: Readings) -> float:
    """How much longer batches are under way while more workers than cores work, on average."""
    free = [_under_way(run) for run in readings.of("turn")]
    crowded = [_under_way(run) for run in readings.of("over")]
    disturbed = not readings.disturbed().keys().isdisjoint(("turn", "over"))
    if not free or not crowded or disturbed:
        return 0.0
    return max(0.0, mean(crowded) - mean(free))


def _under_way(run: Run) -> Any:
    """Seconds from a batch's making to its arrival, for each that the main thread waited for
    already when it was made."""
    first, found = max(1, run.warm), []
    for former, receipt in itertools.pairwise(run.received[first - 1 :]):
        made_by = _made_by(run, receipt)
        if made_by is None:
            continue
        records, round_ = made_by
        ended = records[round_, BEGAN] + records[round_, WALL]
        # What the main thread does with a batch comes after its arrival.
        if ended > former[DONE] + run.next_cpu[first:].mean():
            found.append(max(0.0, receipt[DONE] - receipt[TOOK] - ended))
    return np.array(found)


#: Two workers that wait this share of a batch's time more than one does, and give so much less
#: than cores would let them: a lock.
_LOCK_WAITS: Final = 0.2
#: One that waits for a lock prolongs the time that it is held by no more than this share; that and
#: the lock's share depend on one another: they are fitted in turns.
_MOST_CONVOY: Final = 0.2
_LOCK_ROUNDS: Final = 2
#: More than all of its work is not lost where threads take turns.
_MOST_SHARING: Final = 1.0
#: How far a run of seconds tells its rate, and the work of a batch against another run's (standard
#: deviations of the logarithm: docs/figures.md has runs of one setting).
_RATE_NOISE, _WORK_NOISE = 0.03, 0.05
#: Losses that are tried.
_LOSSES: Final = 17
#: By so much more than CPU times say, two busy cores may slow one another.
_UNSEEN_CONTENTION: Final = 0.08
#: Waits on crowded cores are at most so many times those of the tight run on average.
_CROWDED: Final = 4.0
_LOCK_SLOWER: Final = 0.85
#: Cores that a process without workers keeps busy, above which its threads share the work.
_SEVERAL: Final = 1.1


def fit(readings: Readings, cores: Cores) -> Fitted | None:
    """The model's constants from the runs; ``None`` where none came through."""
    alone = alone_costs(readings.of("alone"))
    costs = common_costs(readings)
    if costs is None:
        if not alone:
            return None
        pinned = _alone_pinned(readings)
        return Fitted(alone, alone, Transfer(), Transfer(), cores, 0.0, alone_pinned=pinned)
    hot = transfer_of(readings, costs)
    start = start_s(readings) or 0.0
    in_worker = batch_costs(costs)
    if "alone" in readings.disturbed():
        alone = _without_thread_waits(alone, in_worker)
    fitted = Fitted(
        in_worker,
        alone,
        hot,
        cold_transfer_of(readings, hot),
        cores,
        start,
        alone_pinned=_alone_pinned(readings),
        parallel_share=_parallel_share(readings, costs),
        pauses=_pauses(readings),
    )
    fitted = _with_sharing(_with_contention(fitted, readings, costs), readings)
    fitted = _with_crowding(fitted, readings)
    for _ in range(_LOCK_ROUNDS if fitted.locked_share else 0):
        fitted = _with_convoy(_with_lock(fitted, readings), readings)
    return _with_pinning(fitted, readings)


def _without_thread_waits(
    alone: tuple[BatchCost, ...], in_worker: tuple[BatchCost, ...]
) -> tuple[BatchCost, ...]:
    """What batches cost a process without workers, as it was measured alongside other processes;
    what they cost a worker where that is less.

    A process without workers has several threads, which wait for one another at the end of each
    operator, busily: for one that has no core, too. That wait is in the CPU time of the thread that
    is measured (2.3 times what one thread needs, measured with 4 busy processes on 2 cores). A
    worker has one thread, and makes the same batches.
    """
    if not alone or torch.get_num_threads() == 1:
        return alone
    took, needed = (
        statistics.fmean(cost.wait_s + cost.work_s for cost in costs)
        for costs in (alone, in_worker)
    )
    return in_worker if needed < took else alone


def _parallel_share(readings: Readings, costs: Costs) -> float:
    """The share of a batch's work that PyTorch's threads divide among them: a process without
    workers has several, a worker one. By Amdahl's law from the cores that the former keeps busy."""
    records = [run.fetches[0][1:] for run in readings.of("alone") if run.fetches]
    wall = sum(float(record[:, WALL].sum()) for record in records)
    threads = torch.get_num_threads()
    if threads == 1 or wall <= 0:
        return 0.0
    alone = sum(float(record[:, CPU].sum()) for record in records) / wall
    # Threads of other libraries are a worker's too.
    in_worker = float(np.nansum(costs.cpu_s) / np.nansum(costs.wall_s))
    cores = alone / max(1.0, in_worker)
    return min(1.0, (1 - 1 / cores) / (1 - 1 / threads)) if cores > _SEVERAL else 0.0


def _alone_pinned(readings: Readings) -> tuple[BatchCost, ...]:
    return alone_costs(readings.of("alone_pinned"))


def common_costs(readings: Readings) -> Costs | None:
    """What batches cost one worker that has the machine to itself, and does nothing else
    meanwhile."""
    ones = [costs for run in readings.of("one", "turn") if (costs := costs_of(run))]
    twos = [costs for run in readings.of("two") if (costs := costs_of(run))]
    if not ones:
        return merged(twos) if twos else None
    whole = merged([*ones, *twos])
    quiet = [costs for run in readings.of("turn") if (costs := costs_of(run))] or ones
    pace = statistics.fmean(ratio(costs.wall_s, whole.wall_s) for costs in quiet)
    cpu_pace = statistics.fmean(ratio(costs.cpu_s, whole.cpu_s) for costs in quiet)
    busy = [costs for run in readings.of("one") if (costs := costs_of(run))] or ones
    return Costs(
        whole.wall_s * pace,
        whole.cpu_s * cpu_pace,
        statistics.median(costs.gap_s for costs in busy),
        statistics.median(costs.send_s for costs in busy),
    )


def _pauses(readings: Readings) -> Pauses:
    """Garbage collections of workers that have the machine to themselves."""
    runs = readings.of("one", "turn") or readings.of("two")
    return pauses_of([records for run in runs for records in run.fetches])


def _with_contention(fitted: Fitted, readings: Readings, costs: Costs) -> Fitted:
    """Busy cores that slow one another, or a lock."""
    rate = readings.rate("two")
    if rate is None or len(fitted.cores.speeds) < 2:
        return fitted
    disturbed = not readings.disturbed().keys().isdisjoint(("one", "two"))
    twos = [both for run in readings.of("two") if (both := costs_of(run))]
    by_cpu = statistics.fmean(ratio(both.cpu_s, costs.cpu_s) for both in twos) if twos else 1.0
    of_cores = fitted.with_contention(min(1.0, max(0.0, by_cpu - 1)))
    if disturbed:
        return of_cores
    free = _rate_of(readings, "two")(of_cores)
    if twos and rate < _LOCK_SLOWER * free and _more_waits(readings, costs) > _LOCK_WAITS:
        return _with_lock(of_cores, readings)
    contention = fit_contention(fitted, _rate_of(readings, "two"), rate, by_cpu)
    # A rate may be short for other reasons: a slow batch in the making where the count ends.
    # Cores that slow one another show in CPU time.
    maximum = max(0.0, by_cpu - 1) + _UNSEEN_CONTENTION if twos else 1.0
    return fitted.with_contention(min(contention, maximum))


def _rate_of(readings: Readings, name: str, step_s: float = 0.0) -> Callable[[Fitted], float]:
    """The mean rate that a model has for these runs."""
    runs = [run for run in readings.of(name) if run.batches_per_s is not None]

    def mean_rate(fitted: Fitted) -> float:
        return statistics.fmean(same_rate(fitted, run, Consumer(step_s)) for run in runs)

    return mean_rate


def _more_waits(readings: Readings, costs: Costs) -> float:
    """How much longer two workers wait than one, as a share of what a batch takes one; for one
    another, not for a core that somebody else had."""
    twos = [both for run in readings.of("two") if (both := costs_of(without_core_waits(run)))]
    waits = [both.wall_s - both.cpu_s for both in twos]
    alone = costs.wall_s - costs.cpu_s
    more = []
    for each in waits:
        size = min(len(each), len(alone))
        more.append(np.nanmean(each[:size] - alone[:size]) / np.nanmean(costs.wall_s[:size]))
    return float(np.mean(more))


def _with_lock(fitted: Fitted, readings: Readings) -> Fitted:
    """The share of a batch that is under a lock, with which two workers are as fast as they
    were."""
    rate, rate_of = readings.rate("two"), _rate_of(readings, "two")
    if rate is None:
        return fitted

    def predicted(share: float) -> float:
        return rate_of(dataclasses.replace(fitted, locked_share=share))

    return dataclasses.replace(fitted, locked_share=bisect(predicted, rate, 1.0))


def _with_convoy(fitted: Fitted, readings: Readings) -> Fitted:
    """What those who wait for the lock cost who has it, by the run with the most of them."""
    rate, rate_of = readings.rate("over"), _rate_of(readings, "over")
    if rate is None:
        return fitted

    def predicted(convoy: float) -> float:
        return rate_of(dataclasses.replace(fitted, convoy=convoy))

    return dataclasses.replace(fitted, convoy=bisect(predicted, rate, _MOST_CONVOY))


def _with_sharing(fitted: Fitted, readings: Readings) -> Fitted:
    """What taking turns on a core costs, by a run with more workers than cores; where that has
    a core for each, what so many busy cores cost one another."""
    runs, rate = readings.of("over"), readings.rate("over")
    if not runs or rate is None or fitted.locked_share or "over" in readings.disturbed():
        return fitted
    settings, cores, rate_of = runs[0].settings, fitted.cores, _rate_of(readings, "over")
    if settings.num_workers <= len(cores.speeds):
        return fitted.with_contention(fit_contention(fitted, rate_of, rate, 1 + cores.contention))

    def shared(loss: float) -> Fitted:
        return dataclasses.replace(fitted, cores=dataclasses.replace(cores, sharing=loss))

    turns = 1 - len(cores.speeds) / settings.num_workers
    more = _more_work(readings) - 1
    maximum = (max(0.0, more) + 2 * _WORK_NOISE) / turns

    def misfit(loss: float) -> float:
        # A rate may be short for other reasons (batches in order that wait for a slow one), and
        # says little where cores idle: what the cores did for each batch counts, too.
        by_rate = math.log(rate_of(shared(loss)) / rate) / _RATE_NOISE
        return by_rate**2 + ((loss * turns - more) / _WORK_NOISE) ** 2

    # By a grid: simulated rates are not smooth.
    losses = np.linspace(0.0, min(_MOST_SHARING, maximum), _LOSSES).tolist()
    return shared(min(losses, key=misfit))


def _more_work(readings: Readings) -> float:
    """How much more work of cores a batch takes where workers take turns on them than with two."""
    over, two = _work_s(readings.of("over")), _work_s(readings.of("two"))
    return over / two if over and two else 1.0


def _work_s(runs: Sequence[Run]) -> float | None:
    """Seconds of a batch's work on all cores by whomever; the workers' own where that was not
    watched, ``None`` where no batch was made."""
    watched = [
        run.core_speed.busy_cores / run.batches_per_s
        for run in runs
        if run.core_speed is not None and run.batches_per_s
    ]
    if len(watched) == len(runs) > 0:
        return statistics.fmean(watched)
    fetched = [float(run.fetched[:, CPU].mean()) for run in runs if len(run.fetched)]
    return statistics.fmean(fetched) if fetched else None


def _with_crowding(fitted: Fitted, readings: Readings) -> Fitted:
    """What waiting for a core adds to taking a batch over, by the tight step."""
    runs = readings.of("tight")
    if not runs:
        return fitted

    def waiting(wait_s: float) -> Fitted:
        hot = dataclasses.replace(fitted.transfer, crowded_wait_s=wait_s)
        cold = dataclasses.replace(fitted.cold_transfer, crowded_wait_s=wait_s)
        return dataclasses.replace(fitted, transfer=hot, cold_transfer=cold)

    step_s = statistics.fmean(float(run.steps[1:].mean()) for run in runs)
    # Cores are not crowded all the time; waits are longer than on average while they are. But
    # not by any number: the rate may be short for other reasons.
    waits = mean([receive_waits(run) for run in runs])
    maximum = _CROWDED * max(0.0, waits - fitted.transfer.receive_wait_s)
    rate = readings.rate("tight")
    if rate is None or maximum <= 0 or "tight" in readings.disturbed():
        return waiting(0.0)
    rate_of = _rate_of(readings, "tight", step_s)
    return waiting(bisect(lambda wait_s: rate_of(waiting(wait_s)), rate, maximum))


def _with_pinning(fitted: Fitted, readings: Readings) -> Fitted:
    """CPU time that pinning costs beyond its thread's clock (caches that it
    empties), where cores bound the pinned run."""
    rate = readings.rate("pinned")
    if rate is None or "pinned" in readings.disturbed():
        return fitted
    read, rate_of = fitted.transfer.pin_s, _rate_of(readings, "pinned")

    def taking(more: float) -> Fitted:
        hot = dataclasses.replace(fitted.transfer, pin_s=read + more)
        cold = dataclasses.replace(fitted.cold_transfer, pin_s=read + more)
        return dataclasses.replace(fitted, transfer=hot, cold_transfer=cold)

    def predicted(more: float) -> float:
        return rate_of(taking(more))

    # The hand-off as a whole bounds what its caches can cost.
    return taking(bisect(predicted, rate, 2 * read))
