"""What ``trainfit memory`` explains of one recording, or of two. All sizes are bytes.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.runs.steps import StepMakeup, StepPattern

FORMAT: Final = "trainfit-memory-report"
VERSION: Final = 1


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
    """At ``batch_size`` the peak is elsewhere than at all smaller ones down to the last move."""

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

    ``second_run`` is the command for the second recording, where there is only one.
    ``timeline`` are the peaks of equal parts of the last whole step, ``timeline_phases`` the
    phase of each. ``step`` is what an optimizer step consists of.
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
    timeline_bytes: tuple[int, ...]
    timeline_phases: tuple[str, ...]
    notes: tuple[str, ...]
    assumptions: Mapping[str, int]
    step: StepMakeup | None = None

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)
