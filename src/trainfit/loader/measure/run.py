"""What a real run of a DataLoader took, or why it came to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trainfit.hardware.cpu.core_speed import CoreSpeed
from trainfit.loader.measure.instrument import COLUMNS, Records
from trainfit.results.loader.settings import LoaderSettings

#: Batches of each worker until it is as fast as it will be: memory is touched, and taken from the
#: system, for the first time. The ACT example's take 33, 23, 23, 20, 20 ms and then 18.5
#: (docs/figures.md).
_SETTLING: Final = 4


@dataclass(frozen=True)
class Failure:
    """Why a run came to nothing.

    ``error_type``, ``message`` and ``traceback`` are what iterating raised; ``exit_code`` is of
    the process that iterated, if it died (negative: signal); ``worker_exits`` of its workers,
    as far as they had ended. ``hung``: no end within the time limit; ``stacks`` are then those
    of all threads of all processes (faulthandler's format).
    """

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    worker_exits: tuple[int, ...] = ()
    hung: bool = False
    stacks: str = ""


def _no_records() -> Records:
    return np.empty((0, 2))


@dataclass(frozen=True)
class Run:
    """What a run took; times on the monotonic clock, in seconds.

    ``handed`` is when each batch was returned, ``waited`` how long ``next`` took for it and
    ``next_cpu`` the main thread's CPU time meanwhile, ``steps`` how long the consumer's step
    took. ``fetches`` are each worker's records (:mod:`trainfit.loader.measure.instrument`; without
    workers those of the main process), ``received`` and ``pinned`` wall and CPU of taking a
    batch over and of pinning it. ``began`` is when ``iter`` was called, ``started`` when each
    worker was ready.
    """

    settings: LoaderSettings
    step_s: float
    began: float = 0.0
    handed: Records = field(default_factory=_no_records)
    waited: Records = field(default_factory=_no_records)
    next_cpu: Records = field(default_factory=_no_records)
    steps: Records = field(default_factory=_no_records)
    fetches: tuple[Records, ...] = ()
    received: Records = field(default_factory=_no_records)
    pinned: Records = field(default_factory=_no_records)
    started: tuple[float, ...] = ()
    batch_bytes: int = 0
    batch_tensors: int = 0
    float_bytes: int = 0
    """Of them, those of floating-point tensors."""
    private_bytes: tuple[int, ...] = ()
    """Of each worker: memory that it shares with no other process (USS)."""
    context_switches: tuple[int, ...] = ()
    core_waits_s: tuple[float, ...] = ()
    """Of each worker (without any, of the main thread): how long it waited for a core that others
    had, although it could have run; empty where the kernel does not say."""
    save_s: float | None = None
    """What saving a checkpoint took at the end (:mod:`trainfit.loader.measure.saving`)."""
    exhausted: bool = False
    """Did the loader end by itself, which it never should?"""
    failure: Failure | None = None
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile, beyond those that idled; ``None``: not
    told."""
    core_speed: CoreSpeed | None = None
    """Of the cores while batches were counted, where that was watched."""
    full_speed_batches_per_s: float | None = None
    """The rate that it would have had at the cores' full speed, where that was worked out."""
    ranks: int = 1
    """Copies of the loader that ran until its end, this one among them."""

    @property
    def warm(self) -> int:
        """The first batch that counts: as in :class:`trainfit.loader.model.dataloader.Outcome`."""
        return min(warm_up(self.settings), len(self.handed) // 2)

    @property
    def counted(self) -> int:
        """Batches that count."""
        return max(0, len(self.handed) - 1 - self.warm)

    @property
    def seconds(self) -> float:
        """In which the counted batches were returned."""
        return float(self.handed[-1] - self.handed[self.warm]) if self.counted else 0.0

    @property
    def batches_per_s(self) -> float | None:
        """In the steady state; ``None`` where too few batches came."""
        return self.counted / self.seconds if self.seconds > 0 else None

    @property
    def waiting_share(self) -> float | None:
        """Of the counted time, what the consumer waited for batches."""
        if self.seconds <= 0:
            return None
        return min(1.0, float(self.waited[self.warm + 1 :].sum()) / self.seconds)

    @property
    def fetched(self) -> Records:
        """All workers' records of batches that count (:meth:`settled`)."""
        rows = [records[self.settled(records) :] for records in self.fetches if len(records) > 1]
        return np.concatenate(rows) if rows else np.empty((0, COLUMNS))

    def settled(self, records: Records) -> int:
        """The first of a worker's records that counts.

        Its first batch never does (imports, caches, files that are opened once), nor those that
        it made before the batches that count were returned, if others are left.
        """
        early = self.warm // max(1, self.settings.num_workers)
        return max(1, min(early, len(records) // 2))


def warm_up(settings: LoaderSettings) -> int:
    """Batches of a run that do not count: what was prefetched, and some rounds of the workers."""
    return settings.tokens + _SETTLING * max(1, settings.num_workers) + 1
