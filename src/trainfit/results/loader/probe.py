"""What batches of a DataLoader cost, and its faults, as measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trainfit.results.loader.settings import LoaderSettings

DatasetKind = Literal["map", "iterable"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the DataLoader, with its fix.

    ``kind`` is a stable identifier ("worker_killed", "worker_exception", "shm_full",
    "deadlock", "not_picklable", "iterable_not_sharded", "slow_sampler", "main_process_only",
    "open_files", "died", …). ``settings`` are those under which it was met (``None``: all).
    """

    kind: str
    summary: str
    evidence: str
    fix: str
    settings: LoaderSettings | None = None


@dataclasses.dataclass(frozen=True)
class CostPart:
    """A part of what a batch costs in a worker.

    ``name`` is "read", "decode", "transform", "collate" or "unknown"; ``share`` of the batch's
    wall time; ``what`` names the functions that it was spent in, the longest first.
    """

    name: str
    share: float
    what: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StorageCost:
    """Time of a batch with its files in the page cache (warm) and without (cold).

    ``read_bytes`` is what one batch read from storage when cold; ``cached_share`` how much of
    the files that were seen can stay in the page cache (1: all of them fit in free RAM).
    """

    warm_s: float
    cold_s: float | None
    read_bytes: int | None
    files: int
    file_bytes: int | None
    cached_share: float | None
    reason: str = ""
    """Why it could not be measured cold."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What batches of a loader cost, as measured.

    Seconds are means over batches. ``fetch_s`` is a worker's wall time for one batch (dataset
    and collation), ``fetch_cpu_s`` the CPU time of all threads of that worker meanwhile;
    ``alone_s`` is a batch's wall time in the main process (``num_workers=0``).
    ``variation`` is the standard deviation of ``fetch_s`` divided by its mean.
    ``receive_s`` is the CPU time of taking a batch from the workers' queue, ``receive_busy_s``
    the wall time of the same while the worker that made it makes the next one;
    ``pin_s`` is the copy to pinned memory, ``next_s`` the rest of ``next``,
    ``latency_s`` what passes in pipes until threads wake.
    ``start_s`` is the time to start one worker, by start method.
    ``scaling`` is the rate of two workers divided by that of one.
    ``sampler_s`` is the time of the sampler for the indices of one batch.
    """

    dataset: str
    kind: DatasetKind
    batch_size: int | None
    samples: int | None
    batch_bytes: int
    batch_tensors: int
    batches: int
    """Batches that were made for the probe."""
    fetch_s: float | None
    fetch_cpu_s: float | None
    variation: float | None
    alone_s: float | None
    threads: float | None
    """CPU seconds per wall second that is not waited: above 1 the sample is multi-threaded."""
    receive_s: float | None
    receive_busy_s: float | None
    pin_s: float | None
    next_s: float | None
    latency_s: float | None
    sampler_s: float | None
    start_s: Mapping[str, float]
    worker_private_bytes: int | None
    scaling: float | None
    contention: float | None
    """By how much one more busy core slows all of them, fitted to ``scaling``."""
    parts: tuple[CostPart, ...] = ()
    storage: StorageCost | None = None
    thread_pools: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Threads of a worker's native pools by library ("openblas": 8, "opencv": 8)."""
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0
    float_bytes: int | None = None
    """Of ``batch_bytes``, those of tensors of 32-bit floating point."""
    core_speed: float | None = None
    """The cores' mean speed in the probe's runs, as a share of their full speed, which all
    other numbers are of; ``None``: not seen."""
    others_cores: float | None = None
    """Cores that other processes kept busy in the probe's runs, beyond those that idled; ``None``:
    not told."""
    disturbed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Kinds of runs ("2 workers", …) that were only made with other processes busy, and how many
    cores these kept busy."""
    collecting: float | None = None
    """Share of a worker's CPU time for batches that Python's garbage collection uses."""
    started_threads: int | None = None
    """Threads that libraries started in a worker for its first batch: those of pools that are
    used, and not only there; ``None``: not told."""
    used_pools: tuple[str, ...] | None = None
    """Those of ``thread_pools`` whose threads a batch starts; ``None``: not measured."""
