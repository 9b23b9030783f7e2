"""95% intervals of what changed from one group of runs to another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from trainfit.watch.compare.bootstrap import REPLICATES, Resampled, Rows, resample

#: An effect of columns' sums before and after, both of shape (…, columns): shape (…).
Effect = Callable[[Rows, Rows], Rows]

_NORMAL: Final = NormalDist()
_Z: Final = _NORMAL.inv_cdf(0.975)
#: Half-widths of an interval from which on an effect is found in 80 of 100 comparisons.
_POWER: Final = 1 + _NORMAL.inv_cdf(0.80) / _Z


@dataclass(frozen=True)
class Estimate:
    """An effect with its 95% interval; ``detectable`` is how large one must be to be found in
    80 of 100 such comparisons."""

    effect: float
    low: float
    high: float

    @property
    def detectable(self) -> float:
        return _POWER * max(self.high - self.effect, self.effect - self.low)

    @property
    def is_significant(self) -> bool:
        """Does the interval leave out 0?"""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Groups:
    """Runs before and after a change, resampled. All columns are sums over steps."""

    before: tuple[Resampled, ...]
    after: tuple[Resampled, ...]

    def estimate(self, effect: Effect) -> Estimate:
        """The interval of ``effect``, the wider of two.

        That of the steps: percentiles of the block bootstrap, expanded as few blocks need it
        (Hesterberg 2015, "What teachers should know about the bootstrap"). And, where a group has
        several runs, that of their means (Student's t, with the runs as the unit): what differs
        from run to run is not in their steps. Runs that are resampled themselves would not show
        it: of two, that has half of the variance.
        """
        first, second = _sum(self.before), _sum(self.after)
        value = float(effect(first.totals, second.totals))
        draws = effect(first.draws, second.draws)
        low, high = (float(each) for each in np.percentile(draws, (2.5, 97.5)))
        factor = self._expansion(effect)
        below, above = factor * (value - low), factor * (high - value)
        between = self._between_runs(effect)
        return Estimate(value, value - max(below, between), value + max(above, between))

    def _expansion(self, effect: Effect) -> float:
        """How much wider than the percentiles: a variance that is made of k blocks is (k - 1) / k
        of the true one on average, and has as many degrees of freedom (Welch–Satterthwaite)."""
        first, second = _sum(self.before), _sum(self.after)
        drawn = (
            (effect(first.draws, second.totals), self.before),
            (effect(first.totals, second.draws), self.after),
        )
        total = corrected = squares = 0.0
        for values, runs in drawn:
            variance = float(np.var(values))
            blocks = sum(each.blocks for each in runs)
            free = max(1.0, blocks - len(runs))
            total += variance
            corrected += variance * blocks / free
            squares += (variance * blocks / free) ** 2 / free
        if total <= 0 or squares <= 0:
            return 1.0
        return t_quantile(corrected**2 / squares) / _Z * math.sqrt(corrected / total)

    def _between_runs(self, effect: Effect) -> float:
        """Half the width of the interval with runs as the unit; 0 with one in each group."""
        free = len(self.before) + len(self.after) - 2
        if free < 1:
            return 0.0
        first, second = _sum(self.before).totals, _sum(self.after).totals
        values = (
            [float(effect(run.totals, second)) for run in self.before],
            [float(effect(first, run.totals)) for run in self.after],
        )
        squares = sum(float(np.var(each)) * len(each) for each in values)
        variance = squares / free * sum(1 / len(each) for each in values)
        return t_quantile(free) * math.sqrt(variance)


def groups(
    before: Sequence[Rows], after: Sequence[Rows], *, seed: int = 0, replicates: int = REPLICATES
) -> Groups:
    """Resample the steady steps of runs, each of shape (steps, columns), of which column 0 is
    their time. The same runs give the same intervals."""
    random = np.random.default_rng(seed)
    made = [
        tuple(resample(rows, random, replicates=replicates) for rows in runs)
        for runs in (before, after)
    ]
    return Groups(made[0], made[1])


def t_quantile(free: float) -> float:
    """97.5th percentile of Student's t with ``free`` degrees of freedom, at least 2: within 1%
    (Abramowitz & Stegun 26.7.5)."""
    free, z = max(2.0, free), _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / free ** (at + 1) for at, term in enumerate(terms))


def _sum(runs: Sequence[Resampled]) -> Resampled:
    """The runs of a group together, each with its own steps."""
    return functools.reduce(
        lambda one, two: Resampled(
            one.totals + two.totals, one.draws + two.draws, one.blocks + two.blocks
        ),
        runs,
    )
