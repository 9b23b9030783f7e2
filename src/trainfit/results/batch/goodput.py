"""Goodput: how fast a training learns at each batch size, samples/s times a sample's worth."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.results.batch.step_times import StepTime

#: Points with this share of the best goodput count as being as good.
NEARLY: Final = 0.95


@dataclasses.dataclass(frozen=True)
class GoodputPoint:
    """``efficiency`` is the progress of a sample compared with one at the reference batch size,
    ``per_s`` goodput: samples/s of the reference batch size that learn as much. ``low`` and
    ``high`` are its range over the noise scale's interval."""

    step: StepTime
    efficiency: float
    per_s: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class GoodputCurve:
    """Points by batch size, smallest first; ``best`` is the place of the best one.

    ``best_from`` and ``best_to`` are the batch sizes that are best at the two ends of the noise
    scale's interval; ``flat_from`` and ``flat_to`` the smallest and largest batch with 95% of the
    best goodput.
    """

    reference: int
    points: tuple[GoodputPoint, ...]
    best: int
    best_from: int
    best_to: int
    flat_from: int
    flat_to: int

    @property
    def best_point(self) -> GoodputPoint:
        """The point with the highest goodput."""
        return self.points[self.best]
