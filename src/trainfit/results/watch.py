"""Watched training runs: tables as they are recorded, what is said of one, and two compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Finding, Unknown
from trainfit.results.runs.watched import RunHeader

# ---
# What is said of a watched run: where its time went, its memory, and findings.


#: Steady steps that a run is judged by, at least: the median of 20 values with 20% spread is off by
#: 6% (1.25 σ / √n).
LEAST_STEPS: Final = 20
#: … of long ones, which waste minutes meanwhile, fewer do: the processes are sampled often enough
#: within each, and what costs most of its time does so in each (3 values: 14%).
LEAST_LONG_STEPS: Final = 3
LONG_S: Final = 6.0


def are_enough(steps: int, seconds: float) -> bool:
    """Do so many steady steps, in so long, tell what a run's time goes to?"""
    return steps >= LEAST_STEPS or (steps >= LEAST_LONG_STEPS and seconds >= LONG_S)


#: Evidence of the finding "cpu_contention" that a headline shows, too.
OTHERS_CORES: Final = "cores that other processes keep busy"
USABLE_CORES: Final = "usable cores"

PhaseName = Literal[
    "input", "copy", "forward", "backward", "optimizer", "sync", "checkpoint", "evaluation", "other"
]
#: Of a phase among metrics: what it is, by its key.
_PHASE_METRICS: Final[Mapping[str, tuple[PhaseName, str]]] = {
    "waiting_for_batches_share": ("input", "waiting for batches"),
    "copy_share": ("copy", "host-to-device copies"),
    "forward_share": ("forward", "forward pass"),
    "backward_share": ("backward", "backward pass"),
    "optimizer_share": ("optimizer", "optimizer step"),
    "sync_share": ("sync", "waiting for the GPU"),
    "checkpoint_share": ("checkpoint", "writing checkpoints"),
    "evaluation_share": ("evaluation", "evaluation"),
    "other_share": ("other", "everything else"),
}
#: What bounds a run.
Limit = Literal[
    "gpu",
    "input",
    "host",
    "script",
    "copy",
    "sync",
    "checkpoint",
    "communication",
    "cpu",
    "unknown",
]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Mean seconds of a step in one phase, on the host and on the GPU (``None``: not measured)."""

    name: PhaseName
    host_s: float
    share: float
    gpu_s: float | None = None


@dataclasses.dataclass(frozen=True)
class LedgerPoint:
    """Bytes of a GPU's memory at a step, which add up to the GPU's; ``None`` is not measured.

    ``allocated``: by tensors; ``cached``: reserved by PyTorch and free; ``beyond``: the rest of the
    run's process (context, libraries); ``others``: other processes; ``free``.
    """

    step: int
    time_s: float
    allocated: int | None
    cached: int | None
    beyond: int | None
    others: int | None
    free: int | None


@dataclasses.dataclass(frozen=True)
class MemoryLedger:
    """A GPU's memory over the run. ``growth_bytes_per_step`` is a robust slope of allocated memory
    over the steady steps with its 90% interval; ``out_of_memory_step`` where it grows."""

    points: tuple[LedgerPoint, ...]
    total_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    growth_bytes_per_step: float | None = None
    growth_interval: tuple[float, float] | None = None
    fragmentation: float | None = None
    """Of reserved memory at its peak, the share that no tensor holds."""
    out_of_memory_step: int | None = None


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """RAM of the run's processes of one kind, at the moment at which they held most.

    ``private_bytes`` are heaps (tensors, Python objects), ``shared_bytes`` lie in /dev/shm (batches
    of workers), ``file_bytes`` are of mapped files (libraries, data). Pages that processes share
    count for each of them.
    """

    who: Literal["training", "workers", "others"]
    processes: int
    private_bytes: int
    shared_bytes: int
    file_bytes: int


@dataclasses.dataclass(frozen=True)
class TimelinePoint:
    """Some steps in a row, for pictures: shares of their time by phase, and what was sampled."""

    step: int
    time_s: float
    step_s: float
    phases: Mapping[str, float]
    gpu_utilization: float | None = None
    cores_busy: float | None = None
    sm_hz: float | None = None


@dataclasses.dataclass(frozen=True)
class RankSummary:
    """A rank of the run: its steps a second, and how long it waits. ``collectives_share`` is the
    time in collectives that nothing hides, ``reserved_bytes`` PyTorch's at most; ``None`` is not
    measured."""

    rank: int
    host: str
    steps: int
    step_s: float | None
    input_share: float | None
    gpu_busy: float | None
    samples_per_step: float | None = None
    collectives_share: float | None = None
    reserved_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class WatchResult(ResultFile):
    """The verdict on a run. ``steps`` and ``seconds`` are those judged (warm-up left out).

    ``limit`` is what bounds the run; ``next_command`` what to type next.
    """

    FILE: ClassVar = Format.of("trainfit-watch", "trainfit watch --output")
    METRICS: ClassVar = {
        "step_ms": "median step",
        "samples_per_s": "samples a second",
        **{key: f"share of the time: {what}" for key, (_, what) in _PHASE_METRICS.items()},
        "gpu_busy_share": "share of the time in which the GPU had work",
        "gpu_utilization_share": "GPU utilization by NVML",
        "mfu_share": "model FLOPs utilization",
        "allocated_gib": "peak of torch.cuda.max_memory_allocated",
        "reserved_gib": "peak of torch.cuda.max_memory_reserved",
        "device_gib": "most GPU memory that the process held, by NVML",
        "critical_findings": "findings that are critical",
        "warning_findings": "findings that are warnings",
    }

    header: RunHeader
    steps: int
    seconds: float
    step_s: float | None
    """Median."""
    step_interval_s: tuple[float, float] | None
    """10th and 90th percentile of single steps."""
    samples_per_s: float | None
    phases: tuple[Phase, ...]
    limit: Limit
    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...] = ()
    ledger: MemoryLedger | None = None
    host_memory: tuple[HostMemory, ...] = ()
    """Of one rank; nothing where it was not measured."""
    timeline: tuple[TimelinePoint, ...] = ()
    ranks: tuple[RankSummary, ...] = ()
    gpu_utilization: float | None = None
    gpu_busy: float | None = None
    """Share of the time in which the stream had work, by CUDA events."""
    mfu: float | None = None
    notes: tuple[str, ...] = ()
    next_command: str = ""
    folder: str = ""

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`, of the judged rank; a phase that did not occur has no
        share."""
        shares = {phase.name: phase.share for phase in self.phases}
        ledger, severities = self.ledger, [finding.severity for finding in self.findings]
        return {
            "step_ms": self.step_s,
            "samples_per_s": self.samples_per_s,
            **{key: shares.get(name) for key, (name, _) in _PHASE_METRICS.items()},
            "gpu_busy_share": self.gpu_busy,
            "gpu_utilization_share": self.gpu_utilization,
            "mfu_share": self.mfu,
            "allocated_gib": ledger.peak_allocated_bytes if ledger else None,
            "reserved_gib": ledger.peak_reserved_bytes if ledger else None,
            "device_gib": _most_held(ledger) if ledger else None,
            # Of a run without steps there is nothing to find.
            "critical_findings": severities.count("critical") if self.steps else None,
            "warning_findings": severities.count("warning") if self.steps else None,
        }


