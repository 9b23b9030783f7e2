"""The real runs that a probe makes, and the settings left to try after a fault."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from trainfit.hardware.machine.core_speed import CoreSpeeds, WorkPieces, pieces_of
from trainfit.loader.measure.loop import is_disturbed, stays_busy
from trainfit.loader.measure.noise_correction import (
    Slowing,
    quietest,
    sensitivity,
    with_speeds,
    without_core_waits,
    working_share,
)
from trainfit.loader.measure.records import WALL, Run
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, StartMethod
from trainfit.results.findings import Finding
from trainfit.torch_private.data_loading import default_start

# ---
# Settings that remain possible after a fault, for the tuner to try.


#: The order in which another start method is tried: forkserver starts faster than spawn.
START_METHODS: Final[tuple[StartMethod, ...]] = ("fork", "forkserver", "spawn")

#: Faults that come with the memory or the files of all workers together: half of them next.
_TOO_MUCH_MEMORY: Final = ("worker_killed", "process_killed", "out_of_memory")
_TOO_MANY_BATCHES: Final = ("shm_full", "open_files")
#: Faults of a start method; another may do.
_OF_START: Final = (
    "deadlock",
    "hung",
    "handle_before_fork",
    "cuda_in_worker",
    "worker_crashed",
    "process_crashed",
    "worker_exited",
    "died",
)
#: Faults of the data, whoever makes the batches.
_OF_DATA: Final = ("collate", "no_batches")
_ONLY_FORK: Final = (
    *("not_picklable", "shared_handle", "no_main_guard", "not_importable", "spawn_start"),
)
#: Faults by which workers give other samples than the main process, or each of them all. A run does
#: not show it.
UNSAFE: Final = ("generator_copied", "shared_handle", "iterable_perhaps_not_sharded")
#: Faults that leave every setting: they cost time, or a number that a script may count on; or what
#: :data:`UNSAFE` workers learn from.
HARMLESS: Final = (
    "generator_copied",
    "slow_dataset",
    "slow_sampler",
    "slow_start",
    "large_pickle",
    "timeout",
    "iterable_perhaps_not_sharded",
    "not_restartable",
    "data_changed",
    "samples_never_drawn",
)


@dataclasses.dataclass(frozen=True)
class SettingConstraints:
    """What settings must keep to; ``None``: no bound.

    ``most_tokens`` bounds num_workers × prefetch_factor; ``least_workers`` is 1 where batches
    cannot be made in the main process. ``works`` is whether anything does:
    if not, batches cannot be made even in the main process. ``reasons`` are the faults' kinds.
    """

    most_workers: int | None = None
    least_workers: int = 0
    most_tokens: int | None = None
    start_methods: tuple[StartMethod, ...] = START_METHODS
    may_pin: bool = True
    works: bool = True
    reasons: tuple[str, ...] = ()

    def merge(self, other: SettingConstraints) -> SettingConstraints:
        """The constraints of both at once; where workers are needed and none is left, nothing
        works."""
        both = SettingConstraints(
            _least(self.most_workers, other.most_workers),
            max(self.least_workers, other.least_workers),
            _least(self.most_tokens, other.most_tokens),
            tuple(method for method in self.start_methods if method in other.start_methods),
            self.may_pin and other.may_pin,
            self.works and other.works,
            tuple(dict.fromkeys((*self.reasons, *other.reasons))),
        )
        none_left = both.workers == 0 and both.least_workers > 0
        return dataclasses.replace(both, works=both.works and not none_left)

    @property
    def workers(self) -> int | None:
        """The most workers there may be; no start method is left: none."""
        return 0 if not self.start_methods else _least(self.most_workers, self.most_tokens)

    def allows(self, settings: LoaderSettings) -> bool:
        """Do these settings keep to it?"""
        return self.works and self._nearest(settings) == settings

    def nearest(self, wanted: LoaderSettings) -> LoaderSettings | None:
        """The settings closest to those wanted that keep to it; ``None`` if nothing works."""
        return self._nearest(wanted) if self.works else None

    def _nearest(self, wanted: LoaderSettings) -> LoaderSettings:
        workers = wanted.num_workers
        if self.workers is not None:
            workers = min(workers, self.workers)
        workers = max(workers, self.least_workers)
        pin = wanted.pin_memory and self.may_pin
        if workers == 0:
            if wanted.num_workers == 0:
                return dataclasses.replace(wanted, pin_memory=pin)
            return LoaderSettings(0, pin_memory=pin, start_method=wanted.start_method)
        prefetch = wanted.prefetch_factor
        if self.most_tokens is not None:
            prefetch = min(prefetch, max(1, self.most_tokens // workers))
        start = wanted.start_method
        if start not in self.start_methods:
            start = self.start_methods[0]
        return dataclasses.replace(
            wanted,
            num_workers=workers,
            prefetch_factor=prefetch,
            pin_memory=pin,
            start_method=start,
        )


def bounds_of(fault: Finding) -> SettingConstraints:
    """What one fault leaves; faults that only slow a loader down leave everything."""
    kind, met = fault.kind, fault.loader
    reasons = (kind,)
    if kind in HARMLESS:
        return SettingConstraints()
    if kind in _OF_DATA:
        return SettingConstraints(works=False, reasons=reasons)
    if met is not None and met.num_workers == 0 and kind != "pin_memory":
        return SettingConstraints(least_workers=1, reasons=reasons)
    if kind in _ONLY_FORK:
        return SettingConstraints(start_methods=("fork",), reasons=reasons)
    if kind == "iterable_not_sharded":
        return SettingConstraints(most_workers=1, reasons=reasons)
    if kind == "few_shards":
        tried = met.num_workers // 2 if met is not None else 1
        maximum = int(fault.subject) if fault.subject else max(1, tried)
        return SettingConstraints(most_workers=maximum, reasons=reasons)
    if kind == "pin_memory":
        return SettingConstraints(may_pin=False, reasons=reasons)
    if kind in _TOO_MUCH_MEMORY:
        return SettingConstraints(most_workers=met.num_workers // 2 if met else 0, reasons=reasons)
    if kind in _TOO_MANY_BATCHES:
        return SettingConstraints(most_tokens=met.tokens // 2 if met else 0, reasons=reasons)
    if kind in _OF_START:
        start = met.start_method if met is not None else default_start()
        others = tuple(method for method in START_METHODS if method != start)
        # What spawn does not help against, fork does not either.
        return SettingConstraints(start_methods=others if start == "fork" else (), reasons=reasons)
    # Known to happen in workers, or not known to us: the main process is left.
    return SettingConstraints(most_workers=0, reasons=reasons)


def bounds(faults: Iterable[Finding]) -> SettingConstraints:
    """What all of them leave."""
    together = SettingConstraints()
    for fault in faults:
        together = together.merge(bounds_of(fault))
    return together


def _least(first: int | None, second: int | None) -> int | None:
    found = [each for each in (first, second) if each is not None]
    return min(found, default=None)


TWO: Final = LoaderSettings(2, 4)
PINNED: Final = LoaderSettings(2, 4, pin_memory=True)
_FIXED: Final[Mapping[str, LoaderSettings]] = {
    "one": LoaderSettings(1, 4),
    "two": TWO,
    "tight": TWO,
    "turn": LoaderSettings(1, 1),
    "paced": LoaderSettings(1, 4),
    "pinned": PINNED,
    "alone": LoaderSettings(0),
    "alone_pinned": LoaderSettings(0, pin_memory=True),
}
KINDS: Final = (*_FIXED, "over")
#: What they are called in results.
TITLES: Final[Mapping[str, str]] = {
    "one": "1 worker",
    "two": "2 workers",
    "tight": "2 workers, step as long as their batch time",
    "turn": "1 worker, one batch at a time",
    "paced": "1 worker, longer step",
    "pinned": "2 workers, pinned",
    "alone": "no workers",
    "alone_pinned": "no workers, pinned",
    "over": "more workers than cores",
}
#: Workers a core in a run with more than cores; the most of them, and the share of the free RAM
#: that they may take.
_OVER: Final = 2
_MOST_OVER: Final = 16
_OVER_RAM: Final = 0.5
#: What the runs are, in their order: kinds that are compared lie between one another. Runs
#: without workers come last: they happen in this process, and what they leave in the data set
#: (open files, caches) would go to all workers that are forked later.
ORDER: Final = (
    *("one", "two", "over", "turn", "pinned", "tight", "paced", "over", "one", "two"),
    *("pinned", "tight", "turn", "over", "one", "two", "paced"),
)
LAST: Final = ("alone", "alone_pinned", "alone")
#: How long a run is, as a share of the longest: short where a time is read of each batch, long
#: where a rate counts.
LENGTHS: Final[Mapping[str, float]] = {
    "turn": 0.5,
    "paced": 0.5,
    "tight": 0.7,
    "pinned": 0.8,
    "alone_pinned": 0.7,
}
#: Kinds whose rate is the loader's own, not a step's.
_FREE: Final = ("one", "two", "over", "pinned", "alone")
#: Kinds that tell what workers need for batches, and what they cost one another.
OF_WORKERS: Final = ("one", "two", "over")
#: By how much the logarithms of two runs' rates differ from their mean, as a standard deviation:
#: the median of many loaders' (docs/figures.md), and the deviations that it counts for next to
#: those of a probe's own runs.
RUN_NOISE: Final = 0.03
_KNOWN_DEVIATIONS: Final = 4
#: A paced step is so many times what one worker takes for a batch, so that batches are ready;
#: a tight one so many times what two take.
READY: Final = 1.5
TIGHT: Final = 0.8


@dataclass
class Readings:
    """The runs so far, by what they are, and what went wrong."""

    machine: LoaderMachine
    runs: dict[str, list[Run]] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)

    def of(self, *names: str) -> list[Run]:
        """The runs of these kinds that came through."""
        return [run for name in names for run in self.runs.get(name, ())]

    def rate(self, name: str) -> float | None:
        """Batches a second of this kind, on average."""
        rates = [run.batches_per_s for run in self.of(name) if run.batches_per_s is not None]
        return statistics.fmean(rates) if rates else None

    @property
    def stays_busy(self) -> bool:
        """Did other processes disturb the last runs, whatever these were?"""
        runs = sorted(self.of(*KINDS), key=lambda run: run.began)
        return stays_busy([run.others_cores for run in runs])

    def run_noise(self) -> float:
        """The noise of runs of one kind: the standard deviation of their rates' logarithm.

        A probe repeats a kind two or three times: what is known of other loaders counts, too.
        """
        squares, deviations = _KNOWN_DEVIATIONS * RUN_NOISE**2, _KNOWN_DEVIATIONS
        for name in _FREE:
            logs = [math.log(run.batches_per_s) for run in self.of(name) if run.batches_per_s]
            if len(logs) > 1:
                squares += statistics.variance(logs) * (len(logs) - 1)
                deviations += len(logs) - 1
        return math.sqrt(squares / deviations)

    def with_speeds(self, watch: CoreSpeeds | WorkPieces) -> Readings:
        """The same readings with the cores' speed in each run."""
        names = [name for name, runs in self.runs.items() for _ in runs]
        found: dict[str, list[Run]] = {}
        for name, run in zip(names, with_speeds(self.of(*self.runs), watch), strict=True):
            found.setdefault(name, []).append(run)
        return Readings(self.machine, found, self.faults)

    def at_full_speed(self, slowing: Slowing, pieces: WorkPieces | None = None) -> Readings:
        """The quietest runs of each kind, had nothing from outside slowed the cores; of those that
        were made alongside other processes, without what workers waited for cores."""
        found = {
            name: [
                slowing.undisturbed(
                    without_core_waits(run) if is_disturbed(run.others_cores) else run, pieces
                )
                for run in quietest(runs)
            ]
            for name, runs in self.runs.items()
        }
        return Readings(self.machine, found, self.faults)

    def disturbed(self) -> dict[str, float]:
        """Kinds of runs that were only made alongside other processes, and how many cores these
        kept busy."""
        found = {}
        for name, runs in self.runs.items():
            cores = [run.others_cores for run in runs]
            told = [number for number in cores if number is not None and is_disturbed(number)]
            if told and len(told) == len(cores):
                found[name] = statistics.fmean(told)
        return found

    def slowing(self, watch: CoreSpeeds | WorkPieces) -> Slowing:
        """How slowed cores slow this loader: batches at several speeds tell."""
        working = working_share(self.of("one", "turn") or self.of("alone"))
        power = sensitivity(self.runs.values(), pieces_of(watch))
        return Slowing(working, self.machine.usable_cores, power)

    @property
    def bounds(self) -> SettingConstraints:
        """What the faults leave."""
        return bounds(self.faults)

    def settings(self, name: str) -> LoaderSettings | None:
        """The settings of a run of this kind; ``None`` where there can be none."""
        return _FIXED[name] if name in _FIXED else self._over()

    def _over(self) -> LoaderSettings | None:
        private = [size for run in self.of("one", "two") for size in run.private_bytes]
        count = min(_MOST_OVER, _OVER * math.ceil(self.machine.usable_cores))
        free = self.machine.available_bytes
        if private and free is not None:
            count = min(count, int(_OVER_RAM * free / max(1, max(private))))
        return LoaderSettings(count, 2) if count > TWO.num_workers else None

    def step_s(self, name: str) -> float | None:
        """The step of a run of this kind; ``None`` while it is unknown."""
        if name == "paced":
            return READY * fetch_s(self.of("one")) or None
        if name == "tight":
            rate = self.rate("two")
            return TIGHT / rate if rate else None
        return 0.0


def fetch_s(runs: Sequence[Run]) -> float:
    """What a batch took a worker, on average; 0 where that is not known."""
    times = [run.fetched[:, WALL].mean() for run in runs if len(run.fetched)]
    return float(np.mean(times)) if times else 0.0


def start_s(readings: Readings) -> float | None:
    """The median seconds until one worker runs; workers are started one after the other."""
    times = []
    for run in readings.of(*KINDS):
        last = max((at for at in run.started if at > 0), default=0.0)
        if last and run.settings.num_workers:
            times.append((last - run.began) / len(run.started))
    return statistics.median(times) if times else None


def mean(parts: Sequence[Any]) -> float:
    """The mean of all values; 0 where there are none."""
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0
