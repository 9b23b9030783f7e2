"""What ``trainfit loader`` found: what batches cost, and the settings that suit them.

Rates are batches per second of one DataLoader; times are seconds, sizes bytes. ``None`` is not
measured, 0 is measured.

Format history
    1   first version
    2   what other processes did to runs (``Doubt``), and a reason for each setting
        (``SettingReason``)
    3   "fix" of a fault (was "cure"), "disturbed" runs of a probe (was "beside_others"), the limit
        "transfer" (was "hand_off"), "used_pools" of a probe
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from trainfit.results.files import documents
from trainfit.results.files.upgrades import Upgrade, rename_key, rename_value
from trainfit.results.plan.launch import Evidence
from trainfit.results.runs.sandbox import Protection

FORMAT: Final = "trainfit-loader"
VERSION: Final = 3

_REMAKE: Final = "re-create it with `trainfit loader --output FILE`"
_WANTED: Final = "give a file that `trainfit loader --output` wrote"


def upgrade_terms(document: dict[str, Any], within: str = "") -> None:
    """From version 2 to 3, for a loader's result at the path ``within`` (ends with a dot)."""
    for place in ("faults", "probe.faults", "held.faults", "confirmed.fault"):
        rename_key(document, within + place, "cure", "fix")
    for place in ("probe", "held"):
        rename_key(document, within + place, "beside_others", "disturbed")
    rename_value(document, within.rstrip("."), "limit", "hand_off", "transfer")


_UPGRADES: Final[Mapping[int, Upgrade]] = {2: upgrade_terms}

