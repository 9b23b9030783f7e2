"""Statistics of blocks of calls: percentiles, ratios with intervals, missed deadlines.

Intervals are by the bootstrap: blocks are drawn first and calls within them second, because a
machine's mood lasts for blocks (two-stage bootstrap; Davison & Hinkley 1997, 3.8).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.pace.calls.call_pattern import CallPattern
from trainfit.results.machine.pace import Block, Estimate, RateSummary, Spread

Values = NDArray[np.float64]

_RESAMPLES: Final = 400
#: Calls of resamples that are in memory at once: 8 MB.
_DRAWN_AT_A_TIME: Final = 1_000_000
_LOW, _HIGH = 2.5, 97.5
#: Paced calls are slower if their median is above that back to back by this share and time, and
#: the interval's low end by half of the share.
SLOWER: Final = 0.05
_SLOWER_S: Final = 0.1e-3
#: Calls of each of two medians, for their ratio to have an interval that means something.
_COMPARED: Final = 3
#: Resamples are drawn with this seed: the same file always says the same.
_SEED: Final = 20240229


@dataclasses.dataclass(frozen=True)
class Sample:
    """Calls of one arm at one rate that do the work and count: their times, block by block."""

    wall: tuple[Values, ...]
    cpu: tuple[Values, ...]
    device: tuple[Values, ...]
    before: tuple[Values, ...]
    """CPU time of the probe before each call."""

    @classmethod
    def of(cls, blocks: Sequence[Block], rhythm: CallPattern) -> Sample:
        columns: dict[str, list[Values]] = {"wall": [], "cpu": [], "device": [], "before": []}
        for block in blocks:
            counts = _counting(block) & rhythm.of(block)
            if not counts.any():
                continue
            for name, values in (
                ("wall", block.wall_s),
                ("cpu", block.cpu_s),
                ("device", block.device_s),
                ("before", block.probe_before_s),
            ):
                if values:
                    columns[name].append(np.asarray(values)[counts])
        return cls(**{name: tuple(found) for name, found in columns.items()})

    @property
    def count(self) -> int:
        return sum(map(len, self.wall))


def _counting(block: Block) -> NDArray[np.bool_]:
    return np.arange(len(block.wall_s)) >= block.settled


def median(parts: Sequence[Values]) -> float | None:
    """Of all values; ``None`` where there are none."""
    return float(np.median(np.concatenate(parts))) if any(map(len, parts)) else None


def estimate(
    function: Callable[[Sequence[float]], float], groups: Sequence[Sequence[Values]]
) -> Estimate | None:
    """A function of the medians of some groups of blocks, with its interval; ``None`` where it is
    no number. A resample for which it is none is left out."""
    chance = np.random.default_rng(_SEED)
    value = function([_median(group) for group in groups])
    drawn = zip(*(_drawn_medians(group, chance) for group in groups), strict=True)
    found = [each for each in map(function, drawn) if math.isfinite(each)]
    if not math.isfinite(value) or not found:
        return None
    low, high = np.percentile(found, (_LOW, _HIGH))
    return Estimate(value, min(float(low), value), max(float(high), value))


def _median(parts: Sequence[Values]) -> float:
    return float(np.median(np.concatenate(list(parts))))


def _drawn_medians(parts: Sequence[Values], chance: np.random.Generator) -> list[float]:
    """The median of each resample; many resamples at a time, as far as memory allows."""
    values, lengths = np.concatenate(list(parts)), np.array([len(part) for part in parts])
    longest = int(lengths.max())
    at_a_time = max(1, _DRAWN_AT_A_TIME // (len(parts) * longest))
    found: list[float] = []
    while len(found) < _RESAMPLES:
        shape = (min(at_a_time, _RESAMPLES - len(found)), len(parts))
        blocks = chance.integers(0, len(parts), shape)
        calls = (chance.random((*shape, longest)) * lengths[blocks, None]).astype(np.intp)
        drawn = values[calls + (np.cumsum(lengths) - lengths)[blocks, None]]
        # A shorter block has fewer calls than there are places: the others come last in order.
        drawn[np.arange(longest) >= lengths[blocks, None]] = np.inf
        ordered = np.sort(drawn.reshape(shape[0], -1), axis=1)
        counts, rows = lengths[blocks].sum(axis=1), np.arange(shape[0])
        found += ((ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2).tolist()
    return found


def ratio(paced: Sequence[Values], other: Sequence[Values]) -> Estimate | None:
    """Of the medians; ``None`` where the other takes no time."""
    return estimate(lambda m: m[0] / m[1] if m[1] > 0 else math.nan, (paced, other))


def taken_away(
    paced: Sequence[Values],
    back: Sequence[Values],
    more: Sequence[Sequence[Values]],
    less: Sequence[Sequence[Values]] = (),
) -> Estimate | None:
    """Of what paced calls take more than those back to back, the part that each of ``more`` takes
    away, summed, less that of ``less``; ``None`` where paced calls take no more."""

    def share(medians: Sequence[float]) -> float:
        excess = medians[0] - medians[1]
        if excess <= 0:
            return math.nan
        parts = [(medians[0] - each) / excess for each in medians[2:]]
        return sum(parts[: len(more)]) - sum(parts[len(more) :])

    return estimate(share, (paced, back, *more, *less))


def is_slower(found: Estimate, other_s: float) -> bool:
    """Is a paced call slower than one back to back, and not by chance?"""
    by_share = found.value > 1 + SLOWER and found.low > 1 + SLOWER / 2
    return by_share and (found.value - 1) * other_s > _SLOWER_S


def spread(values: Values) -> Spread:
    """Percentiles; ``ValueError`` for no values."""
    if not len(values):
        raise ValueError("percentiles of an empty list")
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return Spread(len(values), float(p50), float(p95), float(p99), float(values.max()))


@dataclasses.dataclass(frozen=True)
class RateCounts:
    """What is needed of a measurement to summarise one of its rates.

    ``rhythm`` is of the calls that do the work, ``fast_s`` what the probe takes at the highest
    speed, ``reference`` calls back to back.
    """

    rhythm: CallPattern
    fast_s: float | None
    reference: Sample | None = None


def summary(blocks: Sequence[Block], counted: RateCounts) -> RateSummary | None:
    """Of blocks of one arm at one rate; ``None`` where no call of them counts. Too few calls are
    not compared with those back to back (``ratio`` is ``None``)."""
    sample = Sample.of(blocks, counted.rhythm)
    if not sample.count:
        return None
    calls = spread(np.concatenate(sample.wall))
    hz = blocks[0].hz
    compared = counted.reference if hz is not None else None
    if compared is not None and min(sample.count, compared.count) < _COMPARED:
        compared = None
    against = ratio(sample.wall, compared.wall) if compared is not None else None
    back_s = median(compared.wall) if compared is not None else None
    misses = _misses(blocks)
    reached = 1 / max(calls.p50, 1e-9) if hz is None else _reached_hz(blocks, hz)
    return RateSummary(
        hz=hz,
        arm=blocks[0].arm,
        calls=calls,
        pops=_pops(blocks, counted),
        cpu_s=median(sample.cpu) or 0.0,
        device_s=median(sample.device),
        speed=speed(sample.before, counted.fast_s),
        ratio=against,
        is_slower=against is not None and back_s is not None and is_slower(against, back_s),
        late=_late(blocks) if hz is not None else None,
        misses=int(misses.sum()),
        missed_share=float(misses.mean()) if len(misses) else 0.0,
        consecutive_share=_again(blocks) if hz is not None else None,
        overrun=_overrun(blocks),
        reached_hz=reached,
        is_reached=hz is None or calls.p50 <= 1 / hz or counted.rhythm.period > 1,
    )


def speed(before: Sequence[Values], fast_s: float | None) -> float | None:
    """How fast the core is before calls, as a share of the fastest that was seen."""
    took = median(before)
    return fast_s / took if took and fast_s else None


def _pops(blocks: Sequence[Block], counted: RateCounts) -> Spread | None:
    if counted.rhythm.period == 1:
        return None
    values = np.concatenate(
        [np.asarray(b.wall_s)[_counting(b) & ~counted.rhythm.of(b)] for b in blocks]
    )
    return spread(values) if len(values) else None


def _late(blocks: Sequence[Block]) -> Spread | None:
    """How long after it was due a call started, of those that the call before did not hold up."""
    found = []
    for block in blocks:
        started, due = np.asarray(block.started_s), np.asarray(block.due_s)
        free = np.ones(len(due), bool)
        free[1:] = (started[:-1] + np.asarray(block.wall_s)[:-1]) < due[1:]
        found.append((started - due)[free & _counting(block)])
    values = np.concatenate(found)
    return spread(np.maximum(0.0, values)) if len(values) else None


def _beyond(block: Block) -> Values:
    """By how much each call that counts ended after the next was due (s); negative: before."""
    if block.hz is None:
        return np.zeros(0)
    ended = np.asarray(block.started_s) + np.asarray(block.wall_s)
    return np.asarray(ended - np.asarray(block.due_s) - 1 / block.hz)[block.settled :]


def _missed(block: Block) -> NDArray[np.bool_]:
    return _beyond(block) > 0


def _overrun(blocks: Sequence[Block]) -> Spread | None:
    values = np.concatenate([np.zeros(0), *map(_beyond, blocks)])
    return spread(values[values > 0]) if (values > 0).any() else None


def _misses(blocks: Sequence[Block]) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, bool), *map(_missed, blocks)])


def _again(blocks: Sequence[Block]) -> float | None:
    """Of the calls after a miss, those that miss, too; ``None``: nothing was missed."""
    after = np.concatenate(
        [np.zeros(0, bool), *(found[1:][found[:-1]] for found in map(_missed, blocks))]
    )
    return float(after.mean()) if len(after) else None


def _reached_hz(blocks: Sequence[Block], hz: float) -> float:
    spans = [block.started_s[-1] - block.started_s[0] for block in blocks if len(block.due_s) > 1]
    calls = sum(len(block.due_s) - 1 for block in blocks if len(block.due_s) > 1)
    return calls / sum(spans) if sum(spans) > 0 else hz
