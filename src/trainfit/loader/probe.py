"""Measures the cost of a loader's batches in a bounded number of short real runs.

What these runs say of the loader in figures is below."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trainfit.hardware.machine.core_speed import CoreSpeeds, pieces_of
from trainfit.loader.measure.batch_profile import split
from trainfit.loader.measure.constants import fit
from trainfit.loader.measure.fitting import Fitted
from trainfit.loader.measure.loop import is_disturbed
from trainfit.loader.measure.machine_limits import model_cores
from trainfit.loader.measure.model import Outcome
from trainfit.loader.measure.noise_correction import Slowing, cores_speed
from trainfit.loader.measure.probe_runs import (
    HARMLESS,
    KINDS,
    LAST,
    LENGTHS,
    ORDER,
    RUN_NOISE,
    TITLES,
    Readings,
    SettingConstraints,
    fetch_s,
    mean,
    start_s,
)
from trainfit.loader.measure.processes import MeasurementProgress, NullProgress, captured_stderr
from trainfit.loader.measure.records import COLUMNS, CPU, TOOK, WALL, Run, collected
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.storage_cost import measure_storage
from trainfit.loader.measure.workload import Workload, worker_threads
from trainfit.loader.pickling import LARGE_BYTES, pickled
from trainfit.loader.preflight import check, check_workers, run_watched, same_order
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, Probe
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import count as count_of

# ---
# What a probe's runs say of a loader, in figures.


def probe_of(workload: Workload, readings: Readings, fitted: Fitted | None) -> Probe:
    """The probe's result, without what is looked at after its runs."""
    runs = readings.of(*KINDS)
    ones = readings.of("one")
    fetched = np.concatenate([run.fetched for run in ones]) if ones else np.zeros((0, COLUMNS))
    wall, cpu = fetched[:, WALL], fetched[:, CPU]
    alone = [run.fetched[:, WALL] for run in readings.of("alone")]
    one, two = readings.rate("one"), readings.rate("two")
    transfer = fitted.transfer if fitted is not None and ones else None
    busy = [run.received[run.warm :, TOOK] for run in ones]
    start = start_s(readings)
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
        alone_s=mean(alone) if alone else None,
        threads=float(np.maximum(1.0, cpu / wall).mean()) if len(wall) else None,
        receive_s=transfer.receive_s if transfer else None,
        receive_busy_s=mean(busy) if ones else None,
        pin_s=transfer.pin_s if transfer and readings.of("pinned") else None,
        next_s=transfer.next_s if transfer else None,
        latency_s=transfer.latency_s if transfer and readings.of("turn") else None,
        sampler_s=statistics.fmean(sampler) if sampler else None,
        start_s={ones[0].settings.start_method: start} if ones and start else {},
        worker_private_bytes=int(statistics.median(private)) if private else None,
        scaling=two / one if one and two else None,
        contention=fitted.cores.contention if fitted is not None and two else None,
        core_speed=_mean_told(run.core_speed.speed if run.core_speed else None for run in runs),
        others_cores=_mean_told(run.others_cores for run in runs),
        disturbed={TITLES[name]: cores for name, cores in readings.disturbed().items()},
        collecting=_collecting(runs),
        core_wait_s=_core_wait_s(ones, float(wall.mean())) if len(wall) else None,
    )


def _core_wait_s(runs: Sequence[Run], fetch_s: float) -> float | None:
    """Seconds that a fetch of ``fetch_s`` waited for a core, by what the workers of whole runs
    did."""
    told = [run for run in runs if run.core_waits_s]
    worked = sum(float(records[:, WALL].sum()) for run in told for records in run.fetches)
    waited = sum(sum(run.core_waits_s) for run in told)
    return fetch_s * min(1.0, waited / worked) if worked > 0 else None


def _collecting(runs: Sequence[Run]) -> float | None:
    """The share of garbage collections in the workers' CPU time for batches."""
    records = [fetch for run in runs if run.settings.num_workers for fetch in run.fetches]
    spent = sum(float(collected(record).sum()) for record in records)
    worked = sum(float(record[:, CPU].sum()) for record in records)
    return min(1.0, spent / worked) if worked > 0 else None


