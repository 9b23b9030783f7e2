"""What a loader's batches cost, found in a bounded number of short real runs.

The runs are interleaved: a machine's speed drifts within seconds, and what two kinds of runs
are compared for must not depend on when each was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from trainfit.loader.events import Cores
from trainfit.loader.fitting import (
    Costs,
    Fitted,
    alone_costs,
    batch_costs,
    costs_of,
    fit_contention,
    merged,
    ratio,
)
from trainfit.loader.instrument import CPU, WALL
from trainfit.loader.model import Consumer, HandOff, Outcome
from trainfit.loader.runs import Failure, Run, run_loader
from trainfit.loader.workload import Workload
from trainfit.results.loader import LoaderMachine, LoaderSettings, Probe

Progress = Callable[[str, float], None]
"""Gets what is being done, and the share of the time that is over."""

#: Seconds of a probe, by default.
SECONDS: Final = 20.0
#: Shares of a probe's time that one slice takes, and the least and the most seconds of one.
_SLICE: Final = 1 / 14
_LEAST_S, _MOST_S = 0.4, 4.0
#: Batches that a slice should see.
_BATCHES: Final = 12
#: A paced step is so many times what one worker takes for a batch, so that batches are ready.
_READY: Final = 1.5

#: One worker that is never waited for; two; one that makes a batch at a time; a step that
#: sleeps; batches pinned; none.
_ONE = LoaderSettings(1, 8)
_TWO = LoaderSettings(2, 4)
_TURN = LoaderSettings(1, 1)
_PACED = LoaderSettings(1, 4)
_PINNED = LoaderSettings(1, 8, pin_memory=True)
_ALONE = LoaderSettings(0)
#: What the runs are, in their order; what is compared comes three times.
_ORDER: Final = (
    *("one", "two", "turn", "paced", "one", "two", "alone"),
    *("pinned", "turn", "two", "one", "paced"),
)
_SETTINGS: Final = {
    "one": _ONE,
    "two": _TWO,
    "turn": _TURN,
    "paced": _PACED,
    "pinned": _PINNED,
    "alone": _ALONE,
}


@dataclass(frozen=True)
class Measured:
    """A probe's result, and what it takes to predict from it.

    ``fitted`` is ``None`` where no run came through; ``failures`` are those that did not.
    """

    probe: Probe
    fitted: Fitted | None
    failures: tuple[tuple[LoaderSettings, Failure], ...] = ()

    def predict(self, settings: LoaderSettings, consumer: Consumer) -> Outcome:
        """What the model says of these settings; ``ValueError`` where nothing was measured."""
        if self.fitted is None:
            raise ValueError("no run of the loader came through: nothing to predict from")
        return self.fitted.predict(settings, consumer)


@dataclass
class _Readings:
    """The runs so far, by what they are."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: list[tuple[LoaderSettings, Failure]] = field(default_factory=list)

    def of(self, *names: str) -> list[Run]:
        """The runs of these kinds that came through."""
        return [run for name in names for run in self.runs.get(name, ())]


def probe_workload(
    workload: Workload,
    machine: LoaderMachine,
    seconds: float = SECONDS,
    progress: Progress | None = None,
    start_method: str | None = None,
) -> Measured:
    """Measure for about so many seconds, and fit the model.

    Batches that take long make it longer: each kind of run happens once, whatever it takes.
    It never raises for what the data set does.
    """
    began = time.monotonic()
    readings = _Readings()
    for name in _series(readings, began, seconds):
        if progress is not None:
            share = (time.monotonic() - began) / seconds
            progress(_words(_SETTINGS[name]), min(1.0, share))
        _measure(workload, name, readings, seconds)
    cores = Cores(machine.core_speeds or (1.0,), machine.quota_cores)
    fitted = fit(readings, cores)
    probe = _probe(workload, readings, fitted, time.monotonic() - began)
    return Measured(probe, fitted, tuple(readings.failures))


def _series(readings: _Readings, began: float, seconds: float) -> Iterator[str]:
    """What to run next: each kind once, then again while there is time; no kind that failed."""
    met: set[str] = set()
    failed: set[str] = set()
    for name in _ORDER:
        late = time.monotonic() - began > seconds
        if name in failed or (late and name in met):
            continue
        count = len(readings.failures)
        yield name
        met.add(name)
        if len(readings.failures) > count:
            failed.add(name)


