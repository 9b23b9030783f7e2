"""Remedies that lower a job's memory: what was tried, and what each costs."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from trainfit.results.memory.figures import MemoryFigures

#: How the figures of a remedy were obtained: the changed script was simulated; the recording
#: was replayed with another allocator; the recording was replayed without the tensors that
#: would go (not simulated). Or why there are none: the trial failed, or it does not apply.
RemedyStatus = Literal["simulated", "replayed", "estimated", "failed", "not applicable"]

#: What becomes of the training: the same up to rounding; the same in lower precision; another
#: one, whose result has to be compared.
Changes = Literal["nothing", "precision", "training"]

#: Share of the device memory below which a remedy has won nothing worth a change.
LEAST_GAIN: Final = 0.002

#: Share of a step's time below which it has not become faster: the model is no finer.
LEAST_FASTER: Final = 0.02


@dataclasses.dataclass(frozen=True)
class ExtraCompute:
    """The work of one optimizer step against the job as written; 0.25 is a quarter more.

    ``flops_share`` counts matmuls, convolutions and attention; ``traffic_share`` the
    bytes that all operators read and write; ``operators_share`` how many operators run.
    """

    flops_share: float
    traffic_share: float
    operators_share: float


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One remedy.

    ``memory``, ``fits``, ``saved_bytes`` (of device memory; negative: it uses more),
    ``extra`` and ``cost_percent`` are ``None`` where there are no figures; ``largest_batch`` also
    where no law of the batch size was cheap to get. ``step_change`` is that of the time of an
    optimizer's step (-0.1: 10% shorter), predicted for this GPU. ``cost_percent`` is the price in
    percent of a step's compute: see :mod:`trainfit.plan.remedies.cost`. ``how`` are lines for
    people: what to change, and where. ``launch`` is the command with it, where the command changes.
    """

    name: str
    title: str
    status: RemedyStatus
    reason: str
    changes: Changes
    changes_detail: str
    found: str = ""
    memory: MemoryFigures | None = None
    fits: bool | None = None
    saved_bytes: int | None = None
    largest_batch: int | None = None
    extra: ExtraCompute | None = None
    cost_percent: float | None = None
    how: tuple[str, ...] = ()
    launch: str | None = None
    step_change: float | None = None


@dataclasses.dataclass(frozen=True)
class Combination:
    """Several remedies at once, simulated together, because none suffices by itself.

    ``batch_size`` is what goes into the command or the DataLoader, smaller than the present
    one where gradients are accumulated. ``memory`` is ``None`` where they could not be
    simulated together; ``failure`` says why.
    """

    names: tuple[str, ...]
    memory: MemoryFigures | None
    fits: bool
    batch_size: int | None
    extra: ExtraCompute | None
    launch: str
    failure: str = ""
    step_change: float | None = None


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Everything that was tried on a job, best first.

    ``before`` are the figures of the job as written over the same ``steps`` as the trials.
    ``combination`` is the last one tried where no remedy alone makes the job fit; ``failure``
    says why nothing could be tried.
    """

    before: MemoryFigures | None
    batch_size: int | None
    largest_batch: int | None
    steps: int
    items: tuple[Remedy, ...]
    combination: Combination | None = None
    failure: str = ""

    @property
    def won(self) -> tuple[Remedy, ...]:
        """Those that lower the memory of the job by :data:`LEAST_GAIN` or more."""
        if self.before is None:
            return ()
        least = max(1, int(LEAST_GAIN * self.before.device_bytes))
        return tuple(each for each in self.items if (each.saved_bytes or 0) >= least)

    @property
    def faster(self) -> tuple[Remedy, ...]:
        """Those that shorten the step by :data:`LEAST_FASTER` or more, the fastest first."""
        found = [each for each in self.items if (each.step_change or 0.0) <= -LEAST_FASTER]
        return tuple(sorted(found, key=lambda each: each.step_change or 0.0))
