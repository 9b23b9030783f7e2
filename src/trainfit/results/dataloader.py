"""A DataLoader: its costs and faults as measured, and settings as the model sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.findings import Finding
from trainfit.results.loader_settings import LoaderSettings as LoaderSettings
from trainfit.results.loader_settings import StartMethod as StartMethod
from trainfit.results.loader_settings import steady as steady

DatasetKind = Literal["map", "iterable"]


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
    faults: tuple[Finding, ...] = ()
    seconds: float = 0.0
    float_bytes: int | None = None
    """Of ``batch_bytes``, those of tensors of 32-bit floating point."""
    core_wait_s: float | None = None
    """Of ``fetch_s``, what the worker waited for a core that others had; ``None``: not told."""
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


# ---
# Settings as the model sees them, on a machine, and the real runs of them.


#: Cores that others keep busy on average, beyond those that idle, above which a run counts as
#: disturbed: its rate depends on both.
DISTURBED_CORES: Final = 0.25

#: Bytes of the checkpoint that is saved to measure the time of that: some 20 to 50 ms.
SAVE_BYTES: Final = 32 << 20


@dataclasses.dataclass(frozen=True)
class LoaderMachine:
    """What of the machine bounds a loader; ``None`` where it cannot be told."""

    usable_cores: float
    affinity: tuple[int, ...]
    physical_cores: int | None
    quota_cores: float | None
    core_speeds: tuple[float, ...]
    """Of the usable logical CPUs relative to the fastest, fastest first; a core's second thread
    counts with what it adds, so the first n add up to what n workers get."""
    available_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting as the model sees it; ``infeasible`` is why it cannot start, or empty.
    ``oversubscribed`` says why it is slower than so many workers promise, or is empty.

    ``batches_per_s`` is with the consumer, ``alone_batches_per_s`` what the loader would give
    to a step time of 0. ``save_s`` is what saving a checkpoint (``SAVE_BYTES``) would take
    while the workers go on.
    """

    settings: LoaderSettings
    batches_per_s: float
    waiting_share: float
    busy_cores: float
    ram_bytes: int | None = None
    shm_bytes: int | None = None
    infeasible: str = ""
    alone_batches_per_s: float | None = None
    save_s: float | None = None
    oversubscribed: str = ""


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A real run of the DataLoader, with the model's prediction before it.

    ``measured_batches_per_s`` and ``waiting_share`` are ``None`` where the run failed.
    ``context_switches_per_batch`` and ``private_bytes`` are of all workers together.
    ``core_speed`` is the cores' mean speed meanwhile, as a share of their full speed (``None``:
    not seen), at which the measured rate is given.
    """

    settings: LoaderSettings
    predicted_batches_per_s: float
    measured_batches_per_s: float | None
    waiting_share: float | None
    batches: int
    seconds: float
    context_switches_per_batch: float | None = None
    private_bytes: int | None = None
    fault: Finding | None = None
    core_speed: float | None = None
    save_s: float | None = None
    """What saving a checkpoint (``SAVE_BYTES``) took at its end, while the workers went on."""
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile, beyond those that idled; ``None``: not
    told."""
    tries: int = 1
    """Number of runs: repeated where other processes were busy; the least disturbed counts."""

    @property
    def is_disturbed(self) -> bool:
        """Does the rate tell as much of other processes as of these settings?"""
        return (self.others_cores or 0.0) > DISTURBED_CORES
