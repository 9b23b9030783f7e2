"""Corrects runs to the full speed of undisturbed cores.

Other virtual machines on the same processor slow ours by up to 1.7 times, from one second to
the next. What is compared (kinds of runs, predictions and runs) is therefore brought to the
cores' full speed, which :mod:`trainfit.hardware.cpu.core_speed` watches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainfit.hardware.cpu.core_speed import CoreSpeed, CoreSpeeds, Span, WorkPieces
from trainfit.loader.calibration.sensitivity import (
    LEAST_PIECES,
    OF_COLLECTIONS,
    SENSITIVITY,
    around,
)
from trainfit.loader.measure.instrument import (
    BEGAN,
    COLLECTED,
    COLUMNS,
    CORE,
    CPU,
    PROCESS_CPU,
    WALL,
    Records,
    collected,
)
from trainfit.loader.measure.run import Run
from trainfit.loader.processes.other_processes import is_disturbed

#: Of the cores, the share that is busy before they begin to bound the rate, and when they do.
_BINDING, _BOUND = 0.75, 0.95
#: Of runs of one kind, those count whose cores were as fast as the fastest's, but for this.
_AS_FAST: Final = 0.07
#: What is not known of a slowed loader: by so much of the lost speed its rate may be off, brought
#: to full speed (the spread of the sensitivity).
_UNSURE: Final = 0.2
#: Cores that several virtual machines share differ by up to so much from one second to another.
_LEAST_LOCAL: Final = 0.5


def span(run: Run) -> Span:
    """Of the batches that count."""
    if not run.counted:
        return (run.began, run.began)
    return float(run.handed[run.warm]), float(run.handed[-1])


def with_speeds(runs: Sequence[Run], watch: CoreSpeeds | WorkPieces) -> list[Run]:
    """The same runs with the cores' speed in each."""
    speeds = watch.speeds([span(run) for run in runs])
    return [
        dataclasses.replace(run, core_speed=speed) for run, speed in zip(runs, speeds, strict=True)
    ]


def working_share(runs: Iterable[Run]) -> float:
    """Of what one worker's batches take, the share in which it works rather than waits."""
    wall = cpu = 0.0
    for run in runs:
        wall += float(run.fetched[:, WALL].sum())
        cpu += float(run.fetched[:, CPU].sum())
    return min(1.0, cpu / wall) if wall > 0 else 1.0


def quietest(runs: Sequence[Run]) -> list[Run]:
    """Those with the cores about as fast as in the fastest of them: what is to be brought to full
    speed by little is known best. Where batches differ so much that chance says more than the
    cores' speed does, more runs count.

    Runs alongside other processes do not count if there are runs without.

    Without the very first, if others are left: a system that has idled gets faster as well
    (memory that the host of a virtual machine took back, page caches).
    """
    if not runs:
        return []
    first = runs[0]
    runs = [run for run in runs if not is_disturbed(run.others_cores)] or runs
    speeds = list(map(cores_speed, runs))
    fastest = max(range(len(runs)), key=lambda at: speeds[at])
    least = speeds[fastest] - max(_AS_FAST, _chance(runs[fastest]) / _UNSURE)
    quiet = [run for run, speed in zip(runs, speeds, strict=True) if speed >= least]
    return quiet[1:] if len(quiet) > 1 and quiet[0] is first else quiet


def cores_speed(run: Run) -> float:
    """Of a run's cores, as a share of their full speed; full where nobody watched."""
    return run.core_speed.speed if run.core_speed is not None else 1.0


def _chance(run: Run) -> float:
    """By what share the mean of a run's batches may be off, as they are only so many."""
    times = run.fetched[:, CPU] - collected(run.fetched)
    mean = float(times.mean()) if len(times) > 1 else 0.0
    return float(times.std()) / mean / math.sqrt(len(times)) if mean > 0 else 0.0


