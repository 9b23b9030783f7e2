"""The GPU's utilization over time, computed from the times of a rehearsal.

Nothing here runs a loader; times go in, figures come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.loader.rehearsal import Epoch, Rates, Timeline
from trainfit.results.loader.settings import LoaderSettings

Times = NDArray[np.float64]

#: Sample periods of ``nvmlUtilization_t.gpu`` ("between 1 second and 1/6 second, depending on
#: the product", https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html).
PERIODS_S: Final = (1 / 6, 1.0)
#: Windows of a timeline at most; a longer rehearsal has longer ones.
_MOST_WINDOWS: Final = 1800
#: Epochs of a result at most.
_MOST_EPOCHS: Final = 200
#: Column of ``made``, behind those of a worker's record.
WORKER: Final = 4


@dataclass(frozen=True)
class RehearsalRecord:
    """What a rehearsal noted down; times on the monotonic clock, in seconds.

    Of each batch: ``asked`` is when ``next`` was called (of an epoch's first: ``iter``),
    ``handed`` when it returned, ``next_cpu`` the main thread's CPU time between, ``steps`` how
    long the step took, ``epochs`` the number of its epoch, ``ready`` when the first worker
    was (of an epoch's first batch; 0: it was before, or is not known). ``made`` are the workers'
    records of batches (:mod:`trainfit.loader.measure.instrument`), each with its worker.
    """

    settings: LoaderSettings
    began: float
    ended: float
    asked: Times
    handed: Times
    next_cpu: Times
    steps: Times
    epochs: NDArray[np.int64]
    ready: Times
    made: Times = field(default_factory=lambda: np.empty((0, 5)))
    failed: bool = False
    """The end was a failure: what passed after the last step is no waiting for a batch."""
    exhausted: bool = False
    """The last epoch came to its end."""

    @property
    def total_s(self) -> float:
        return self.ended - self.began

    @property
    def busy(self) -> Times:
        """From and to when a step ran, in seconds from the beginning; shape (batches, 2)."""
        begin = self.handed - self.began
        return np.column_stack((begin, np.minimum(begin + self.steps, self.total_s)))

    @property
    def place(self) -> NDArray[np.int64]:
        """Of each batch: which of its epoch it is, from 0."""
        places: NDArray[np.int64] = np.arange(len(self.epochs))
        if len(places):
            places -= self._first[self.epochs]
        return places

    @property
    def _first(self) -> NDArray[np.int64]:
        """The first batch of each epoch."""
        found: NDArray[np.int64] = np.searchsorted(self.epochs, np.arange(self.epochs[-1] + 1))
        return found


def busy_shares(busy: Times, total_s: float, window_s: float) -> Times:
    """The share of each window of ``window_s`` in which an interval of ``busy`` runs.

    ``busy`` are intervals in order that do not overlap, within 0 and ``total_s``; shape (n, 2).
    The last window ends at ``total_s``.
    """
    if total_s <= 0:
        return np.empty(0)
    count = max(1, math.ceil(total_s / window_s - 1e-9))
    edges = np.minimum(np.arange(count + 1) * window_s, total_s)
    edges[-1] = total_s
    if not len(busy):
        return np.zeros(count)
    at = busy.ravel()
    done = np.zeros_like(at)
    done[1::2] = np.cumsum(busy[:, 1] - busy[:, 0])
    done[2::2] = done[1:-1:2]
    shares: Times = np.diff(np.interp(edges, at, done)) / np.diff(edges)
    return np.minimum(np.maximum(shares, 0.0), 1.0)


def timeline(observed: RehearsalRecord) -> Timeline:
    """In the windows of nvidia-smi, or longer ones if those were too many."""
    total = observed.total_s
    fitting = (period for period in PERIODS_S if total / period <= _MOST_WINDOWS)
    window = next(fitting, total / _MOST_WINDOWS)
    shares = busy_shares(observed.busy, total, window)
    return Timeline(window, tuple(float(share) for share in shares))


def overall_rates(observed: RehearsalRecord, batch_size: int | None) -> Rates | None:
    """Of the whole rehearsal; ``None`` if it took no time."""
    return _rates(observed, 0.0, observed.total_s, 0, batch_size)


def steady_rates(observed: RehearsalRecord, batch_size: int | None) -> Rates | None:
    """From when the queues were full for the first time; ``None`` if it was too short.

    What passed after the last step until the loader failed does not count.
    """
    settings = observed.settings
    first = min(settings.tokens + settings.num_workers, int(np.sum(observed.epochs == 0)))
    least = max(2, settings.num_workers)
    if len(observed.handed) - first < least:
        return None
    until = float(observed.busy[-1, 1]) if observed.failed else observed.total_s
    return _rates(observed, float(observed.asked[first] - observed.began), until, first, batch_size)


def _rates(
    observed: RehearsalRecord, from_s: float, until: float, first: int, batch_size: int | None
) -> Rates | None:
    busy = observed.busy
    seconds = until - from_s
    if seconds <= 0:
        return None
    batches = len(busy) - first
    waited = float(np.sum((observed.handed - observed.asked)[first:]))
    waited += until - (float(busy[-1, 1]) if len(busy) else from_s)
    rate = batches / seconds
    return Rates(
        from_s=from_s,
        seconds=seconds,
        batches=batches,
        busy_share=_share(float(np.sum(busy[first:, 1] - busy[first:, 0])), seconds),
        waiting_share=_share(waited, seconds),
        batches_per_s=rate,
        samples_per_s=rate * batch_size if batch_size is not None else None,
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def epochs(observed: RehearsalRecord) -> tuple[Epoch, ...]:
    """The first epochs."""
    firsts = np.flatnonzero(observed.place == 0)
    begins = np.append(observed.asked[firsts] - observed.began, observed.total_s)
    found = []
    for at, first in enumerate(firsts[:_MOST_EPOCHS]):
        last = at == len(firsts) - 1
        following = len(observed.epochs) if last else firsts[at + 1]
        found.append(
            Epoch(
                start_s=float(begins[at]),
                seconds=float(begins[at + 1] - begins[at]),
                batches=int(following - first),
                complete=observed.exhausted if last else True,
                first_batch_s=float(observed.handed[first] - observed.asked[first]),
            )
        )
    return tuple(found)


def epoch_seconds(
    found: tuple[Epoch, ...], epoch_batches: int | None, steady: Rates | None
) -> tuple[float | None, bool]:
    """The time of an epoch, and whether it was measured (the mean of those that ended)."""
    whole = [each.seconds for each in found if each.complete]
    if whole:
        return sum(whole) / len(whole), True
    if epoch_batches is None or steady is None or not steady.batches_per_s:
        return None, False
    begin = found[0].first_batch_s if found else 0.0
    return (begin or 0.0) + epoch_batches / steady.batches_per_s, False
