"""What a loader's batches cost, found in a bounded number of short real runs.

The runs are interleaved: a machine's speed drifts within seconds, and what two kinds of runs
are compared for must not depend on when each was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from trainfit.loader.bounds import Bounds, bounds
from trainfit.loader.events import Cores
from trainfit.loader.fault_checks import check
from trainfit.loader.faults import diagnose_run
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
from trainfit.loader.machine import model_cores
from trainfit.loader.model import Consumer, HandOff, Outcome
from trainfit.loader.oom import between, oom_kills
from trainfit.loader.output import captured_stderr
from trainfit.loader.pools import thread_pools
from trainfit.loader.progress import Progress, Silent
from trainfit.loader.runs import Run, run_loader
from trainfit.loader.seen import Seen
from trainfit.loader.split import split
from trainfit.loader.storage import measure_storage
from trainfit.loader.workload import Workload
from trainfit.results.loader import Fault, LoaderMachine, LoaderSettings, Probe

#: Seconds of a probe, by default.
SECONDS: Final = 20.0
#: Of a probe's time, what the runs of the series take; the rest is for what follows them.
_SERIES: Final = 0.75
#: Of that, what one slice takes; the least and the most seconds of one.
_SLICE: Final = 1 / 14
_LEAST_S, _MOST_S = 0.4, 4.0
#: Of a probe's time, what the look at the call tree takes, storage, and other start methods.
_SPLIT, _STORAGE, _STARTS = 0.08, 0.1, 0.1
#: Seconds that a worker takes that is not forked, and imports PyTorch.
_START_S: Final = 6.0
#: Tries of one kind of run: as it is, and with what two faults leave.
_ATTEMPTS: Final = 3
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

    ``fitted`` is ``None`` where no run came through; ``bounds`` is what the faults leave.
    """

    probe: Probe
    fitted: Fitted | None
    bounds: Bounds = field(default_factory=Bounds)

    def predict(self, settings: LoaderSettings, consumer: Consumer) -> Outcome:
        """What the model says of these settings; ``ValueError`` where nothing was measured."""
        if self.fitted is None:
            raise ValueError("no run of the loader came through: nothing to predict from")
        return self.fitted.predict(settings, consumer)


@dataclass
class _Readings:
    """The runs so far, by what they are, and what went wrong."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def of(self, *names: str) -> list[Run]:
        """The runs of these kinds that came through."""
        return [run for name in names for run in self.runs.get(name, ())]

    @property
    def bounds(self) -> Bounds:
        return bounds(self.faults)


def probe_workload(
    workload: Workload,
    machine: LoaderMachine,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Measured:
    """Measure for about so many seconds, and fit the model.

    Batches that take long make it longer: each kind of run happens once, whatever it takes.
    Where a run fails, the fault is named and what it leaves is tried. It never raises for what
    the data set does.
    """
    began = time.monotonic()
    progress = progress or Silent()
    readings = _Readings()
    progress("checks before any run", 0.0)
    readings.faults += check(workload, limit_s=seconds / 2)
    for name in _series(readings, began, _SERIES * seconds):
        share = (time.monotonic() - began) / seconds
        progress(_words(_SETTINGS[name]), min(_SERIES, share))
        _measure(workload, name, readings, seconds, machine)
    fitted = fit(readings, model_cores(machine, 0.0))
    probe = _probe(workload, readings, fitted)
    if fitted is not None:
        progress("what a batch's time is spent in", _SERIES)
        probe = _with_parts(probe, workload, seconds, machine)
        progress("starting workers by other means", 1 - _STARTS)
        probe = _with_starts(probe, workload, readings, seconds - (time.monotonic() - began))
    probe = dataclasses.replace(
        probe, faults=tuple(readings.faults), seconds=time.monotonic() - began
    )
    return Measured(probe, fitted, readings.bounds)


def _series(readings: _Readings, began: float, seconds: float) -> Iterator[str]:
    """What to run next: each kind once, then again while there is time; no kind that failed."""
    met: set[str] = set()
    failed: set[str] = set()
    for name in _ORDER:
        late = time.monotonic() - began > seconds
        if name in failed or (late and name in met):
            continue
        count = len(readings.of(name))
        yield name
        met.add(name)
        if len(readings.of(name)) == count:
            failed.add(name)


def _measure(
    workload: Workload, name: str, readings: _Readings, seconds: float, machine: LoaderMachine
) -> None:
    """One run of this kind; where it fails, once more with what the fault leaves."""
    ones = readings.of("one", "two")
    consumer = Consumer(_READY * _fetch_s(ones) if name == "paced" else 0.0)
    if name == "paced" and not ones:
        return
    length = _length(ones, _SERIES * seconds)
    for _ in range(_ATTEMPTS):
        settings = readings.bounds.nearest(_SETTINGS[name])
        if settings is None or settings.num_workers != _SETTINGS[name].num_workers:
            return
        run, fault = run_watched(
            workload,
            settings,
            consumer,
            length,
            limit_s=length + 2 * seconds,
            alone_s=_fetch_s(readings.of("alone")) or None,
            machine=machine,
        )
        if fault is None or run.batches_per_s is not None:
            readings.runs.setdefault(name, []).append(run)
        if fault is None:
            return
        readings.faults.append(fault)


def run_watched(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    seconds: float,
    limit_s: float,
    *,
    alone_s: float | None = None,
    machine: LoaderMachine | None = None,
) -> tuple[Run, Fault | None]:
    """One real run, with what is needed to name its fault if it fails.

    Each run draws the same order of batches: what differs between runs is the settings alone.
    """
    before = oom_kills()
    with same_order(), captured_stderr() as output:
        run = run_loader(workload, settings, consumer=consumer, seconds=seconds, limit_s=limit_s)
    if run.failure is None and run.batches_per_s is not None:
        return run, None
    seen = Seen.of(
        run,
        limit_s=limit_s,
        alone_s=alone_s,
        shm_free_bytes=machine.shm_free_bytes if machine is not None else None,
        open_files=machine.open_files if machine is not None else None,
        oom_kills=between(before, oom_kills()),
        output=output.text,
    )
    return run, diagnose_run(run, workload, seen)


def _length(ones: Sequence[Run], seconds: float) -> float:
    """Of a slice: its share of the time, and long enough for some batches."""
    length = min(_MOST_S, max(_LEAST_S, _SLICE * seconds))
    if ones:
        length = min(max(length, _BATCHES * _fetch_s(ones)), max(length, seconds / 4))
    return length


@contextlib.contextmanager
def same_order() -> Iterator[None]:
    """Leave PyTorch's random numbers as they are: the next run draws the same order."""
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