def _mean_told(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; ``None`` without any."""
    seen = [value for value in values if value is not None]
    return statistics.fmean(seen) if seen else None


#: Seconds of a probe, by default.
SECONDS: Final = 20.0
#: Of a probe's time, what the runs of the series take; the rest is for what follows them.
_SERIES: Final = 0.7
#: Of that, what one slice takes at most; the least and the most seconds of one.
_SLICE: Final = 1 / 15
#: Of that, what is left for the runs without workers.
_ALONE: Final = 0.2
#: Runs on cores below this share of the speed in the probe's fastest run, or alongside other
#: processes, are made again while there is time, up to so many of one kind. Where all cores are
#: slow alike, once more of every kind says more.
_QUIET: Final = 0.9
_MOST_TRIES: Final = 4
#: By how much longer the series may take for them.
_LONGER: Final = 1.3
_LEAST_S, _MOST_S = 0.4, 4.0
#: Of a probe's time, what the look at the call tree takes, storage, and other start methods.
_SPLIT, _STORAGE, _STARTS = 0.08, 0.1, 0.1
#: Seconds that a worker takes that is not forked, and imports PyTorch.
_START_S: Final = 6.0
#: Tries of one kind of run: as it is, and with what two faults leave.
_ATTEMPTS: Final = 3
#: Seconds until a batch is given up that is only made to see threads, at least: next to ten busy
#: processes one of some milliseconds was measured to need over 2.
_POOLS_S: Final = 5.0
#: Seconds that one check before any run may take.
_CHECK_S: Final = 3.0
#: Seconds that one try of other means may take where a worker failed.
_TRY_S: Final = 10.0
#: Of a probe's time, what is spent at most before a first run has come through.
_GIVE_UP: Final = 3.0
#: Kinds of runs without which little can be predicted: what batches cost a worker, two of them, and
#: the process itself.
_NEEDED: Final = ("one", "two", "alone")
#: Batches that a slice should see.
_BATCHES: Final = 12


@dataclass(frozen=True)
class Measured:
    """A probe's result, and what it takes to predict from it.

    ``fitted`` is ``None`` where no run came through; ``bounds`` is what the faults leave.
    ``slowing`` is how slowed cores slow the loader, ``noise`` the standard deviation of the
    logarithm of the rates of runs of the same settings. ``stays_busy``: other processes disturbed
    it to its end, and no measurement is worth its time.
    """

    probe: Probe
    fitted: Fitted | None
    bounds: SettingConstraints = field(default_factory=SettingConstraints)
    slowing: Slowing = field(default_factory=lambda: Slowing(1.0, 1.0))
    noise: float = RUN_NOISE
    stays_busy: bool = False

    def predict(
        self, settings: LoaderSettings, consumer: Consumer, seconds: float | None = None
    ) -> Outcome:
        """What the model says of these settings; ``ValueError`` where nothing was measured.

        With ``seconds``, of a run that lasts so long: of the batches that it gets to, where
        they vary, not of all that were seen. Workers' garbage collections are as many as in the
        long run: a short one meets one more or less, by what the process had counted before.
        """
        if self.fitted is None:
            raise ValueError("every run of the loader failed: nothing to predict from")
        outcome = self.fitted.predict(settings, consumer)
        if seconds is None or not math.isfinite(outcome.batches_per_s):
            return outcome
        counted = max(_BATCHES, round(seconds * outcome.batches_per_s))
        first = outcome.warm + 1
        if settings.num_workers and self.fitted.pauses.mean:
            met = itertools.islice(itertools.cycle(self.fitted.costs), first, first + counted)
            same = dataclasses.replace(self.fitted, costs=tuple(met))
            return same.predict(settings, consumer)
        return self.fitted.predict(settings, consumer, first + counted)


def probe_workload(
    workload: Workload,
    machine: LoaderMachine,
    seconds: float,
    progress: MeasurementProgress | None = None,
    watch: CoreSpeeds | None = None,
    *,
    known: Probe | None = None,
    kinds: Sequence[str] = KINDS,
) -> Measured:
    """Measure for about so many seconds, and fit the model.

    What was measured while something from outside slowed the cores is brought to their full
    speed; ``watch`` is who watches that, if somebody does already. ``known`` is a probe of the
    same data set: what it is made of, its storage and how workers start are taken from there.
    ``kinds`` are those of the runs to make (:mod:`trainfit.loader.measure.probe_runs`).

    Batches that take long make it longer: each kind of run happens once, whatever it takes.
    Where a run fails, the fault is named and what it leaves is tried. It never raises for what
    the data set does.
    """
    if watch is None:
        with CoreSpeeds() as watch:
            return probe_workload(
                workload, machine, seconds, progress, watch, known=known, kinds=kinds
            )
    began = time.monotonic()
    progress = progress or NullProgress()
    readings = Readings(machine)
    progress("checks before any run", 0.0)
    if known is None:
        readings.faults += check(workload, limit_s=min(_CHECK_S, seconds / 8))
    for name in _series(readings, began, _SERIES * seconds, watch, kinds):
        share = (time.monotonic() - began) / seconds
        progress(_words(readings.settings(name)), min(_SERIES, share))
        _measure(workload, name, readings, seconds, machine)
    readings = readings.with_speeds(watch)
    slowing = readings.slowing(watch)
    readings = readings.at_full_speed(slowing, pieces_of(watch))
    fitted = fit(readings, model_cores(machine, 0.0))
    probe = probe_of(workload, readings, fitted)
    if known is not None:
        probe = dataclasses.replace(
            probe, parts=known.parts, storage=known.storage, start_s=known.start_s
        )
    elif fitted is not None:
        progress("profile of a batch's time", _SERIES)
        probe = _with_parts(probe, workload, seconds, machine)
        progress("other start methods for workers", 1 - _STARTS)
        probe = _with_starts(probe, workload, readings, seconds - (time.monotonic() - began))
    probe = dataclasses.replace(
        probe, faults=tuple(readings.faults), seconds=time.monotonic() - began
    )
    noise, busy = readings.run_noise(), readings.stays_busy
    return Measured(probe, fitted, readings.bounds, slowing, noise, busy)


def _series(
    readings: Readings,
    began: float,
    seconds: float,
    watch: CoreSpeeds,
    wanted: Sequence[str] = KINDS,
) -> Iterator[str]:
    """What of the ``wanted`` kinds to run next: each kind once, then again while there is time; no
    kind that failed.

    What was only run on slowed cores, or alongside other processes, goes first, and is given more
    time. Once the machine stays busy, nothing is run but what the least prediction needs.
    """
    failed: set[str] = set()

    def tried(name: str) -> Iterator[str]:
        count = len(readings.of(name))
        yield name
        if len(readings.of(name)) == count:
            failed.add(name)

    for kinds, share in ((ORDER, 1 - _ALONE), (LAST, 1.0)):
        chosen = [name for name in kinds if name in wanted]
        left = list(chosen)
        while left:
            late = time.monotonic() - began
            if late > _GIVE_UP * seconds and not readings.runs:
                return
            fresh = [name for name in left if name not in readings.runs and name not in failed]
            if readings.stays_busy:
                left = fresh = [name for name in fresh if name in _NEEDED]
                if not fresh:
                    break
            again = None if fresh else _disturbed(readings, chosen, failed, watch)
            limit = share * seconds * (_LONGER if again else 1.0)
            if late > limit and not fresh:
                break
            if again:
                yield from tried(again)
                continue
            name = left.pop(0)
            if name not in failed and (late <= share * seconds or name in fresh):
                yield from tried(name)


def _disturbed(
    readings: Readings, kinds: Sequence[str], failed: Set[str], watch: CoreSpeeds
) -> str | None:
    """The least often run of these kinds of which all runs were disturbed; ``None`` where there is
    none."""
    seen = readings.with_speeds(watch)
    fastest = max(map(cores_speed, seen.of(*seen.runs)), default=1.0)
    found = []
    for name in dict.fromkeys(kinds):
        runs = [] if name in failed else seen.of(name)
        quiet = (
            cores_speed(run) >= _QUIET * fastest and not is_disturbed(run.others_cores)
            for run in runs
        )
        if 0 < len(runs) < _MOST_TRIES and not any(quiet):
            found.append((len(runs), name))
    return min(found)[1] if found else None


def _measure(
    workload: Workload, name: str, readings: Readings, seconds: float, machine: LoaderMachine
) -> None:
    """One run of this kind; where it fails, once more with what the fault leaves."""
    step_s = readings.step_s(name)
    if step_s is None:
        return
    length = _length(readings, name, _SERIES * seconds)
    for _ in range(_ATTEMPTS):
        wanted = readings.settings(name)
        settings = readings.bounds.nearest(wanted) if wanted is not None else None
        if settings is None or wanted is None or settings.num_workers != wanted.num_workers:
            return
        run, fault = run_watched(
            workload,
            settings,
            Consumer(step_s),
            length,
            patience_s=2 * seconds,
            batch_s=fetch_s(readings.of("one")),
            alone_s=fetch_s(readings.of("alone")) or None,
            machine=machine,
        )
        if fault is None or run.batches_per_s is not None:
            readings.runs.setdefault(name, []).append(run)
        if fault is None:
            return
        if name == "one" and fault.kind not in HARMLESS:
            # What works instead: no workers, other start methods?
            found = check_workers(workload, settings, limit_s=min(_TRY_S, seconds))
            readings.faults += found or (fault,)
        else:
            readings.faults.append(fault)
        if fault.kind in HARMLESS:  # once more would only take as long
            return


def _length(readings: Readings, name: str, seconds: float) -> float:
    """Seconds of a slice: its share of the time, and long enough for some batches."""
    share, batch_s = LENGTHS.get(name, 1.0), fetch_s(readings.of("one"))
    length = min(_MOST_S, max(_LEAST_S, share * _SLICE * seconds))
    return min(max(length, share * _BATCHES * batch_s), max(length, seconds / 4))


def _with_parts(probe: Probe, workload: Workload, seconds: float, machine: LoaderMachine) -> Probe:
    """The same probe with what batches are spent in, cold storage, and threads of libraries."""
    with same_order(workload):
        parts = split(workload, _SPLIT * seconds)
        storage = measure_storage(workload, _STORAGE * seconds, machine.available_bytes)
        threads = worker_threads(workload, max(_POOLS_S, seconds / 4))
    return dataclasses.replace(
        probe,
        parts=parts,
        storage=storage,
        thread_pools=threads.pools,
        started_threads=threads.started,
        used_pools=threads.used,
    )


def _is_small(workload: Workload) -> bool:
    """Can a worker that is not forked be sent the data set without ado?"""
    nbytes = pickled(workload, _CHECK_S).nbytes
    return nbytes is not None and nbytes < LARGE_BYTES


def _with_starts(probe: Probe, workload: Workload, readings: Readings, left_s: float) -> Probe:
    """The same probe with the start times of workers that are not forked, where the script wants
    that or it is known to work; a start method that needs more time than is left is left out."""
    starts = dict(probe.start_s)
    small = functools.cache(lambda: _is_small(workload))  # asked at most once, if at all
    for method in ("forkserver", "spawn"):
        wanted = workload.present.start_method == method
        if method in starts or not (wanted or left_s > _START_S):
            continue
        settings = LoaderSettings(1, start_method=method)
        if not readings.bounds.allows(settings) or not (wanted or small()):
            continue
        began = time.monotonic()
        limit_s = max(left_s, 4 * _START_S) if wanted else left_s
        with same_order(workload), captured_stderr():
            run = run_loader(workload, settings, seconds=_LEAST_S, limit_s=limit_s, most_batches=1)
        if run.failure is None and run.started and run.started[0]:
            starts[method] = run.started[0] - run.began
        left_s -= time.monotonic() - began
    return dataclasses.replace(probe, start_s=starts)


def _words(settings: LoaderSettings | None) -> str:
    count = settings.num_workers if settings is not None else 0
    if count == 0:
        return "no workers"
    pinned = ", pinned" if settings is not None and settings.pin_memory else ""
    return f"{count_of(count, 'worker')}{pinned}"
