"""Statistics of blocks of calls: percentiles, ratios, missed deadlines, data quality."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.pace import OTHERS, CallBlock, Estimate, RateSummary, Spread
from trainfit.results.text import core_count, count, duration, percent

# ---
# Distinguishes calls that do the work from those that only pop a queued result.
#
# A chunked policy (ACT) runs its network every n-th call and hands out the rest of the chunk in
# between: the mean of all its calls describes neither kind.


#: Calls of two kinds differ by so many times at least.
_APART: Final = 4.0
#: Calls with work that are needed to see a period, and the share of the distances between them
#: that are whole periods.
_LEAST, _REGULAR = 3, 0.8
#: Of all calls, those that are surely of the fast kind where there are two.
_POPS: Final = 0.4


@dataclasses.dataclass(frozen=True)
class CallPattern:
    """The work is done in the calls ``phase``, ``phase`` + ``period``, …; in each, with 1."""

    period: int = 1
    phase: int = 0

    def has(self, numbers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Do the calls with these numbers do the work?"""
        return np.asarray(numbers % self.period == self.phase)

    def of(self, block: CallBlock) -> NDArray[np.bool_]:
        """Does each call of a block?"""
        return self.has(_numbers(block))


def rhythm(blocks: Sequence[CallBlock]) -> CallPattern:
    """Told from the times of all calls: slow ones that come by chance are not another kind, their
    distances differ; garbage collections come regularly, and do not count. Calls between two
    blocks may have been made without being noted."""
    if not blocks:
        return CallPattern()
    numbers = np.concatenate([_numbers(block) for block in blocks])
    walls = np.concatenate([np.asarray(b.wall_s) - _collected(b) for b in blocks])
    slow = numbers[_slow(walls)]
    if len(slow) < _LEAST:
        return CallPattern()
    distances = np.diff(slow)
    period = int(np.bincount(distances).argmax())
    if period < 2 or float((distances % period == 0).mean()) < _REGULAR:
        return CallPattern()
    pattern = CallPattern(period, int(np.bincount(slow % period).argmax()))
    # Slow calls by chance may have a common divisor; but not all calls in that rhythm are slow.
    due = numbers[pattern.has(numbers)]
    return pattern if len(np.intersect1d(due, slow)) >= _REGULAR * len(due) else CallPattern()


def are_mixed(walls: Sequence[float]) -> bool:
    """Are there calls of two kinds, too few of the slow ones to tell their period?"""
    return 0 < len(_slow(np.asarray(walls))) < _LEAST


def _numbers(block: CallBlock) -> NDArray[np.intp]:
    return block.first_call + np.arange(len(block.wall_s))


def _slow(walls: NDArray[np.float64]) -> NDArray[np.intp]:
    """Calls beyond the widest gap between two times, if that is wide enough and most calls are
    below it; none otherwise."""
    if len(walls) < 2 * _LEAST:
        return np.zeros(0, np.intp)
    order = np.sort(np.log(np.maximum(walls, 1e-9)))
    # At least every second call only takes something.
    upper = order[int(_POPS * len(order)) :]
    gaps = np.diff(upper)
    if not len(gaps) or gaps.max() < np.log(_APART):
        return np.zeros(0, np.intp)
    index = int(gaps.argmax())
    edge = (upper[index] + upper[index + 1]) / 2
    return np.flatnonzero(np.log(np.maximum(walls, 1e-9)) > edge)


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
    collected: tuple[Values, ...] = ()
    """Garbage collections within each call."""

    @classmethod
    def of(cls, blocks: Sequence[CallBlock], rhythm: CallPattern) -> Sample:
        columns: dict[str, list[Values]] = {
            name: [] for name in ("wall", "cpu", "device", "before", "collected")
        }
        for block in blocks:
            counts = _counting(block) & rhythm.of(block)
            if not counts.any():
                continue
            for name, values in (
                ("wall", block.wall_s),
                ("cpu", block.cpu_s),
                ("device", block.device_s),
                ("before", block.probe_before_s),
                ("collected", _collected(block)),
            ):
                if len(values):
                    columns[name].append(np.asarray(values)[counts])
        return cls(**{name: tuple(found) for name, found in columns.items()})

    @property
    def count(self) -> int:
        return sum(map(len, self.wall))


