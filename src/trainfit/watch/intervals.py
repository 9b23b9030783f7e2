"""95% intervals of what changed between groups of runs, by resampling their steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.runs.tables import Table
from trainfit.watch.view import PHASES, RankView, RunView, completed, is_light

# ---
# Resampling of steps that depend on one another: the circular moving-block bootstrap.
#
# Step times are autocorrelated (queues, clocks, caches) and heavy-tailed, so that neither a t-test
# nor a bootstrap of single steps holds. Blocks of steps in a row keep what depends on what
# (Politis & Romano 1992, "A circular block-resampling procedure for stationary data"); their length
# follows from the autocorrelation (Politis & White 2004, "Automatic block-length selection for the
# dependent bootstrap", with the correction of Patton, Politis & White 2009).


Rows = NDArray[np.float64]

REPLICATES: Final = 2000
#: Rows that are resampled at most: of longer runs, sums of steps in a row.
_MOST_ROWS: Final = 2000
#: Percentile at which outliers are cut before autocorrelation is looked for: a single pause of
#: seconds hides that of all other steps.
_CUT: Final = 95
#: Times Politis & White's length, which makes the variance's error least: intervals hold the truth
#: as often as they say only with longer blocks, as what a variance lacks counts for more there
#: than its scatter (Sun, Phillips & Jin 2008, "Optimal bandwidth selection in
#: heteroskedasticity-autocorrelation robust testing").
_LONGER: Final = 3.0


def block_length(values: Rows) -> int:
    """Steps of a block by Politis & White's rule, from 1 to a third of ``values``, shape (n,)."""
    cut = np.minimum(values, np.percentile(values, _CUT))
    return max(_automatic(values), _automatic(cut))