def _most_held(ledger: MemoryLedger) -> int | None:
    """Most bytes that the run's process held on the GPU, where all its parts were measured."""
    held = [
        point.allocated + point.cached + point.beyond
        for point in ledger.points
        if point.allocated is not None and point.cached is not None and point.beyond is not None
    ]
    return max(held, default=None)


# ---
# What is said of several watched runs: two compared, or a change that was tried.


Group = Literal[
    "command", "loader", "precision", "batch size", "model", "version", "variable", "hardware"
]
Verdict = Literal["faster", "slower", "no difference", "cannot tell"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that the runs were given or ran on; empty: one of them has no such thing."""

    group: Group
    what: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Change:
    """A measure of both runs. ``None`` is not measured.

    ``effect`` with its 95% ``interval`` is relative to the value before (``basis`` "itself"), to
    the whole step's time before ("step"), or a difference of shares ("points"). ``verdict`` is
    empty where there is no interval. ``detectable`` is how large an effect must be to be found in
    80 of 100 such comparisons.
    """

    what: str
    unit: Literal["s/step", "s/sample", "samples/s", "share", "bytes"]
    before: float | None
    after: float | None
    effect: float | None = None
    interval: tuple[float, float] | None = None
    basis: Literal["itself", "step", "points"] = "itself"
    verdict: Literal["more", "less", "no difference", ""] = ""
    detectable: float | None = None


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the runs: its folder, its command, and its steady steps."""

    folder: str
    command: str
    steps: int


@dataclasses.dataclass(frozen=True)
class Comparison(ResultFile):
    """The verdict on a run ``after`` against one ``before``.

    It is about the time of a step, or of a sample where batch sizes differ. ``needs`` is what would
    let it be told where it cannot be.
    """

    FILE: ClassVar = Format.of("trainfit-watch-comparison", "trainfit compare --output")

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    verdict: Verdict
    needs: str = ""
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Change | None:
        """The change that the verdict is about."""
        return self.changes[0] if self.changes else None


# ---
# What came of a recommended change that was tried: runs with it and without, in turn.


@dataclasses.dataclass(frozen=True)
class VerifiedRun:
    """One of the runs, in their order; ``changed``: with the change."""

    changed: bool
    folder: str
    steps: int


@dataclasses.dataclass(frozen=True)
class AdviceVerification(ResultFile):
    """``verdict`` is about ``settings``, the recommendation of the finding ``kind``, as far as the
    command can be given it; "not tried": ``reason`` says why.

    ``command`` is the command as it is, ``changed_command`` with the change. ``line`` is what to
    change by hand.
    """

    FILE: ClassVar = Format.of("trainfit-watch-verification", "trainfit watch --verify --output")

    verdict: Literal["proven", "no gain", "worse", "cannot tell", "not tried"]
    command: str
    kind: str = ""
    title: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Recommended with them, and not tried: the command has no place for them."""
    changed_command: str = ""
    reason: str = ""
    line: str = ""
    runs: tuple[VerifiedRun, ...] = ()
    comparison: Comparison | None = None

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """The relative gain of speed with its 95% interval; ``None``: not measured."""
        change = None if self.comparison is None else self.comparison.main
        if change is None or change.effect is None or change.interval is None:
            return None
        low, high = change.interval
        return 1 / (1 + change.effect) - 1, 1 / (1 + high) - 1, 1 / (1 + low) - 1
