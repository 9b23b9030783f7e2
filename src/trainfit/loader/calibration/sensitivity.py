"""Sensitivity of batch production to the speed of the cores.

The watch's piece of work (:mod:`trainfit.hardware.cpu.core_speed`) and a data set's code are not
slowed alike: code that waits for memory is slowed less, code with more instructions at a time
more. Each batch tells: what it took (CPU time), against how fast its core was meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware.cpu.core_speed import WorkPieces
from trainfit.loader.measure.instrument import BEGAN, COLUMNS, CORE, CPU, WALL, Records, collected
from trainfit.loader.measure.run import Run

Values = NDArray[np.float64]
Columns = tuple[Values, Values, Values]
#: By which power of the cores' speed a loader's rate changes, where its own batches do not tell:
#: from 0.5 (video decoding) and 0.6 (JPEG, gzip) over 0.8 (memory-mapped arrays) to 1.1 (Python).
SENSITIVITY: Final = 0.8
_SPREAD: Final = 0.25
#: The same of Python's garbage collections, which wait for memory (docs/figures.md: 96 of them).
OF_COLLECTIONS: Final = 0.6
_LEAST, _MOST = 0.3, 1.6
#: The core's speed is taken from at least so long around a batch, in seconds (five pieces), and
#: from so many pieces.
_AROUND_S: Final = 0.1
LEAST_PIECES: Final = 4
#: Batches that each worker makes first, while it settles.
_FIRST: Final = 4
#: Of the batches' times, the share at either end that is drawn in: collections, interruptions.
_ODD: Final = 0.02
#: Standard deviation of the speed's logarithm that is there without any neighbour: what runs
#: between two pieces cools their caches. It says nothing of the neighbours' effect.
_COOL: Final = 0.015


def sensitivity(groups: Iterable[Sequence[Run]], pieces: WorkPieces) -> float:
    """By which power of the cores' speed these runs' work changes.

    The runs of a group are of the same settings. The slope is of the logarithms of what batches
    took (CPU time) over those of their cores' speeds, drawn to :data:`SENSITIVITY` as far as
    they say little. A speed that is known by few pieces would make a slope too low: every other
    piece is one estimate, the others a second, and only what both say is speed (an instrumental
    variable).
    """
    seen = _Seen(*_joined([_seen(group, pieces) for group in groups]))
    certainty = 1 / _SPREAD**2
    slope, error = seen.slope()
    known = 1 / error**2 if error else 0.0
    drawn = (slope * known + SENSITIVITY * certainty) / (known + certainty)
    return float(min(_MOST, max(_LEAST, drawn)))


@dataclass(frozen=True)
class _Seen:
    """Of each batch the logarithm of its rate, and two estimates of that of its core's speed;
    each without the mean of its group."""

    rate: Values
    speed: Values
    again: Values

    def slope(self) -> tuple[float, float]:
        """Of the rates over the speeds, and its standard error; 0 and 0 where there is no data."""
        common = float(self.speed @ self.again)
        if len(self.rate) < 2 * _FIRST or common <= 0:
            return 0.0, 0.0
        speed = (self.speed + self.again) / 2
        slope = float(speed @ self.rate) / common
        spread = float(np.sum((self.rate - slope * speed) ** 2)) / len(self.rate)
        by_chance = spread * float(speed @ speed) / common**2
        return slope, float(np.sqrt(by_chance + _COOL**2 * len(self.rate) / common))


def _seen(group: Sequence[Run], pieces: WorkPieces) -> Columns:
    records = [each[_FIRST:] for run in group for each in run.fetches if _is_placed(each)]
    fetched = np.concatenate(records) if records else np.zeros((0, COLUMNS))
    cores = [float(core) for core in np.unique(pieces.core)]
    rate, speed, again = _joined(
        [_of_core(fetched[fetched[:, CORE] == core], pieces.of(core)) for core in cores]
    )
    if not len(rate):
        return rate, speed, again
    rate = np.clip(rate, *np.quantile(rate, (_ODD, 1 - _ODD)))
    return rate - rate.mean(), speed - speed.mean(), again - again.mean()


def _is_placed(records: Records) -> bool:
    return records.ndim == 2 and records.shape[1] > CORE


def _joined(parts: Sequence[Columns]) -> Columns:
    """Rates, speeds and the second speeds, each of all parts."""
    none = np.zeros(0), np.zeros(0), np.zeros(0)
    rate, speed, again = (np.concatenate(each) for each in zip(none, *parts, strict=True))
    return rate, speed, again


def around(fetched: Records, pieces: WorkPieces) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of one core's batches, the first piece near each, and the one after the last."""
    wider = np.maximum(0.0, _AROUND_S - fetched[:, WALL]) / 2
    first = np.searchsorted(pieces.at, fetched[:, BEGAN] - wider)
    last = np.searchsorted(pieces.at, fetched[:, BEGAN] + fetched[:, WALL] + wider)
    return first, last


def _of_core(fetched: Records, pieces: WorkPieces) -> Columns:
    """Logarithms of rates and speeds of the batches made on one core."""
    speeds = -np.log(pieces.took)
    first, last = around(fetched, pieces)
    # Collections come every so many batches, whatever the cores' speed.
    worked = fetched[:, CPU] - collected(fetched)
    told = (last - first >= LEAST_PIECES) & (worked > 0)
    first, last = first[told], last[told]
    even, odd = (
        _means(np.where(np.arange(len(speeds)) % 2 == side, speeds, np.nan), first, last)
        for side in (0, 1)
    )
    return -np.log(worked[told]), even, odd


def _means(values: Values, first: NDArray[np.intp], last: NDArray[np.intp]) -> Values:
    """Of the values that are not nan, from first to before last."""
    sums = np.concatenate([[0.0], np.nancumsum(values)])
    counts = np.concatenate([[0], np.cumsum(~np.isnan(values))])
    means: Values = (sums[last] - sums[first]) / (counts[last] - counts[first])
    return means
