"""How memory goes on from one optimizer step to the next."""

from __future__ import annotations

import dataclasses
from typing import Literal

Course = Literal[
    "settled",  # from some step on, every one (or every period of them) takes the same
    "growing",  # each step leaves more behind than the one before
    "irregular",  # neither: the steps differ, as with batches of variable shape
    "unknown",  # too few steps to tell
]


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
    ``steps_until_full`` counts from the start, and is ``None`` where nothing grows.
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