def _automatic(values: Rows) -> int:
    count = len(values)
    around = values - values.mean()
    variance = float(around @ around) / count
    if count < 9 or variance <= 1e-24 * float(values.mean()) ** 2:
        return 1
    run = max(5, int(math.log10(count)))
    limit = min(math.ceil(math.sqrt(count)) + run, count // 2)
    covariances = _autocovariances(around, limit)
    last = _last_correlated(np.abs(covariances / variance), run, count)
    lags = np.arange(1, min(2 * max(last, 1), limit) + 1)
    # The flat-top window: 1 up to the half of the lags, then falling to 0.
    weights = np.minimum(1.0, 2 * (1 - lags / len(lags)))
    used = 2 * weights * covariances[lags]
    spectrum = variance + float(used.sum())
    if spectrum <= 0:
        return 1
    slope = float((used * lags).sum())
    length = (2 * slope**2 / (4 / 3 * spectrum**2) * count) ** (1 / 3)
    return int(max(1, min(math.ceil(_LONGER * length), 3 * math.sqrt(count), count // 3)))


def _autocovariances(around: Rows, limit: int) -> Rows:
    """The autocovariances at lags 0 to ``most``, by a Fourier transform."""
    count = len(around)
    transformed = np.fft.rfft(around, 2 * count)
    autocovariances: Rows = np.fft.irfft(np.abs(transformed) ** 2)[: limit + 1] / count
    return autocovariances


def _last_correlated(correlations: Rows, run: int, count: int) -> int:
    """The lag after which ``run`` correlations in a row are insignificant; the largest lag where
    there is none."""
    small = correlations[1:] < 2 * math.sqrt(math.log10(count) / count)
    for lag in range(len(small) - run + 1):
        if small[lag : lag + run].all():
            return lag
    return len(small)


@dataclass(frozen=True)
class Resampled:
    """Sums over a run's steps, as they are and resampled.

    ``totals`` has shape (columns,), ``draws`` (replicates, columns). ``blocks`` is how many blocks
    the run has: about its number of independent steps.
    """

    totals: Rows
    draws: Rows
    blocks: float


def resample(rows: Rows, random: np.random.Generator, *, replicates: int) -> Resampled:
    """Resample ``rows``, shape (steps, columns), in blocks whose length suits the first column."""
    rows = _shortened(rows)
    count = len(rows)
    length = block_length(rows[:, 0])
    whole, rest = divmod(count, length)
    # A draw is so many whole blocks, and a shorter one that makes it as long as the run is.
    draws = _drawn(rows, length, whole, replicates, random)
    if rest:
        draws += _drawn(rows, rest, 1, replicates, random)
    return Resampled(rows.sum(axis=0), draws, count / length)


def _shortened(rows: Rows) -> Rows:
    """Sums of steps in a row where there are very many."""
    if len(rows) <= _MOST_ROWS:
        return rows
    starts = np.linspace(0, len(rows), _MOST_ROWS, endpoint=False).astype(np.intp)
    found: Rows = np.add.reduceat(rows, starts, axis=0)
    return found


def _drawn(
    rows: Rows, length: int, blocks: int, replicates: int, random: np.random.Generator
) -> Rows:
    """Sums of ``blocks`` blocks each, which begin anywhere and go on at the run's beginning."""
    count = len(rows)
    around = np.concatenate([np.zeros((1, rows.shape[1])), rows, rows[:length]]).cumsum(axis=0)
    sums = around[length : length + count] - around[:count]
    often = random.multinomial(blocks, np.full(count, 1 / count), size=replicates)
    found: Rows = often.astype(np.float64) @ sums
    return found


#: An effect of columns' sums before and after, both of shape (…, columns): shape (…).
Effect = Callable[[Rows, Rows], Rows]

_NORMAL: Final = NormalDist()
_Z: Final = _NORMAL.inv_cdf(0.975)
#: Half-widths of an interval from which on an effect is found in 80 of 100 comparisons.
_POWER: Final = 1 + _NORMAL.inv_cdf(0.80) / _Z


@dataclass(frozen=True)
class EffectEstimate:
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

    def estimate(self, effect: Effect) -> EffectEstimate:
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
        return EffectEstimate(value, value - max(below, between), value + max(above, between))

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
            blocks = sum(run.blocks for run in runs)
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
        squares = sum(float(np.var(value)) * len(value) for value in values)
        variance = squares / free * sum(1 / len(value) for value in values)
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
    return z + sum(term / free ** (index + 1) for index, term in enumerate(terms))


def _sum(runs: Sequence[Resampled]) -> Resampled:
    """The runs of a group together, each with its own steps."""
    return functools.reduce(
        lambda one, two: Resampled(
            one.totals + two.totals, one.draws + two.draws, one.blocks + two.blocks
        ),
        runs,
    )


# ---
# The columns of a run's steady steps that are compared, and its peaks.


#: Columns of :attr:`SteadyRows.rows`. Time is without evaluations and checkpoints, of which a run
#: has as many as it is long; "busy" is the time of the GPU's stream within "looked_at".
COLUMNS: Final = ("time", "samples", "steps", "busy", "looked_at", *PHASES, "other")
TIME, SAMPLES, STEPS, BUSY, LOOKED_AT = range(5)
_APART: Final = ("checkpoint", "evaluation")


@dataclass(frozen=True)
class SteadyRows:
    """Steady steps of a run's first rank; ``rows`` has shape (rows, columns), 0 where a column was
    not measured, which ``known`` tells. A row is a step, or the sums of one that was recorded in
    detail and of the light ones after it, whose phases are known by it alone."""

    rows: Rows
    known: frozenset[str]
    batch: float | None
    """Median samples of a step, of this rank."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def steps(self) -> int:
        return int(self.rows[:, STEPS].sum())


def measured(view: RunView) -> SteadyRows:
    """The measured columns of a run; without a step that has no length."""
    steps = view.judged.steps
    steps = steps[np.isfinite(steps["step_s"]) & (steps["step_s"] > 0)]
    light, steps = is_light(steps), completed(steps)
    columns = {name: np.asarray(steps[f"{name}_s"], dtype=np.float64) for name in PHASES}
    known = {name for name, values in columns.items() if np.isfinite(values).any()}
    columns = {name: np.nan_to_num(values) for name, values in columns.items()}
    whole = np.asarray(steps["step_s"], dtype=np.float64)
    columns["time"] = np.maximum(whole - sum(columns[name] for name in _APART), 1e-9)
    columns["other"] = np.maximum(whole - sum(columns[name] for name in PHASES), 0.0)
    columns["steps"] = np.ones(len(steps))
    columns["samples"] = np.maximum(np.asarray(steps["samples"], dtype=np.float64), 0.0)
    columns["busy"], columns["looked_at"] = _busy(steps, whole)
    told = steps["samples"] > 0
    if len(steps) and told.all():
        known.add("samples")
    if len(steps) and np.mean(columns["looked_at"] > 0) >= 0.5:
        known.add("busy")
    rows = np.stack([columns[name] for name in COLUMNS], axis=1)
    if light.any():
        rows = np.add.reduceat(rows, np.union1d([0], np.flatnonzero(~light)))
    batch = float(np.median(steps["samples"][told])) if told.any() else None
    return SteadyRows(rows, frozenset(known), batch)


def _busy(steps: Table, whole: Rows) -> tuple[Rows, Rows]:
    """Seconds of each step in which the GPU's stream had work, and the step's, 0 where CUDA events
    did not tell."""
    gap = np.asarray(steps["gpu_gap_s"], dtype=np.float64)
    rest = np.maximum(0.0, whole - np.asarray(steps["gpu_s"], dtype=np.float64))
    idle = np.minimum(np.where(np.isfinite(gap), gap, rest), whole)
    told = np.isfinite(idle)
    return np.where(told, whole - np.nan_to_num(idle), 0.0), np.where(told, whole, 0.0)


def peak_gpu_bytes(view: RunView) -> int | None:
    """Peak bytes of tensors, on the rank that had most; ``None``: not measured."""
    found = [int(rank.steps["peak_allocated_bytes"].max(initial=-1)) for rank in view.ranks]
    return max((each for each in found if each >= 0), default=None)


def peak_ram_bytes(view: RunView) -> int | None:
    """Resident memory of the run's processes together, at most; ``None``: not sampled. Pages that
    processes share count in each."""
    table = _resident(view.judged)
    if not len(table):
        return None
    _, places = np.unique(table["time_s"], return_inverse=True)
    return int(np.bincount(places, np.asarray(table["rss_bytes"], dtype=np.float64)).max())


def _resident(rank: RankView) -> Table:
    first, last = rank.window
    table = rank.run.processes
    within: Table = table[
        (table["time_s"] >= first) & (table["time_s"] <= last) & (table["rss_bytes"] >= 0)
    ]
    return within
