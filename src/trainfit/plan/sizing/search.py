"""The largest batch size by trial, for jobs whose memory follows no law of the batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

#: Trials in all; each is a simulated run of seconds.
MOST_TRIALS = 8
#: No trial goes further beyond the others than by this factor: the line through two small
#: batch sizes says little of large ones.
_FURTHEST = 8
#: A bracket no wider than this share of its batch size is sufficiently narrow.
_NARROW = 1 / 16


@dataclasses.dataclass(frozen=True)
class SimulatedBatch:
    """One batch size: its peak of reserved memory, unlimited, and where it runs.

    ``fits`` is at the GPU's capacity, ``fits_with_headroom`` with the headroom left free.
    """

    batch: int
    reserved_bytes: int
    fits: bool
    fits_with_headroom: bool


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a search; 0 where not even one sample fits, ``None`` if it is not known.

    ``too_large`` is the smallest batch size that was seen not to fit.
    """

    largest: int | None
    recommended: int | None
    too_large: int | None
    tried: tuple[int, ...]


def search(
    known: Iterable[SimulatedBatch],
    measure: Callable[[Sequence[int]], Iterable[SimulatedBatch]],
    *,
    free_bytes: int,
    free_with_headroom_bytes: int,
    most: int,
) -> Found:
    """Close in on both limits by secants through the measured peaks.

    ``measure`` makes trials at the given batch sizes and may leave out those that failed: the
    search goes on below them. None is asked for twice, and none above ``most``.
    """
    trials = {trial.batch: trial for trial in known}
    asked = set(trials)
    goals: tuple[tuple[Callable[[SimulatedBatch], bool], int], ...] = (
        (lambda trial: trial.fits_with_headroom, free_with_headroom_bytes),
        (lambda trial: trial.fits, free_bytes),
    )
    left = MOST_TRIALS
    while left:
        failed = asked - trials.keys()
        guesses = (_next(trials, failed, good, free, most) for good, free in goals)
        wanted = [guess for guess in dict.fromkeys(guesses) if guess and guess not in asked]
        if not wanted:
            break
        wanted = wanted[:left]
        left -= len(wanted)
        asked.update(wanted)
        trials.update((trial.batch, trial) for trial in measure(wanted))
    return found_by(trials.values())


def found_by(known: Iterable[SimulatedBatch]) -> Found:
    """The outcome where no more trials are made."""
    trials = {trial.batch: trial for trial in known}
    return Found(
        largest=_largest(trials, lambda trial: trial.fits),
        recommended=_largest(trials, lambda trial: trial.fits_with_headroom),
        too_large=_bracket(trials, lambda trial: trial.fits)[1],
        tried=tuple(sorted(trials)),
    )


def reach_of(known: Iterable[SimulatedBatch], free_bytes: int, most: int) -> int:
    """About the largest batch size for this memory, by the line through the largest two trials that
    fit: no further beyond them than a search would try at once, nor above ``most``; 0: none."""
    trials = {trial.batch: trial for trial in known}
    low, high = _bracket(trials, lambda trial: trial.fits_with_headroom)
    if not low:
        return 0
    guess = max(low, _secant(trials, free_bytes, low, high))
    return min(guess, _FURTHEST * low if high is None else high - 1, most)


def _largest(
    trials: dict[int, SimulatedBatch], good: Callable[[SimulatedBatch], bool]
) -> int | None:
    low, high = _bracket(trials, good)
    return low or (0 if high == 1 else None)


def _bracket(
    trials: dict[int, SimulatedBatch], good: Callable[[SimulatedBatch], bool]
) -> tuple[int, int | None]:
    """The largest good batch size below the smallest bad one (0: none); that bad one."""
    bad = [batch for batch, trial in trials.items() if not good(trial)]
    high = min(bad, default=None)
    low = max((b for b, t in trials.items() if good(t) and (high is None or b < high)), default=0)
    return low, high


def _next(
    trials: dict[int, SimulatedBatch],
    failed: set[int],
    good: Callable[[SimulatedBatch], bool],
    free: int,
    most: int,
) -> int | None:
    """The next batch size to try for one of the limits; ``None`` if it is sufficiently close."""
    if not trials:
        return min(_FURTHEST, most) if not failed else max(1, min(failed) // 2)
    low, high = _bracket(trials, good)
    above = [batch for batch in (high, *failed) if batch is not None and batch > low]
    high = min(above, default=None)
    if low >= most or (high is not None and high - low <= max(1, int(low * _NARROW))):
        return None
    guess = _secant(trials, free, low, high)
    if high is None:
        # Peaks that jump make the line too steep: no step is narrower than what ends the search.
        return min(max(guess, low + max(1, int(low * _NARROW))), _FURTHEST * low, most)
    # Each trial narrows the bracket by a quarter at least.
    margin = max(1, (high - low) // 4)
    return min(max(guess, low + margin), high - margin)


def _secant(trials: dict[int, SimulatedBatch], free: int, low: int, high: int | None) -> int:
    """Where the line through the two trials nearest to the limit meets the free memory."""
    ordered = sorted(trials)
    if len(ordered) < 2:
        return 2 * low if high is None else (low + high) // 2
    ends = [b for b in (low, high) if b in trials]
    if len(ends) < 2:
        ends = ordered[:2] if low == 0 else ordered[-2:]
    one, two = (trials[batch] for batch in ends)
    slope = (two.reserved_bytes - one.reserved_bytes) / (two.batch - one.batch)
    if slope <= 0:  # small tensors share segments: nothing is to be seen yet
        return _FURTHEST * low if high is None else (low + high) // 2
    return int(one.batch + (free - one.reserved_bytes) / slope)
