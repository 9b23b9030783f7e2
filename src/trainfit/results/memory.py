"""GPU memory: figures with their range, one step by kind, and what explains them, in bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.contents import Metered, Note
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Finding
from trainfit.results.gpus import Constant
from trainfit.results.runs.generation import Generation
from trainfit.results.runs.script import Protection
from trainfit.results.runs.steps import Coverage, StepMakeup, StepPattern

# ---
# The figures of GPU memory that every result gives, and how far to trust them.


#: Share of measured jobs whose device memory lay within the predicted range, and above it
#: (bench/memory_accuracy.py, models that the margins were not derived from; most of those
#: above were sampled while cudnn.benchmark tried an algorithm).
RANGE_COVERAGE: Final = 0.90
RANGE_EXCEEDED: Final = 0.07

#: Of :meth:`MemoryFigures.quantities`.
METRICS: Final[Mapping[str, str]] = {
    "allocated_gib": "peak of torch.cuda.max_memory_allocated",
    "reserved_gib": "peak of torch.cuda.max_memory_reserved",
    "device_gib": "device memory of the process, as nvidia-smi shows it",
    "device_high_gib": "the same, upper bound of the 90% prediction interval",
}


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """The three quantities of GPU memory, in bytes.

    ``allocated`` is torch.cuda.max_memory_allocated, ``reserved`` max_memory_reserved, and
    ``device`` what nvidia-smi shows for the process: reserved + ``context``, which is
    taken to lie in ``context_range``. ``context_parts`` are what it consists of: the bare
    context and what the libraries add that the job uses.

    A ``range`` is the 90% prediction interval (:mod:`trainfit.memory.capacity`); ``None``
    in files of earlier versions. ``retries`` counts the times that PyTorch returns all blocks that
    it keeps and nothing uses, as the GPU is full.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    context_range_bytes: tuple[int, int]
    context_parts: tuple[Constant, ...] = ()
    allocated_range_bytes: tuple[int, int] | None = None
    reserved_range_bytes: tuple[int, int] | None = None
    device_range_bytes: tuple[int, int] | None = None
    retries: int = 0

    def quantities(self) -> Mapping[str, float | None]:
        """Bytes by the keys of :data:`METRICS`."""
        device = self.device_range_bytes
        return {
            "allocated_gib": self.allocated_bytes,
            "reserved_gib": self.reserved_bytes,
            "device_gib": self.device_bytes,
            "device_high_gib": device[1] if device is not None else None,
        }


# ---
# Allocated memory over one optimizer step, by kind, and who owns it at its peak. Bytes.


@dataclasses.dataclass(frozen=True)
class StepMoment:
    """What is allocated right after event ``event`` of the step (from 0), by kind.

    ``phase`` is that of the operator of the latest allocation up to then.
    """

    event: int
    phase: str
    by_kind_bytes: Mapping[str, int]

    @property
    def allocated_bytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind_bytes.values())