@dataclass(frozen=True)
class Slowing:
    """How slowed cores slow a loader.

    ``working`` is the share of a batch's time in which a worker works rather than waits,
    ``cores`` what the loader has of them, ``sensitivity`` as
    :func:`trainfit.loader.calibration.sensitivity.sensitivity` says.
    """

    working: float
    cores: float
    sensitivity: float = SENSITIVITY

    def slower(self, speed: CoreSpeed | None, collecting: float = 0.0) -> tuple[float, float]:
        """What times are to be multiplied by: CPU times, and those on the clock.

        Of the clock's, what a worker waits for (a disk, the network) takes as long at any speed,
        unless the cores are all busy and bound the rate themselves. ``collecting`` is the share
        of garbage collections in the work.
        """
        if speed is None:
            return 1.0, 1.0
        factor = (1 - collecting) * speed.speed**self.sensitivity
        factor += collecting * speed.speed**OF_COLLECTIONS
        busy = speed.busy_cores / self.cores
        bound = max(self.working, min(1.0, max(0.0, (busy - _BINDING) / (_BOUND - _BINDING))))
        return factor, 1 - (1 - factor) * bound

    def undisturbed(self, run: Run, pieces: WorkPieces | None = None) -> Run:
        """The same run in the time that it would have taken, all of its times changed alike.

        Also those of steps that sleep: it is a run with a shorter step then. By ``pieces`` each
        batch's record also says by how much its core was slower or faster than on average.
        """
        cpu, wall = self.slower(run.core_speed, _collecting(run))
        if wall == cpu == 1.0:
            return run
        fetches = tuple(self._batches(records, run, cpu, wall) for records in run.fetches)
        mean = pieces.pace(span(run)) if pieces is not None else None
        if pieces is not None and mean:
            fetches = tuple(
                self._with_local(found, records, pieces, mean)
                for found, records in zip(fetches, run.fetches, strict=True)
            )
        return dataclasses.replace(
            run,
            fetches=fetches,
            next_cpu=run.next_cpu * cpu,
            began=run.began * wall,
            handed=run.handed * wall,
            waited=run.waited * wall,
            steps=run.steps * wall,
            received=_scaled(run.received, (wall, cpu, cpu, wall, 1.0)),
            pinned=_scaled(run.pinned, (wall, cpu, cpu, wall, 1.0)),
            started=tuple(at * wall for at in run.started),
            core_waits_s=tuple(waited * wall for waited in run.core_waits_s),
        )

    def _batches(self, records: Records, run: Run, cpu: float, wall: float) -> Records:
        """Times of batches without their collections, and those, each by its own."""
        of_run = {BEGAN: wall, PROCESS_CPU: cpu, CORE: 1.0}
        work, clock = self.slower(run.core_speed)
        pause, _ = self.slower(run.core_speed, 1.0)
        found = _scaled(records, [of_run.get(column, 1.0) for column in range(COLUMNS)])
        spent = collected(records)
        for column, factor in ((WALL, clock), (CPU, work)):
            found[:, column] = (records[:, column] - spent) * factor + spent * pause
        found[:, COLLECTED:] = (spent * pause)[:, None]
        return found

    def _with_local(
        self, found: Records, as_run: Records, pieces: WorkPieces, mean: float
    ) -> Records:
        """With what each batch's work is to be multiplied by, as its core's speed was not that of
        the run's mean (pieces a nanosecond): a heavy batch may have met a slow second."""
        if as_run.ndim < 2 or as_run.shape[1] <= CORE:
            return found
        factors = np.ones(len(as_run))
        for core in np.unique(pieces.core):
            mine = np.flatnonzero(as_run[:, CORE] == core)
            of_core = pieces.of(core)
            first, last = around(as_run[mine], of_core)
            paces = np.concatenate([[0.0], np.cumsum(1 / of_core.took)])
            told = last - first >= LEAST_PIECES
            near = (paces[last[told]] - paces[first[told]]) / (last[told] - first[told])
            factors[mine[told]] = np.clip(near / mean, _LEAST_LOCAL, 1 / _LEAST_LOCAL)
        columns = found[:, :COLLECTED], collected(found), factors**self.sensitivity
        return np.column_stack(columns)

    def with_full_speed_rate(self, run: Run) -> Run:
        """The same with the rate that it would have had at full speed, with the same step.

        A loader that the consumer never waited for would not have been faster; without workers
        the step and the loader take turns.
        """
        rate = run.batches_per_s
        if rate is None:
            return run
        _, wall = self.slower(run.core_speed, _collecting(run))
        step_s = float(run.steps[run.warm :].mean()) if len(run.steps) > run.warm else 0.0
        took = 1 / rate
        if run.settings.num_workers:
            period = max(step_s, wall * took)
        else:
            period = step_s + wall * max(0.0, took - step_s)
        return dataclasses.replace(run, full_speed_batches_per_s=1 / min(took, period))


def _collecting(run: Run) -> float:
    """Of the work for its batches, what garbage collections were."""
    worked = float(run.fetched[:, CPU].sum())
    return min(1.0, float(collected(run.fetched).sum()) / worked) if worked > 0 else 0.0


def _scaled(records: Records, factors: Sequence[float]) -> Records:
    """Columns times factors; of the columns that there are."""
    width = records.shape[1] if records.ndim == 2 else 0
    return records * list(factors)[:width] if width else records