def _counting(block: CallBlock) -> NDArray[np.bool_]:
    return np.arange(len(block.wall_s)) >= block.settled


def median(parts: Sequence[Values]) -> float | None:
    """The median of all values; ``None`` where there are none."""
    return float(np.median(np.concatenate(parts))) if any(map(len, parts)) else None


def estimate(
    function: Callable[[Sequence[float]], float], groups: Sequence[Sequence[Values]]
) -> Estimate | None:
    """A function of the medians of some groups of blocks, with its interval; ``None`` where it is
    no number. A resample for which it is none is left out."""
    chance = np.random.default_rng(_SEED)
    value = function([_median(group) for group in groups])
    drawn = zip(*(_drawn_medians(group, chance) for group in groups), strict=True)
    functions = [each for each in map(function, drawn) if math.isfinite(each)]
    if not math.isfinite(value) or not functions:
        return None
    low, high = np.percentile(functions, (_LOW, _HIGH))
    return Estimate(value, min(float(low), value), max(float(high), value))


def _median(parts: Sequence[Values]) -> float:
    return float(np.median(np.concatenate(list(parts))))


def _drawn_medians(parts: Sequence[Values], chance: np.random.Generator) -> list[float]:
    """The median of each resample; many resamples at a time, as far as memory allows."""
    values, lengths = np.concatenate(list(parts)), np.array([len(part) for part in parts])
    longest = int(lengths.max())
    # Ranks of the values stand for them: numpy orders small integers in a fifth of the time.
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values), np.min_scalar_type(len(values)))
    ranks[order] = np.arange(len(values))
    at_a_time = max(1, _DRAWN_AT_A_TIME // (len(parts) * longest))
    medians: list[float] = []
    while len(medians) < _RESAMPLES:
        shape = (min(at_a_time, _RESAMPLES - len(medians)), len(parts))
        blocks = chance.integers(0, len(parts), shape)
        calls = (chance.random((*shape, longest)) * lengths[blocks, None]).astype(np.intp)
        drawn = ranks[calls + (np.cumsum(lengths) - lengths)[blocks, None]]
        # A shorter block has fewer calls than there are places: the others come last in order.
        drawn[np.arange(longest) >= lengths[blocks, None]] = len(values)
        ordered = np.sort(drawn.reshape(shape[0], -1), axis=1, kind="stable")
        counts, rows = lengths[blocks].sum(axis=1), np.arange(shape[0])
        low, high = (values[order[ordered[rows, at // 2]]] for at in (counts - 1, counts))
        medians += ((low + high) / 2).tolist()
    return medians


def ratio(paced: Sequence[Values], other: Sequence[Values]) -> Estimate | None:
    """The ratio of the medians; ``None`` where the other's is 0."""
    return estimate(lambda m: m[0] / m[1] if m[1] > 0 else math.nan, (paced, other))


def taken_away(
    paced: Sequence[Values],
    back: Sequence[Values],
    more: Sequence[Sequence[Values]],
    less: Sequence[Sequence[Values]] = (),
) -> Estimate | None:
    """The share of the excess of paced calls over those back to back that each of ``more`` removes,
    summed, less that of ``less``; ``None`` where there is no excess."""

    def share(medians: Sequence[float]) -> float:
        excess = medians[0] - medians[1]
        if excess <= 0:
            return math.nan
        parts = [(medians[0] - each) / excess for each in medians[2:]]
        return sum(parts[: len(more)]) - sum(parts[len(more) :])

    return estimate(share, (paced, back, *more, *less))


def is_slower(estimate: Estimate, other_s: float) -> bool:
    """Is a paced call slower than one back to back, and not by chance?"""
    by_share = estimate.value > 1 + SLOWER and estimate.low > 1 + SLOWER / 2
    return by_share and (estimate.value - 1) * other_s > _SLOWER_S


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


def summary(blocks: Sequence[CallBlock], counted: RateCounts) -> RateSummary | None:
    """A summary of blocks of one arm at one rate; ``None`` where no call of them counts. Too few
    calls are not compared with those back to back (``ratio`` is ``None``)."""
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
        collected_share=_sum(sample.collected) / max(1e-9, _sum(sample.wall)),
        misses_collecting=_collecting(blocks),
    )


def speed(before: Sequence[Values], fast_s: float | None) -> float | None:
    """How fast the core is before calls, as a share of the fastest that was seen."""
    took = median(before)
    return fast_s / took if took and fast_s else None


def _pops(blocks: Sequence[CallBlock], counted: RateCounts) -> Spread | None:
    if counted.rhythm.period == 1:
        return None
    values = np.concatenate(
        [np.asarray(b.wall_s)[_counting(b) & ~counted.rhythm.of(b)] for b in blocks]
    )
    return spread(values) if len(values) else None


def _late(blocks: Sequence[CallBlock]) -> Spread | None:
    """How long after it was due a call started, of those that the call before did not hold up."""
    found = []
    for block in blocks:
        started, due = np.asarray(block.started_s), np.asarray(block.due_s)
        free = np.ones(len(due), bool)
        free[1:] = (started[:-1] + np.asarray(block.wall_s)[:-1]) < due[1:]
        found.append((started - due)[free & _counting(block)])
    values = np.concatenate(found)
    return spread(np.maximum(0.0, values)) if len(values) else None


def _beyond(block: CallBlock) -> Values:
    """Seconds by which each call that counts ended after the next was due; negative: before."""
    if block.hz is None:
        return np.zeros(0)
    ended = np.asarray(block.started_s) + np.asarray(block.wall_s)
    return np.asarray(ended - np.asarray(block.due_s) - 1 / block.hz)[block.settled :]


def _missed(block: CallBlock) -> NDArray[np.bool_]:
    return _beyond(block) > 0


def _overrun(blocks: Sequence[CallBlock]) -> Spread | None:
    values = np.concatenate([np.zeros(0), *map(_beyond, blocks)])
    return spread(values[values > 0]) if (values > 0).any() else None


def _misses(blocks: Sequence[CallBlock]) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, bool), *map(_missed, blocks)])


def _collecting(blocks: Sequence[CallBlock]) -> int:
    """Misses that the garbage collections within make."""
    return sum(
        int(((beyond := _beyond(block)) > 0)[beyond <= _collected(block)[block.settled :]].sum())
        for block in blocks
        if block.collected_s and block.hz is not None
    )


def _collected(block: CallBlock) -> Values:
    return np.asarray(block.collected_s or np.zeros(len(block.wall_s)))


def _sum(parts: Sequence[Values]) -> float:
    return float(sum(part.sum() for part in parts))


def _again(blocks: Sequence[CallBlock]) -> float | None:
    """The share of the calls after a miss that miss, too; ``None``: nothing was missed."""
    after = np.concatenate(
        [np.zeros(0, bool), *(missed[1:][missed[:-1]] for missed in map(_missed, blocks))]
    )
    return float(after.mean()) if len(after) else None


def _reached_hz(blocks: Sequence[CallBlock], hz: float) -> float:
    spans = [block.started_s[-1] - block.started_s[0] for block in blocks if len(block.due_s) > 1]
    calls = sum(len(block.due_s) - 1 for block in blocks if len(block.due_s) > 1)
    return calls / sum(spans) if sum(spans) > 0 else hz


# ---
# Warnings about a measurement's quality, for the result itself.
#
# Thresholds are those of hyperfine (outliers), pyperf (deviation) and torch.utils.benchmark
# (interquartile range).


#: Times of the median absolute deviation beyond which a call is an outlier (hyperfine), as
#: 0.6745 × (x - median) / MAD.
_OUTLIER: Final = 14.826
#: Calls that the percentiles need: p95 of fewer is their largest.
FEW: Final = 20
#: Interquartile range by the median above which calls vary (torch.utils.benchmark).
_VARIES: Final = 0.25
#: Change of the median from the first third to the last.
_DRIFT: Final = 0.05
#: Cores that others keep busy on average; the first call, times a usual one.
_OTHERS: Final = 0.3
_FIRST: Final = 5.0


def warnings_of(sample: Sample, name: str, enough_s: float | None = None) -> list[str]:
    """Warnings on one rate's calls; ``enough_s`` is the ``--duration`` that gives :data:`FEW` of
    them (``None``: a user's own loop)."""
    if not sample.count:
        return []
    values = np.concatenate(sample.wall)
    texts = []
    if len(values) < FEW:
        more = f"{FEW} are needed"
        if enough_s is not None:
            more = f"--duration {math.ceil(enough_s)} gives about {FEW}"
        texts.append(f"{name}: {count(len(values), 'call')} with work: too few for p95; {more}")
    outliers = _outliers(values, values)
    if outliers and len(values) >= FEW:
        collected = np.concatenate(sample.collected) if sample.collected else np.zeros(len(values))
        left = _outliers(values, values - collected)
        why = ["other work ran at the same time"] if left else []
        if left < outliers:
            why.insert(0, f"garbage collections within them make {outliers - left} of these")
        texts.append(
            f"{name}: {outliers} of {len(values)} calls are outliers (up to "
            f"{duration(values.max())}); {', '.join(why)}"
        )
    low, middle, high = np.percentile(values, (25, 50, 75))
    if middle > 0 and (high - low) / middle >= _VARIES:
        texts.append(
            f"{name}: calls vary (half of them within {duration(low)} to {duration(high)})"
        )
    drift = _drift(values)
    if abs(drift) >= _DRIFT:
        direction = "slower" if drift > 0 else "faster"
        texts.append(
            f"{name}: calls became {percent(abs(drift))} {direction} during the measurement "
            "(heat, or another load)"
        )
    return texts


def machine_warnings(
    blocks: Sequence[CallBlock], first_call_s: float | None, usual_s: float | None
) -> list[str]:
    """Warnings on the machine during the measurement."""
    texts = []
    if first_call_s is not None and usual_s and first_call_s > _FIRST * usual_s:
        texts.append(
            f"the first call took {duration(first_call_s)}; it is not counted; a robot "
            "must make it before it moves"
        )
    others = [
        block.readings.others_cores for block in blocks if block.readings.others_cores is not None
    ]
    if others and float(np.mean(others)) > _OTHERS:
        texts.append(f"{OTHERS} {core_count(float(np.mean(others)))} during the measurement")
    throttled = sum(block.readings.throttled or 0 for block in blocks)
    if throttled:
        texts.append(f"the CPU throttled {throttled} times for heat during the measurement")
    if any(block.readings.gpu_slowed for block in blocks):
        texts.append("the GPU throttled for heat or power during the measurement")
    return texts


def _outliers(values: Values, of: Values) -> int:
    """How many ``of`` these are outliers among ``values``."""
    middle = np.median(values)
    deviation = np.median(np.abs(values - middle))
    if not deviation:
        return 0
    return int((0.6745 * np.abs(of - middle) / deviation > _OUTLIER).sum())


def _drift(values: Values) -> float:
    third = len(values) // 3
    if third < FEW:
        return 0.0
    first, last = np.median(values[:third]), np.median(values[-third:])
    return float(last / first - 1) if first > 0 else 0.0