@dataclasses.dataclass(frozen=True)
class Owner:
    """What one module holds of one kind at the peak.

    ``module`` is its whole path ("": no module). ``operator`` made the largest of its
    ``allocations``, at ``line`` of the user's code where that is known.
    """

    module: str
    kind: str
    nbytes: int
    allocations: int
    operator: str
    line: str | None


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The step in which allocated memory is largest.

    ``step`` counts from 1. ``events`` are its allocations and frees; each of ``moments`` is the one
    with the most memory of an equal part of them, so that no maximum is lost. ``peak`` is the place
    of the largest in ``moments``, ``owners`` what it consists of, largest first.
    """

    batch_size: int | None
    step: int
    events: int
    moments: tuple[StepMoment, ...]
    peak: int
    owners: tuple[Owner, ...]

    @property
    def peak_bytes(self) -> int:
        """Allocated memory at the peak."""
        return self.moments[self.peak].allocated_bytes


@dataclasses.dataclass(frozen=True)
class BatchMemory:
    """The job at one batch size on a GPU without limit: the peaks of allocated, reserved and device
    memory (reserved and the CUDA context)."""

    batch_size: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


# ---
# The memory figures of one recording.


@dataclasses.dataclass(frozen=True)
class RecordingSummary(Metered):
    """What one simulated run needed.

    ``timeline_bytes`` holds allocated memory at evenly spaced events of the last whole step.
    ``out_of_memory`` is the message of the simulated GPU where the run ended by it.
    ``protection`` is what kept the script from changing files (``None``: not known any more).
    ``pattern`` says how memory goes on from step to step, ``notes`` what the figures rest on,
    ``step`` what an optimizer step consists of.
    ``structured_notes`` both with ``assumptions`` as data, ``coverage`` what was simulated.
    ``generation`` is of the text that a script generates (``None``: it does not), ``findings`` what
    the run does wrong, ``largest`` the largest allocation at the peak that is no workspace.
    """

    METRICS: ClassVar = METRICS

    file: str
    gpu: str
    gpu_memory_bytes: int
    torch: str
    steps: int
    operators: int
    memory: MemoryFigures
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    timeline_bytes: tuple[int, ...]
    assumptions: Mapping[str, int]
    out_of_memory: str | None = None
    pattern: StepPattern | None = None
    other_processes_bytes: int = 0
    profile: str = ""
    notes: tuple[str, ...] = ()
    protection: Protection | None = None
    step: StepMakeup | None = None
    structured_notes: tuple[Note, ...] = ()
    coverage: Coverage | None = None
    generation: Generation | None = None
    findings: tuple[Finding, ...] = ()
    largest: Allocation | None = None

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {"format": "trainfit-memory", "version": 1, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`."""
        return self.memory.quantities()


# ---
# What ``trainfit memory`` explains of one recording, or of two. All sizes are bytes.