def _probe(workload: Workload, readings: _Readings, fitted: Fitted | None) -> Probe:
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
        float_bytes=max((run.float_bytes for run in runs), default=None),
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
        start_s={ones[0].settings.start_method: start_s} if ones and start_s else {},
        worker_private_bytes=int(statistics.median(private)) if private else None,
        scaling=two / one if one and two else None,
        contention=fitted.cores.contention if fitted is not None and two else None,
    )


def _with_parts(probe: Probe, workload: Workload, seconds: float, machine: LoaderMachine) -> Probe:
    """With what batches are spent in, cold storage, and threads of libraries."""
    with same_order():
        parts = split(workload, _SPLIT * seconds)
        storage = measure_storage(workload, _STORAGE * seconds, machine.available_bytes)
        pools = thread_pools(workload, seconds / 4)
    return dataclasses.replace(probe, parts=parts, storage=storage, thread_pools=pools)


def _with_starts(probe: Probe, workload: Workload, readings: _Readings, left_s: float) -> Probe:
    """With what workers take that are not forked, where the script wants that or it is known
    to work; a start method that takes longer than there is time is left out."""
    starts = dict(probe.start_s)
    for method in ("forkserver", "spawn"):
        wanted = workload.present.start_method == method
        if method in starts or not (wanted or left_s > _START_S):
            continue
        settings = dataclasses.replace(_ONE, start_method=method)
        if not readings.bounds.allows(settings):
            continue
        began = time.monotonic()
        limit_s = max(left_s, 4 * _START_S) if wanted else left_s
        with same_order(), captured_stderr():
            run = run_loader(workload, settings, seconds=_LEAST_S, limit_s=limit_s, most_batches=1)
        if run.failure is None and run.started and run.started[0]:
            starts[method] = run.started[0] - run.began
        left_s -= time.monotonic() - began
    return dataclasses.replace(probe, start_s=starts)


def _rate(runs: Sequence[Run]) -> float | None:
    rates = [run.batches_per_s for run in runs if run.batches_per_s is not None]
    return statistics.fmean(rates) if rates else None


def _words(settings: LoaderSettings) -> str:
    count = settings.num_workers
    if count == 0:
        return "no workers"
    pinned = ", pinned" if settings.pin_memory else ""
    return f"{count} worker{'s' if count > 1 else ''}{pinned}"
