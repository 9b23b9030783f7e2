"""What an optimizer step consists of, and how memory goes on from one to the next."""

from __future__ import annotations

import dataclasses
from typing import Literal

Course = Literal[
    "settled",  # from some step on, every one (or every period of them) uses the same
    "growing",  # each step leaves more behind than the one before
    "irregular",  # neither: the steps differ, as with batches of variable shape
    "unknown",  # too few steps to tell
]


#: What told how many samples an optimizer step has: the batches that the DataLoader gave, or the
#: calls of the model that a backward pass followed.
StepSource = Literal["DataLoader", "model calls", "unknown"]

#: Libraries whose training loop makes the step; "" is the script's own.
Framework = Literal["", "Accelerate", "Lightning", "Transformers"]


@dataclasses.dataclass(frozen=True)
class StepMakeup:
    """What one optimizer step consists of: ``micro_batch`` samples × ``accumulation``
    micro-batches = ``effective_batch`` samples, as the simulated steps had it most often.

    The three are ``None`` where they cannot be told; ``why`` says why, and what would be needed.
    ``loader_batches`` are the batches that the DataLoader gives for a step (``None``: it gives
    none). ``per_step`` are the micro-batches of each simulated step; ``varied`` says whether the
    steps differed, the shorter last one of an epoch included. ``loop`` is whose loop makes the
    step, ``where`` the user's line that it is called from.
    """

    micro_batch: int | None
    accumulation: int | None
    effective_batch: int | None
    source: StepSource = "unknown"
    loader_batches: int | None = None
    per_step: tuple[int, ...] = ()
    varied: bool = False
    loop: Framework = ""
    where: str | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class GrowthSource:
    """Where memory that stays behind comes from: ``bytes_per_step`` on average.

    ``line`` is the user's line that ran the operator, where it is known.
    """

    bytes_per_step: int
    operator: str
    module: str
    kind: str
    phase: str
    line: str | None


@dataclasses.dataclass(frozen=True)
class StepPattern:
    """What the simulated steps say of all others.

    ``peak_bytes`` and ``end_bytes`` are, per step, the largest and the last sum of all
    allocations, each rounded up to 512 bytes (the allocator can charge a little more for a
    block that is not split). ``settled_from`` counts steps from 1; ``period`` is in steps.
    ``steps_until_full`` counts from the start, and is ``None`` where nothing grows. ``unit`` is
    what the script does instead of optimizer steps where it does not train.
    """

    course: Course
    steps: int
    peak_bytes: tuple[int, ...]
    end_bytes: tuple[int, ...]
    settled_from: int | None = None
    period: int | None = None
    growth_bytes_per_step: int | None = None
    steps_until_full: int | None = None
    sources: tuple[GrowthSource, ...] = ()
    unit: Literal["optimizer step", "model call"] = "optimizer step"