_REPORT: Final = Format.of("trainfit-memory-report", "trainfit memory --json")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One allocation: bytes charged, kind, and the operator that made it, with its module
    ("": none), phase, step (from 1) and the user's line, where known."""

    nbytes: int
    kind: str
    operator: str
    module: str
    phase: str
    step: int
    line: str | None


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in the run: the allocation that happened there.

    ``through_step`` is how far the step had come, as a share of its events.
    """

    step: int
    phase: str
    operator: str
    module: str
    line: str | None
    through_step: float


@dataclasses.dataclass(frozen=True)
class Peak:
    """What is allocated at the peak, and when that is; the parts sum up to ``allocated``."""

    allocated_bytes: int
    moment: Moment
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    largest: tuple[Allocation, ...]


@dataclasses.dataclass(frozen=True)
class Remaining:
    """What is there between steps, by kind.

    ``after_step`` is alive when the last optimizer step ends, ``kept`` of it since the step
    before (``None`` after one step only): what differs is allocated in each step.
    """

    after_step_bytes: Mapping[str, int]
    kept_bytes: Mapping[str, int] | None
    context_bytes: int


@dataclasses.dataclass(frozen=True)
class OptimizerUse:
    """An optimizer on parameters of the recorded sizes, simulated; bytes as asked for.

    ``between_steps`` are parameters, gradients and the optimizer's state, ``peak`` the most
    during an optimizer step. ``reason`` says why there is no figure.
    """

    name: str
    between_steps_bytes: int | None
    peak_bytes: int | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerTable:
    """Optimizers on the parameters that are trained; ``frozen`` ones come on top.

    ``present`` is the recorded optimizer's class, and ``present_bytes`` what parameters,
    gradients and state take after a step in the recording itself.
    """

    trained_bytes: int
    frozen_bytes: int
    present: str
    present_bytes: int
    rows: tuple[OptimizerUse, ...]


@dataclasses.dataclass(frozen=True)
class BatchPoint:
    """One batch size: figures from a replay, and what the straight line gives for device
    memory."""

    batch_size: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    line_bytes: int
    fits: bool
    where: str


@dataclasses.dataclass(frozen=True)
class PeakMove:
    """A batch size at which the peak is elsewhere than at all smaller ones down to the last
    move."""

    batch_size: int
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class BatchLaw:
    """Memory as a function of the batch size: ``base + batch * per_sample`` bytes.

    ``law`` is "proportional" where the two recordings follow one, else "none" with the
    ``reason``. ``allocated_*`` hold exactly (before the allocator's rounding) as long as the
    peak stays where it is at the larger recorded batch size, but for ``workspace`` models;
    ``device_*`` is the line nearest to ``points`` (least squares). ``largest_batch`` is the
    largest that fits, ``largest_jump`` the largest growth of reserved memory between two
    neighbouring batch sizes looked at.
    """

    law: Literal["proportional", "none"]
    batches: tuple[int, int]
    reason: str = ""
    allocated_base_bytes: int = 0
    allocated_per_sample_bytes: float = 0.0
    per_sample_by_kind_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    per_sample_by_module_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    device_base_bytes: int = 0
    device_per_sample_bytes: float = 0.0
    points: tuple[BatchPoint, ...] = ()
    moves: tuple[PeakMove, ...] = ()
    largest_batch: int | None = None
    largest_jump_bytes: int = 0
    largest_jump_at: int | None = None


@dataclasses.dataclass(frozen=True)
class Fragmentation:
    """The caching allocator at the peak of allocated memory.

    ``inactive_split`` is free memory inside of segments that are in use, ``peak_reserved``
    the most that was reserved at any time. ``segments`` counts cudaMalloc'ed ones.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    largest_free_block_bytes: int
    inactive_split_bytes: int
    segments: int


@dataclasses.dataclass(frozen=True)
class SettingOutcome:
    """The recorded stream under an allocator setting.

    ``setting`` is what was changed ("" for the current ones), ``environment`` the variable
    that has all settings ("" for none). ``retries`` counts the times the cache had to be
    given back at the GPU's capacity, which stops all work on it.
    """

    setting: str
    environment: str
    fits: bool
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    device_allocations_per_step: int | None


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Everything that ``trainfit memory`` says. ``batches`` without law: one recording only.

    ``second_run`` is the command for the second recording, where there is only one, and
    ``second_file`` what that writes.
    ``timeline`` are the peaks of equal parts of the last whole step, ``timeline_phases`` the
    phase of each. ``step`` is what an optimizer step consists of, ``findings`` say what should not
    be in the memory at its peak. ``out_of_memory`` is the message of the simulated GPU where the
    run ended by it, ``coverage`` what of a run was among its steps (``None``: nobody looked).
    """

    file: str
    gpu: str
    gpu_memory_bytes: int
    torch: str
    batch_size: int | None
    memory: MemoryFigures
    fits: bool
    peak: Peak
    remaining: Remaining | None
    optimizers: OptimizerTable | None
    pattern: StepPattern
    fragmentation: Fragmentation
    settings: tuple[SettingOutcome, ...]
    best_setting: SettingOutcome | None
    batches: BatchLaw | None
    second_run: str
    second_file: str
    timeline_bytes: tuple[int, ...]
    timeline_phases: tuple[str, ...]
    notes: tuple[str, ...]
    assumptions: Mapping[str, int]
    step: StepMakeup | None = None
    findings: tuple[Finding, ...] = ()
    out_of_memory: str | None = None
    coverage: Coverage | None = None

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {**_REPORT.head(), **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)


# ---
# Parts of a hand formula and of the simulation. All sizes are bytes.


_BY_HAND: Final = Format.of("trainfit-memory-by-hand", "trainfit memory --by-hand --json")


@dataclasses.dataclass(frozen=True)
class HandRow:
    """One part: what the formula has for it (``None``: it does not count it), and what of the
    simulated peak belongs to it."""

    name: str
    by_hand_bytes: int | None
    simulated_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.simulated_bytes - (self.by_hand_bytes or 0)


@dataclasses.dataclass(frozen=True)
class DifferenceCause:
    """A reason for a part of the difference: ``nbytes`` is what it adds to the simulated figure
    (negative: what it removes), ``rows`` the same by the rows it belongs to.

    ``operators`` are those with the largest part, where that says something.
    """

    name: str
    nbytes: int
    rows: Mapping[str, int]
    operators: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelPart:
    """Activations of a part of the model: by hand, and what of them the peak holds."""

    path: str
    by_hand_bytes: int
    simulated_bytes: int


@dataclasses.dataclass(frozen=True)
class HandReport:
    """The formula ``parameters x bytes + activations x bytes + input, and 10 to 30% for the
    rest`` compared with the peak of a recording.

    ``rows`` sum up to ``by_hand`` and to the simulated peak, ``allocated``; ``causes`` and
    ``unexplained`` to the difference. ``unexplained_rows`` has the parts of the latter, which can
    cancel each other out. ``buffer`` is what 10% and 30% of ``by_hand`` are; ``doubled`` is the sum
    with each activation counted twice, for its gradient. ``most_temporaries`` is the most that
    temporaries (gradients of activations among them) had at once in the peak's step.
    ``state_bytes`` are the optimizer's for a parameter (``None``: the formula has no figure).
    ``compute`` is the type that the forward pass multiplies in, ``activation_bytes`` those of one
    number of it.
    """

    file: str
    gpu: str
    torch: str
    batch_size: int | None
    parameters: int
    optimizer: str
    state_bytes: int | None
    compute: str
    activation_bytes: int
    moment: Moment
    rows: tuple[HandRow, ...]
    causes: tuple[DifferenceCause, ...]
    unexplained_bytes: int
    unexplained_rows: Mapping[str, int]
    by_hand_bytes: int
    buffer_bytes: tuple[int, int]
    doubled_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    most_temporaries_bytes: int
    parts: tuple[ModelPart, ...]

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {**_BY_HAND.head(), **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)


# ---
# What ``trainfit memory`` explains of a memory snapshot that PyTorch wrote. All sizes are bytes.


@dataclasses.dataclass(frozen=True)
class SnapshotOwner:
    """Blocks that the same line of code made by the same operator.

    Attributes
    ----------
    kind: A kind of memory as of simulated runs, "backward" (made by the backward pass: gradients of
        activations, and with ``stacks="python"`` all that it makes), "loaded" (read from a file),
        "other" (outside of modules), "before_history" or "no_stack".
    line: Innermost line of code outside of PyTorch; ``None``: not recorded.
    user_line: Innermost line outside of installed packages.
    in_module: Whether a module's call made it.
    """

    kind: str
    operator: str
    line: str | None
    user_line: str | None
    in_module: bool
    nbytes: int
    blocks: int
    largest_bytes: int


@dataclasses.dataclass(frozen=True)
class SnapshotReport(ResultFile):
    """One GPU at one moment of its history.

    Attributes
    ----------
    why: What the moment is: the last request that failed, the history's peak, or the end.
    gpu_index: The GPU of the process that it is about.
    other_gpus_bytes: Allocated on the others ("GPU 1"), when the snapshot was written.
    event, events: Place of the moment in the history, and the history's entries.
    begins_before: Memory that was there before the history begins.
    requested_bytes, device_free_bytes: Of the request that failed; ``None``: none did, or the file
        does not say.
    reserved_bytes: By PyTorch, tensors and cache together.
    largest_free_bytes: The largest free block of the cache; ``None``: cannot be told for a moment
        before the end.
    failures: Requests that failed in the history.
    files_bytes: Memory made within modules by the file of the code that made it.
    replayed: Whether the history, replayed through the allocator's model, reserves what it did.
    """

    FILE: ClassVar = Format.of("trainfit-memory-snapshot", "trainfit memory SNAPSHOT.pickle --json")

    file: str
    why: Literal["out_of_memory", "peak", "snapshot"]
    gpu_index: int
    other_gpus_bytes: Mapping[str, int]
    event: int
    events: int
    begins_before_bytes: int
    allocated_bytes: int
    pending_bytes: int
    reserved_bytes: int
    requested_bytes: int | None
    device_free_bytes: int | None
    largest_free_bytes: int | None
    failures: int
    conf: str | None
    by_kind_bytes: Mapping[str, int]
    files_bytes: Mapping[str, int]
    owners: tuple[SnapshotOwner, ...]
    replayed: bool
    settings: tuple[SettingOutcome, ...]
    best_setting: SettingOutcome | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether no request failed."""
        return self.why != "out_of_memory"