StartMethod = Literal["fork", "spawn", "forkserver"]
DatasetKind = Literal["map", "iterable"]


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Of a DataLoader, by its own names; ``prefetch_factor`` means nothing without workers.

    ``start_method`` is its ``multiprocessing_context`` (Linux' default before Python 3.14 is
    "fork"); ``worker_threads`` is what ``torch.get_num_threads()`` is in a worker (1, unless
    the script's ``worker_init_fn`` says otherwise). ``library_threads`` is what the other
    libraries of a worker that have threads of their own are held to (OpenMP, OpenBLAS, MKL,
    OpenCV, …); ``None``: as the script and its environment have it.
    """

    num_workers: int
    prefetch_factor: int = 2
    pin_memory: bool = False
    in_order: bool = True
    persistent_workers: bool = False
    start_method: StartMethod = "fork"
    worker_threads: int = 1
    library_threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"expected num_workers of 0 or more, got {self.num_workers}")
        if self.prefetch_factor < 1:
            raise ValueError(f"expected prefetch_factor of 1 or more, got {self.prefetch_factor}")
        if self.worker_threads < 1:
            raise ValueError(f"expected one thread or more for a worker, got {self.worker_threads}")
        if self.library_threads is not None and self.library_threads < 1:
            raise ValueError(
                f"expected one thread or more for a library, got {self.library_threads}"
            )

    @property
    def tokens(self) -> int:
        """Batches that are asked for and not yet handed to the user."""
        return self.num_workers * self.prefetch_factor


#: Cores that others keep busy on average, beyond those that idle, above which a run counts as
#: disturbed: its rate depends on both.
DISTURBED_CORES: Final = 0.25

#: Bytes of the checkpoint that is saved to measure the time of that: some 20 to 50 ms.
SAVE_BYTES: Final = 32 << 20


def steady(settings: LoaderSettings) -> LoaderSettings:
    """What of the settings matters within an epoch: persistent workers do between epochs, and
    without workers there is nothing to prefetch."""
    prefetch = settings.prefetch_factor if settings.num_workers else 2
    return dataclasses.replace(settings, persistent_workers=False, prefetch_factor=prefetch)


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
    fault: Fault | None = None
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


@dataclasses.dataclass(frozen=True)
class Doubt:
    """Something from outside that bent what was measured.

    ``kind``: "others" (other processes kept ``cores`` busy, on average over ``runs``, beyond those
    that idled), "slowed" (the cores ran at ``speed`` of their full speed, from the lowest to the
    highest of ``runs``). ``summary`` says that in a line, and ``meaning`` what it means for the
    verdict; ``decides``: it leaves the verdict open.
    """

    kind: Literal["others", "slowed"]
    runs: tuple[str, ...]
    summary: str
    meaning: str
    cores: float | None = None
    speed: tuple[float, float] | None = None
    decides: bool = False


#: What bounds the loop: "gpu" (nothing to gain), "workers" (more of them would help), "cores",
#: "disk", "transfer" (of batches to the main process), "lock" (workers wait for one another),
#: "sampler", "main_process" (num_workers=0 is all that works).
Limit = Literal[
    "gpu", "workers", "cores", "disk", "transfer", "lock", "sampler", "main_process", "unknown"
]


#: Who gave a variable its value: the user's command, his script (until its first batch), or the
#: shell (or whatever else started trainfit); empty: nobody.
SetBy = Literal["command", "script", "shell", ""]


@dataclasses.dataclass(frozen=True)
class VariableAdvice:
    """A variable of the environment (or a call) to set, because of evidence.

    ``where`` is "environment", "worker_init_fn" or "script"; ``line`` what to write there.
    ``present`` is the variable's value now (``None``: it is not set) and ``set_by`` who set that.
    ``gain`` is what batches per second with the value are, divided by those as it is now,
    measured in real runs (``None``: these were not both made).
    """

    name: str
    value: str
    where: str
    line: str
    reason: str
    evidence: str
    present: str | None = None
    set_by: SetBy = ""
    gain: float | None = None


@dataclasses.dataclass(frozen=True)
class SettingReason:
    """One setting of a launch, with why it has its value: also one that is left as it is.

    ``name`` is what the user would search for ("num_workers", "OMP_NUM_THREADS", "CPU affinity").
    ``value`` is the recommended one and ``present`` the user's, as they are written (``None``: it
    is not set, nor is it to be); ``set_by`` is who set a variable. ``reason`` is one line, true of
    what was measured here, and ``evidence`` what it rests on. ``where`` it belongs: arguments are
    the DataLoader's (files of earlier versions say that of all).
    """

    name: str
    value: str | None
    present: str | None
    reason: str
    evidence: Evidence
    set_by: SetBy = ""
    where: Literal["argument", "environment", "wrapper"] = "argument"


@dataclasses.dataclass(frozen=True)
class CoreAdvice:
    """Which CPUs to run on: ``prefix`` goes before the command ("taskset -c 0-7"), or is what
    starts its ranks, in the place of ``python`` ("torchrun …")."""

    prefix: str
    cpus: tuple[int, ...]
    reason: str
    evidence: str


@dataclasses.dataclass(frozen=True)
class LoaderAdvice:
    """What would help beyond the settings, with its predicted gain.

    ``kind`` is a stable identifier ("uint8", "fewer_tensors", "decoder_threads", "resize",
    "cache", "gpu_transforms", "frame_alignment", "in_order", …). ``batches_per_s`` is the
    end-to-end rate with it, ``gain`` that divided by the recommended setting's.
    """

    kind: str
    summary: str
    how: str
    batches_per_s: float
    gain: float
    evidence: str


@dataclasses.dataclass(frozen=True)
class LoaderResult:
    """What ``trainfit loader`` found.

    ``command`` is the user's command, or what else was tuned. ``step_s`` is the consumer's
    step and ``step_source`` where it is from; 0 means as fast as the loader can.
    ``present`` are the script's own settings. ``recommended`` are the smallest settings within
    2% of the best predicted end-to-end rate. ``verdict``: "change", "keep" (they are as good
    as any), "nothing_to_gain" (the GPU is the limit with the present settings),
    "no_setting_helps" (what bounds is no setting), "cannot_tell".

    With several ``ranks``, ``machine`` is what one of them gets and rates are of one; real runs
    had a copy of the loader at work for each.
    """

    command: str
    loader: str
    machine: LoaderMachine
    step_s: float
    step_source: str
    probe: Probe
    present: LoaderSettings
    recommended: LoaderSettings
    verdict: Literal["change", "keep", "nothing_to_gain", "no_setting_helps", "cannot_tell"]
    limit: Limit
    reason: str
    candidates: tuple[Candidate, ...]
    confirmed: tuple[Confirmed, ...]
    variables: tuple[VariableAdvice, ...] = ()
    cores: CoreAdvice | None = None
    advice: tuple[LoaderAdvice, ...] = ()
    too_many: tuple[Candidate, ...] = ()
    """Beyond the knee: the same with 2 and 4 times the recommended workers."""
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    save_alone_s: float | None = None
    """What saving a checkpoint (``SAVE_BYTES``) took without workers."""
    held: Probe | None = None
    """A second probe, with one thread for each library in a worker; ``None``: not made, as a
    batch starts none of their threads."""
    seconds: float = 0.0
    torch: str = ""
    step_is_bound: bool = False
    """Is ``step_s`` only the least that the step can take?"""
    launch: str = ""
    """The command with what ``variables`` and ``cores`` put before it; empty without either."""
    protection: Protection | None = None
    """What kept the script from changing files (``None``: not told)."""
    ranks: int = 1
    doubts: tuple[Doubt, ...] = ()
    reasons: tuple[SettingReason, ...] = ()
    without_others: LoaderSettings | None = None
    """Where other processes leave the verdict open: what the model recommends for this machine
    without them, by the CPU time of batches; not confirmed by any run."""

    @property
    def is_left_open(self) -> bool:
        """Does something from outside leave the verdict open?"""
        return any(doubt.decides for doubt in self.doubts)

    def compared(self) -> tuple[float, float, Evidence] | None:
        """:meth:`rates` of the present and of the recommended settings."""
        return self.rates(self.present, self.recommended)

    def rates(
        self, one: LoaderSettings, other: LoaderSettings
    ) -> tuple[float, float, Evidence] | None:
        """Batches per second of both settings, and where both are from: "measured", or "predicted"
        where one was not run; ``None``: not known."""
        runs = self.measured(one), self.measured(other)
        if runs[0] is not None and runs[1] is not None:
            rates = runs[0].measured_batches_per_s, runs[1].measured_batches_per_s
            if rates[0] is not None and rates[1] is not None:
                return rates[0], rates[1], "measured"
        seen = self.candidate(one), self.candidate(other)
        if seen[0] is None or seen[1] is None:
            return None
        return seen[0].batches_per_s, seen[1].batches_per_s, "predicted"

    def candidate(self, settings: LoaderSettings) -> Candidate | None:
        """What the model said of these settings, if they were among the candidates."""
        wanted = steady(settings)
        return next((each for each in self.candidates if steady(each.settings) == wanted), None)

    def measured(self, settings: LoaderSettings) -> Confirmed | None:
        """The real run of these settings, if there was one that neither failed nor was disturbed by
        other processes."""
        wanted = steady(settings)
        found = (each for each in self.confirmed if steady(each.settings) == wanted)
        usable = (each for each in found if each.measured_batches_per_s is not None)
        return next((each for each in usable if not each.is_disturbed), None)

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        return documents.to_json(self, FORMAT, VERSION)

    def save(self, path: Path) -> None:
        """Write the document; the file appears whole or not at all."""
        documents.save(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, path: Path) -> LoaderResult:
        """The reverse of :meth:`to_json`; raises :class:`ResultFileError` for ``path``."""
        return documents.from_json(
            cls,
            text,
            path,
            FORMAT,
            VERSION,
            remake=_REMAKE,
            wanted=_WANTED,
            upgrades=_UPGRADES,
        )

    @classmethod
    def load(cls, path: Path) -> LoaderResult:
        """Read a file that :meth:`save` wrote; raises :class:`ResultFileError`."""
        return cls.from_json(documents.read(path, _REMAKE), path)
