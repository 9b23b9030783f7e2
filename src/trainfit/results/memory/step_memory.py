"""Allocated memory over one optimizer step, by kind, and who owns it at its peak. Bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
