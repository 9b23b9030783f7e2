"""Settings that remain possible after a fault, for the tuner to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from trainfit.loader.measure.workload import default_start
from trainfit.results.loader.probe import Fault
from trainfit.results.loader.settings import LoaderSettings, StartMethod

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
_ONLY_FORK: Final = ("not_picklable", "no_main_guard", "not_importable", "spawn_start")
#: Faults that leave every setting: they cost time, or a number that a script may count on.
HARMLESS: Final = (
    "slow_dataset",
    "slow_sampler",
    "slow_start",
    "large_pickle",
    "timeout",
    "iterable_perhaps_not_sharded",
    "not_restartable",
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
        """Both at once; where workers are needed and none is left, nothing works."""
        both = SettingConstraints(
            _least(self.most_workers, other.most_workers),
            max(self.least_workers, other.least_workers),
            _least(self.most_tokens, other.most_tokens),
            tuple(each for each in self.start_methods if each in other.start_methods),
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


def bounds_of(fault: Fault) -> SettingConstraints:
    """What one fault leaves; faults that only slow a loader down leave everything."""
    kind, met = fault.kind, fault.settings
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
    if kind == "pin_memory":
        return SettingConstraints(may_pin=False, reasons=reasons)
    if kind in _TOO_MUCH_MEMORY:
        return SettingConstraints(most_workers=met.num_workers // 2 if met else 0, reasons=reasons)
    if kind in _TOO_MANY_BATCHES:
        return SettingConstraints(most_tokens=met.tokens // 2 if met else 0, reasons=reasons)
    if kind in _OF_START:
        start = met.start_method if met is not None else default_start()
        others = tuple(each for each in START_METHODS if each != start)
        # What spawn does not help against, fork does not either.
        return SettingConstraints(start_methods=others if start == "fork" else (), reasons=reasons)
    # Known to happen in workers, or not known to us: the main process is left.
    return SettingConstraints(most_workers=0, reasons=reasons)


def bounds(faults: Iterable[Fault]) -> SettingConstraints:
    """What all of them leave."""
    together = SettingConstraints()
    for fault in faults:
        together = together.merge(bounds_of(fault))
    return together


def fallback(faults: Iterable[Fault], wanted: LoaderSettings) -> LoaderSettings | None:
    """The settings closest to those wanted that the faults leave; ``None``: none works."""
    return bounds(faults).nearest(wanted)


def _least(first: int | None, second: int | None) -> int | None:
    found = [each for each in (first, second) if each is not None]
    return min(found, default=None)
