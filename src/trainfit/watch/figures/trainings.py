"""Several trainings of one script, one after the other: one median of all would be of none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainfit.results.watch.run import RankRecord
from trainfit.results.watch.tables import Table
from trainfit.watch.figures import thresholds

#: Median steps of trainings that differ by less than this factor are judged together: folds of a
#: cross-validation.
_ALIKE: Final = 1.25


@dataclass(frozen=True)
class Training:
    """Steps from ``first`` to ``last``; ``step_s`` is their median, seconds."""

    first: int
    last: int
    step_s: float
    seconds: float


def trainings(rank: RankRecord) -> tuple[Training, ...]:
    """Trainings of a script, as its events "restart" tell, in order; those of too few steps to
    judge are left out."""
    starts = sorted({event.step for event in rank.events if event.kind == "restart"})
    edges = [-np.inf, *starts, np.inf]
    found = []
    for first, end in itertools.pairwise(edges):
        steps = _between(rank.steps, first, end)
        if len(steps) >= thresholds.LEAST_STEPS:
            lengths = np.asarray(steps["step_s"], dtype=np.float64)
            numbers = steps["step"]
            median, total = float(np.median(lengths)), float(np.sum(lengths))
            found.append(Training(int(numbers.min()), int(numbers.max()), median, total))
    return tuple(found)


def judged(found: Sequence[Training]) -> Training | None:
    """The longest of trainings whose steps differ; ``None``: all steps are judged together."""
    if len(found) < 2:
        return None
    lengths = [each.step_s for each in found]
    if max(lengths) <= _ALIKE * min(lengths):
        return None
    return max(found, key=lambda each: each.seconds)


def judged_steps(rank: RankRecord) -> Table:
    """The rows of the training that is judged."""
    training = judged(trainings(rank))
    if training is None:
        return rank.steps
    return _between(rank.steps, training.first, training.last + 1)


def _between(steps: Table, first: float, end: float) -> Table:
    chosen: Table = steps[(steps["step"] >= first) & (steps["step"] < end)]
    return chosen
