"""What is known of other batch sizes of a job."""

from __future__ import annotations

import dataclasses

from trainfit.memory.stream.affine import AffineStream
from trainfit.memory.stream.replay import Replay
from trainfit.plan.steps.curve import Curve
from trainfit.results.plan.configuration import BatchCheck, BatchLimits
from trainfit.results.plan.result import Basis
from trainfit.results.runs.recording import Recording

#: A recording at each of two batch sizes.
RecordedPair = tuple[tuple[int, Recording], ...]


@dataclasses.dataclass(frozen=True)
class Batches:
    """Results for other batch sizes; ``recommended_peak`` is the peak at the recommended one.

    ``recommended`` and ``limits``: see :mod:`trainfit.plan.sizing.recommendation`.
    ``basis_detail`` says why, where ``basis`` is not "two traces"; ``law`` is there where it is,
    ``pair`` the recordings that it is from, and ``curve`` the steps at other batch sizes.
    ``check`` says whether the recommended one was simulated.
    """

    basis: Basis
    basis_detail: str = ""
    largest: int | None = None
    recommended: int | None = None
    recommended_peak: Replay | None = None
    law: AffineStream | None = None
    pair: RecordedPair = ()
    limits: BatchLimits | None = None
    curve: Curve = dataclasses.field(default_factory=Curve)
    check: BatchCheck | None = None

    @property
    def by_noise(self) -> int | None:
        """As of :attr:`BatchLimits.by_noise`."""
        return self.limits.by_noise if self.limits is not None else None
