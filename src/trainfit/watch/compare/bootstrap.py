"""Resampling of steps that depend on one another: the circular moving-block bootstrap.

Step times are autocorrelated (queues, clocks, caches) and heavy-tailed, so that neither a t-test
nor a bootstrap of single steps holds. Blocks of steps in a row keep what depends on what
(Politis & Romano 1992, "A circular block-resampling procedure for stationary data"); their length
follows from the autocorrelation (Politis & White 2004, "Automatic block-length selection for the
dependent bootstrap", with the correction of Patton, Politis & White 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    most = min(math.ceil(math.sqrt(count)) + run, count // 2)
    covariances = _autocovariances(around, most)
    last = _last_correlated(np.abs(covariances / variance), run, count)
    lags = np.arange(1, min(2 * max(last, 1), most) + 1)
    # The flat-top window: 1 up to the half of the lags, then falling to 0.
    weights = np.minimum(1.0, 2 * (1 - lags / len(lags)))
    used = 2 * weights * covariances[lags]
    spectrum = variance + float(used.sum())
    if spectrum <= 0:
        return 1
    slope = float((used * lags).sum())
    length = (2 * slope**2 / (4 / 3 * spectrum**2) * count) ** (1 / 3)
    return int(max(1, min(math.ceil(_LONGER * length), 3 * math.sqrt(count), count // 3)))


def _autocovariances(around: Rows, most: int) -> Rows:
    """At lags 0 to ``most``, by a Fourier transform."""
    count = len(around)
    transformed = np.fft.rfft(around, 2 * count)
    found: Rows = np.fft.irfft(np.abs(transformed) ** 2)[: most + 1] / count
    return found


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


def resample(
    rows: Rows, random: np.random.Generator, *, by: int = 0, replicates: int = REPLICATES
) -> Resampled:
    """Resample ``rows``, shape (steps, columns), in blocks whose length suits column ``by``."""
    rows = _shortened(rows)
    count = len(rows)
    length = block_length(rows[:, by])
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