def _measure(workload: Workload, name: str, readings: _Readings, seconds: float) -> None:
    settings = _SETTINGS[name]
    consumer = Consumer(0.0)
    ones = readings.of("one", "two")
    if name == "paced":
        if not ones:
            return
        consumer = Consumer(_READY * _fetch_s(ones))
    length = _length(ones, seconds)
    with same_order():
        run = run_loader(
            workload, settings, consumer=consumer, seconds=length, limit_s=length + 2 * seconds
        )
    if run.failure is not None:
        readings.failures.append((settings, run.failure))
    if run.batches_per_s is not None:
        readings.runs.setdefault(name, []).append(run)


def _length(ones: Sequence[Run], seconds: float) -> float:
    """Of a slice: its share of the time, and long enough for some batches."""
    length = min(_MOST_S, max(_LEAST_S, _SLICE * seconds))
    if ones:
        length = min(max(length, _BATCHES * _fetch_s(ones)), max(length, seconds / 4))
    return length


@contextlib.contextmanager
def same_order() -> Iterator[None]:
    """Each run draws the same order of batches: what differs is the settings alone."""
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def _fetch_s(runs: Sequence[Run]) -> float:
    times = [run.fetched[:, WALL].mean() for run in runs if len(run.fetched)]
    return float(np.mean(times)) if times else 0.0


# --- Fitting ----------------------------------------------------------------------------------


def fit(readings: _Readings, cores: Cores) -> Fitted | None:
    """The model's constants from the runs; ``None`` where none came through."""
    alone = [cost for run in readings.of("alone") for cost in alone_costs(run)]
    costs = _common_costs(readings)
    if costs is None:
        if not alone:
            return None
        return Fitted(tuple(alone), tuple(alone), HandOff(), HandOff(), cores, 0.0)
    hand_off = _hand_off(readings, costs)
    fitted = Fitted(
        batch_costs(costs),
        tuple(alone),
        hand_off,
        _cold(readings, hand_off),
        cores,
        _start_s(readings) or 0.0,
    )
    rates = [run.batches_per_s for run in readings.of("two")]
    if not rates or len(cores.speeds) < 2:
        return fitted
    rate = statistics.fmean(rate for rate in rates if rate is not None)
    twos = [ratio(both.cpu_s, costs.cpu_s) for run in readings.of("two") if (both := costs_of(run))]
    cpu_ratio = statistics.fmean(twos) if twos else 1.0
    return fitted.with_contention(fit_contention(fitted, _TWO, rate, cpu_ratio))


def _common_costs(readings: _Readings) -> Costs | None:
    """What batches cost one worker that has the machine to itself."""
    ones = [costs for run in readings.of("one", "turn") if (costs := costs_of(run))]
    twos = [costs for run in readings.of("two") if (costs := costs_of(run))]
    if not ones:
        return merged(twos) if twos else None
    whole = merged([*ones, *twos])
    pace = statistics.fmean(ratio(costs.wall_s, whole.wall_s) for costs in ones)
    cpu_pace = statistics.fmean(ratio(costs.cpu_s, whole.cpu_s) for costs in ones)
    busy = [costs for run in readings.of("one") if (costs := costs_of(run))] or ones
    return Costs(
        whole.wall_s * pace,
        whole.cpu_s * cpu_pace,
        statistics.median(costs.gap_s for costs in busy),
        statistics.median(costs.send_s for costs in busy),
    )


def _hand_off(readings: _Readings, costs: Costs) -> HandOff:
    """Of a main thread that never sleeps."""
    ones = readings.of("one")
    receive = _mean([run.received[1:, 1] for run in readings.of("one", "two")])
    took = _mean([run.next_cpu[1:] for run in ones])
    waited = _mean([run.received[1:, 0] - run.received[1:, 1] for run in ones])
    idle = _mean([run.received[1:, 0] - run.received[1:, 1] for run in readings.of("paced")])
    latency = _mean([_turn_latency(run, costs) for run in readings.of("turn")])
    return HandOff(
        receive_s=receive,
        pin_s=_mean([run.pinned[1:, 1] for run in readings.of("pinned")]),
        next_s=max(0.0, took - receive),
        latency_s=latency,
        busy_wait_s=max(0.0, waited - idle),
        send_s=costs.send_s,
    )


