"""Corrects runs to the full speed of undisturbed cores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware.machine.core_speed import CoreSpeed, CoreSpeeds, Span, WorkPieces
from trainfit.loader.measure.loop import is_disturbed
from trainfit.loader.measure.records import (
    BEGAN,
    COLLECTED,
    COLUMNS,
    CORE,
    CPU,
    PROCESS_CPU,
    WALL,
    Records,
    Run,
    collected,
)

# ---
# Sensitivity of batch production to the speed of the cores.
#
# The watch's piece of work (:mod:`trainfit.hardware.machine.core_speed`) and a data set's code are
# not slowed alike: code that waits for memory is slowed less, code with more instructions at a time
# more. Each batch tells: what it took (CPU time), against how fast its core was meanwhile.


Values = NDArray[np.float64]
Columns = tuple[Values, Values, Values]
#: By which power of the cores' speed a loader's rate changes, where its own batches do not tell:
#: from 0.5 (video decoding) and 0.6 (JPEG, gzip) over 0.8 (memory-mapped arrays) to 1.1 (Python).
SENSITIVITY: Final = 0.8
_SPREAD: Final = 0.25
#: The same of Python's garbage collections, which wait for memory (docs/figures.md: 96 of them).
OF_COLLECTIONS: Final = 0.6
_LEAST, _MOST = 0.3, 1.6
#: The core's speed is taken from at least so long around a batch, in seconds (five pieces), and
#: from so many pieces.
_AROUND_S: Final = 0.1
LEAST_PIECES: Final = 4
#: Batches that each worker makes first, while it settles.
_FIRST: Final = 4
#: Of the batches' times, the share at either end that is drawn in: collections, interruptions.
_ODD: Final = 0.02
#: Standard deviation of the speed's logarithm that is there without any neighbour: what runs
#: between two pieces cools their caches. It says nothing of the neighbours' effect.
_COOL: Final = 0.015


def sensitivity(groups: Iterable[Sequence[Run]], pieces: WorkPieces) -> float:
    """The power of the cores' speed by which these runs' work changes.

    The runs of a group are of the same settings. The slope is of the logarithms of what batches
    took (CPU time) over those of their cores' speeds, drawn to :data:`SENSITIVITY` as far as
    they say little. A speed that is known by few pieces would make a slope too low: every other
    piece is one estimate, the others a second, and only what both say is speed (an instrumental
    variable).
    """
    seen = _BatchRates(*_joined([_seen(group, pieces) for group in groups]))
    certainty = 1 / _SPREAD**2
    slope, error = seen.slope()
    known = 1 / error**2 if error else 0.0
    drawn = (slope * known + SENSITIVITY * certainty) / (known + certainty)
    return float(min(_MOST, max(_LEAST, drawn)))


@dataclass(frozen=True)
class _BatchRates:
    """The logarithm of each batch's rate, and two estimates of that of its core's speed; each
    without the mean of its group."""

    rate: Values
    speed: Values
    again: Values

    def slope(self) -> tuple[float, float]:
        """The slope of the rates over the speeds, and its standard error; 0 and 0 where there is no
        data."""
        common = float(self.speed @ self.again)
        if len(self.rate) < 2 * _FIRST or common <= 0:
            return 0.0, 0.0
        speed = (self.speed + self.again) / 2
        slope = float(speed @ self.rate) / common
        spread = float(np.sum((self.rate - slope * speed) ** 2)) / len(self.rate)
        by_chance = spread * float(speed @ speed) / common**2
        return slope, float(np.sqrt(by_chance + _COOL**2 * len(self.rate) / common))


def _seen(group: Sequence[Run], pieces: WorkPieces) -> Columns:
    records = [fetch[_FIRST:] for run in group for fetch in run.fetches if _is_placed(fetch)]
    fetched = np.concatenate(records) if records else np.zeros((0, COLUMNS))
    cores = [float(core) for core in np.unique(pieces.core)]
    rate, speed, again = _joined(
        [_of_core(fetched[fetched[:, CORE] == core], pieces.of(core)) for core in cores]
    )
    if not len(rate):
        return rate, speed, again
    rate = np.clip(rate, *np.quantile(rate, (_ODD, 1 - _ODD)))
    return rate - rate.mean(), speed - speed.mean(), again - again.mean()


def _is_placed(records: Records) -> bool:
    return records.ndim == 2 and records.shape[1] > CORE


def _joined(parts: Sequence[Columns]) -> Columns:
    """Rates, speeds and the second speeds, each of all parts."""
    none = np.zeros(0), np.zeros(0), np.zeros(0)
    rate, speed, again = (np.concatenate(each) for each in zip(none, *parts, strict=True))
    return rate, speed, again


def around(fetched: Records, pieces: WorkPieces) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first piece of work near each of one core's batches, and the one after the last."""
    wider = np.maximum(0.0, _AROUND_S - fetched[:, WALL]) / 2
    first = np.searchsorted(pieces.at, fetched[:, BEGAN] - wider)
    last = np.searchsorted(pieces.at, fetched[:, BEGAN] + fetched[:, WALL] + wider)
    return first, last


