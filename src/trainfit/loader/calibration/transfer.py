"""What passing a batch on costs, as a probe's runs tell it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any, Final

import numpy as np

from trainfit.loader.calibration.fitting import Costs, costs_of, ratio
from trainfit.loader.calibration.probe_runs import Readings, mean
from trainfit.loader.measure.instrument import (
    BEGAN,
    CLOCK,
    DONE,
    PLACE,
    TOOK,
    WALL,
    WORKED,
    Records,
    collected,
)
from trainfit.loader.measure.run import Run
from trainfit.loader.model.load import Transfer

#: A collection that took at least so many seconds, and this part of what a batch was waited for
#: meanwhile, held it up.
_LEAST_PAUSE_S: Final = 5e-3
_HELD_UP: Final = 0.5


def transfer_of(readings: Readings, costs: Costs) -> Transfer:
    """Of a main thread that never sleeps."""
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
    """Of a main thread whose steps sleep."""
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
    """Of batches that come one at a time; alongside other processes it would be waits for cores."""
    if "turn" in readings.disturbed():
        return 0.0
    return mean([_turn_latency(run, costs) for run in readings.of("turn")])


def _turn_latency(run: Run, costs: Costs) -> Any:
    """Of a run with one batch at a time: what is neither its making nor its passing on."""
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
    """From a batch's making to its arrival, of those that the main thread waited for already
    when they were made."""
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