def _cold(readings: _Readings, hot: HandOff) -> HandOff:
    """Of a main thread whose steps sleep."""
    paced = readings.of("paced")
    if not paced:
        return hot
    receive = _mean([run.received[1:, 1] for run in paced])
    took = _mean([run.next_cpu[1:] for run in paced])
    return dataclasses.replace(hot, receive_s=receive, next_s=max(0.0, took - receive))


def _turn_latency(run: Run, costs: Costs) -> Any:
    """Of each batch of a run with one batch at a time: what is neither its making nor the main
    thread's work."""
    made = run.fetches[0][:, WALL]
    count = min(len(made), len(run.handed)) - 1
    if count < 2:
        return np.zeros(0)
    periods = np.diff(run.handed)[:count]
    rest = periods - made[1 : count + 1] - costs.gap_s - run.next_cpu[1 : count + 1]
    # The median: a batch that was made slowly for another's sake is no latency.
    return np.maximum(0.0, np.median(rest, keepdims=True))


def _start_s(readings: _Readings) -> float | None:
    """Until one worker runs; workers are started one after the other."""
    times = []
    for run in readings.of("one", "two", "turn", "paced", "pinned"):
        last = max((at for at in run.started if at > 0), default=0.0)
        if last:
            times.append((last - run.began) / len(run.started))
    return statistics.median(times) if times else None


def _mean(parts: Sequence[Any]) -> float:
    """Of all values; 0 where there are none."""
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0


# --- The result -------------------------------------------------------------------------------


def _probe(workload: Workload, readings: _Readings, fitted: Fitted | None, seconds: float) -> Probe:
    runs = readings.of(*_SETTINGS)
    ones = readings.of("one")
    fetched = np.concatenate([run.fetched for run in ones]) if ones else np.zeros((0, 4))
    wall, cpu = fetched[:, WALL], fetched[:, CPU]
    alone = [run.fetched[:, WALL] for run in readings.of("alone")]
    rates = {name: _rate(readings.of(name)) for name in ("one", "two")}
    one, two = rates["one"], rates["two"]
    hand_off = fitted.hand_off if fitted is not None and ones else None
    busy = [run.received[1:, 0] for run in ones]
    start_s = _start_s(readings)
    private = [size for run in runs for size in run.private_bytes]
    sampler = workload.sampler_seconds
    return Probe(
        dataset=workload.name,
        kind=workload.kind,
        batch_size=workload.batch_size,
        samples=workload.samples,
        batch_bytes=max((run.batch_bytes for run in runs), default=0),
        batch_tensors=max((run.batch_tensors for run in runs), default=0),
        batches=sum(len(run.handed) for run in runs),
        fetch_s=float(wall.mean()) if len(wall) else None,
        fetch_cpu_s=float(cpu.mean()) if len(cpu) else None,
        variation=float(wall.std() / wall.mean()) if len(wall) > 1 else None,
        alone_s=_mean(alone) if alone else None,
        threads=float(np.maximum(1.0, cpu / wall).mean()) if len(wall) else None,
        receive_s=hand_off.receive_s if hand_off else None,
        receive_busy_s=_mean(busy) if ones else None,
        pin_s=hand_off.pin_s if hand_off and readings.of("pinned") else None,
        next_s=hand_off.next_s if hand_off else None,
        latency_s=hand_off.latency_s if hand_off and readings.of("turn") else None,
        sampler_s=statistics.fmean(sampler) if sampler else None,
        start_s={"fork": start_s} if start_s is not None else {},
        worker_private_bytes=int(statistics.median(private)) if private else None,
        scaling=two / one if one and two else None,
        contention=fitted.cores.contention if fitted is not None and two else None,
        seconds=seconds,
    )


def _rate(runs: Sequence[Run]) -> float | None:
    rates = [run.batches_per_s for run in runs if run.batches_per_s is not None]
    return statistics.fmean(rates) if rates else None


def _words(settings: LoaderSettings) -> str:
    count = settings.num_workers
    if count == 0:
        return "no workers"
    pinned = ", pinned" if settings.pin_memory else ""
    return f"{count} worker{'s' if count > 1 else ''}{pinned}"