def _of_core(fetched: Records, pieces: WorkPieces) -> Columns:
    """Logarithms of rates and speeds of the batches made on one core."""
    speeds = -np.log(pieces.took)
    first, last = around(fetched, pieces)
    # Collections come every so many batches, whatever the cores' speed.
    worked = fetched[:, CPU] - collected(fetched)
    told = (last - first >= LEAST_PIECES) & (worked > 0)
    first, last = first[told], last[told]
    even, odd = (
        _means(np.where(np.arange(len(speeds)) % 2 == side, speeds, np.nan), first, last)
        for side in (0, 1)
    )
    return -np.log(worked[told]), even, odd


def _means(values: Values, first: NDArray[np.intp], last: NDArray[np.intp]) -> Values:
    """Means of the values that are not nan, from each of ``first`` to before ``last``."""
    sums = np.concatenate([[0.0], np.nancumsum(values)])
    counts = np.concatenate([[0], np.cumsum(~np.isnan(values))])
    means: Values = (sums[last] - sums[first]) / (counts[last] - counts[first])
    return means


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
    """The time from begin to end of the batches that count."""
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
    """The share of the time of one worker's batches in which it works rather than waits."""
    wall = cpu = 0.0
    for run in runs:
        wall += float(run.fetched[:, WALL].sum())
        cpu += float(run.fetched[:, CPU].sum())
    return min(1.0, cpu / wall) if wall > 0 else 1.0


def quietest(runs: Sequence[Run]) -> list[Run]:
    """The runs with cores about as fast as in the fastest of them: what is to be brought to full
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
    """The speed of a run's cores, as a share of their full speed; full where nobody watched."""
    return run.core_speed.speed if run.core_speed is not None else 1.0


def _chance(run: Run) -> float:
    """The share by which the mean of a run's batches may be off, as they are only so many."""
    times = run.fetched[:, CPU] - collected(run.fetched)
    mean = float(times.mean()) if len(times) > 1 else 0.0
    return float(times.std()) / mean / math.sqrt(len(times)) if mean > 0 else 0.0


@dataclass(frozen=True)
class Slowing:
    """How slowed cores slow a loader.

    ``working`` is the share of a batch's time in which a worker works rather than waits,
    ``cores`` what the loader has of them, ``sensitivity`` as
    :func:`trainfit.loader.measure.noise_correction.sensitivity` says.
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
        """The same run at full speed, all of its times changed alike.

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
                self._with_local(fetch, records, pieces, mean)
                for fetch, records in zip(fetches, run.fetches, strict=True)
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
        batches = _scaled(records, [of_run.get(column, 1.0) for column in range(COLUMNS)])
        spent = collected(records)
        for column, factor in ((WALL, clock), (CPU, work)):
            batches[:, column] = (records[:, column] - spent) * factor + spent * pause
        batches[:, COLLECTED:] = (spent * pause)[:, None]
        return batches

    def _with_local(
        self, records: Records, as_run: Records, pieces: WorkPieces, mean: float
    ) -> Records:
        """The same records with a factor for each batch's work, as its core's speed was not that of
        the run's mean (pieces a nanosecond): a heavy batch may have met a slow second."""
        if as_run.ndim < 2 or as_run.shape[1] <= CORE:
            return records
        factors = np.ones(len(as_run))
        for core in np.unique(pieces.core):
            mine = np.flatnonzero(as_run[:, CORE] == core)
            of_core = pieces.of(core)
            first, last = around(as_run[mine], of_core)
            paces = np.concatenate([[0.0], np.cumsum(1 / of_core.took)])
            told = last - first >= LEAST_PIECES
            near = (paces[last[told]] - paces[first[told]]) / (last[told] - first[told])
            factors[mine[told]] = np.clip(near / mean, _LEAST_LOCAL, 1 / _LEAST_LOCAL)
        columns = records[:, :COLLECTED], collected(records), factors**self.sensitivity
        return np.column_stack(columns)

    def with_full_speed_rate(self, run: Run) -> Run:
        """The same run with the rate that it would have had at full speed, with the same step.

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
    """The share of garbage collections in the work for a run's batches."""
    worked = float(run.fetched[:, CPU].sum())
    return min(1.0, float(collected(run.fetched).sum()) / worked) if worked > 0 else 0.0


def _scaled(records: Records, factors: Sequence[float]) -> Records:
    """Columns times factors; of the columns that there are."""
    width = records.shape[1] if records.ndim == 2 else 0
    return records * list(factors)[:width] if width else records


# ---
# Time that workers waited for cores that other processes used.
#
# That is neither work nor waiting of a worker's own choice (for a disk, a lock, the network): where
# cores are free it does not happen. The kernel counts it for each thread.


def without_core_waits(run: Run) -> Run:
    """The same run, its workers' batches without their waits for a core; as it is where the kernel
    does not tell them.

    Each batch has its share by the time for which it had no core.
    """
    if len(run.core_waits_s) != len(run.fetches):
        return run
    pairs = zip(run.fetches, run.core_waits_s, strict=True)
    fetches = tuple(_without(records, waited) for records, waited in pairs)
    return dataclasses.replace(run, fetches=fetches, core_waits_s=(0.0,) * len(fetches))


def _without(records: Records, waited_s: float) -> Records:
    off = np.maximum(0.0, records[:, WALL] - records[:, CPU])
    total = float(off.sum())
    if total <= 0:
        return records
    less = off * min(1.0, waited_s / total)
    found = records.copy()
    found[:, WALL] -= less
    found[1:, BEGAN] -= np.cumsum(less)[:-1]  # what lies between two batches stays
    return found
