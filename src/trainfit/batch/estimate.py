"""|G|², tr Σ and their ratio from squared norms of gradients at two batch sizes, with intervals.

All is linear: the expected square of a sum of micro-batch gradients is ``a·|G|² + c·tr Σ``, with
``a`` and ``c`` from the sizes alone. Two such sums give both unknowns without bias (McCandlish et
al. 2018, appendix A.1); numerator and denominator are averaged apart, as the mean of a ratio
would be biased.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.results.batch import Interval, Method, ModuleNoise, NoiseMoment, NoiseResult

#: 95th percentile of the normal distribution: both sides leave 5% outside of a 90% interval.
_Z: Final = 1.6448536269514722
#: Contiguous blocks of steps, the unit of the interval: a block's mean is nearly independent of its
#: neighbour's where single steps are not. 10 to 30 are usual (Schmeiser 1982, batch means).
_BLOCKS: Final = 20
#: Fewer blocks than these say nothing about their own scatter, nor do blocks of one step about
#: neighbours that resemble each other.
LEAST_BLOCKS: Final = 8
LEAST_STEPS: Final = 2 * LEAST_BLOCKS

Loss = Literal["mean", "sum"]
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Weights:
    """What the two squares of a step are in expectation.

    The small one is ``small_g·|G|² + small_t·tr Σ``, the big one ``big_g·|G|² + big_t·tr Σ``.
    """

    small_g: float
    small_t: float
    big_g: float
    big_t: float

    @property
    def can_tell(self) -> bool:
        """Are the two equations independent? Not with one micro-batch."""
        scale = abs(self.small_g * self.big_t) + abs(self.big_g * self.small_t)
        return abs(self._determinant) > 1e-9 * scale

    @property
    def _determinant(self) -> float:
        return self.small_g * self.big_t - self.big_g * self.small_t

    def solve(self, small: Floats, big: Floats) -> tuple[Floats, Floats]:
        """|G|² and tr Σ, each without bias, of squares of any shape."""
        determinant = self._determinant
        square = (small * self.big_t - big * self.small_t) / determinant
        trace = (big * self.small_g - small * self.big_g) / determinant
        return square, trace


def first_against_all(sizes: Sequence[int], loss: Loss = "mean", ranks: int = 1) -> Weights:
    """Weights of the gradient of a step's first micro-batch, and of the sum over all of them.

    Args:
        sizes: samples of each micro-batch of a rank, in order.
        loss: is a micro-batch's loss the mean or the sum over its samples?
        ranks: processes whose gradients are averaged in the big one (the same sizes in each).
    """
    if loss == "sum":
        total = float(sum(sizes))
        return Weights(sizes[0] ** 2, sizes[0], total**2, total / ranks)
    count = float(len(sizes))
    return Weights(1.0, 1 / sizes[0], count**2, sum(1 / size for size in sizes) / ranks)


def mean_against_all(sizes: Sequence[int]) -> Weights:
    """Weights of the mean of the parts' squared norms, and of the square of the sum of their
    gradients.

    Each part's loss is a mean over its samples.
    """
    count, inverse = float(len(sizes)), sum(1 / size for size in sizes)
    return Weights(1.0, inverse / count, count**2, inverse)


@dataclasses.dataclass(frozen=True)
class NoiseEstimate:
    """The noise scale and what it consists of; ``noise.high`` is ``None`` where |G|² may be 0."""

    noise: Interval
    square: Interval
    trace: Interval


def estimate(square: Floats, trace: Floats) -> NoiseEstimate | None:
    """The noise scale from |G|² and tr Σ of each step, in order; ``None`` for fewer than
    :data:`LEAST_STEPS`.

    The interval of the ratio is Fieller's (1954): every ratio that the blocks' means do not reject.
    It is exact for normal means, lopsided as a ratio is, and without upper end where |G|² is not
    told from 0.
    """
    if len(square) < LEAST_STEPS:
        return None
    blocks = min(_BLOCKS, len(square) // 2)
    squares, traces = _means(square, blocks), _means(trace, blocks)
    t = t_quantile(blocks - 1)
    cov = np.cov(squares, traces) / blocks
    mean_square, mean_trace = float(squares.mean()), float(traces.mean())
    return NoiseEstimate(
        _fieller(mean_trace, mean_square, cov, t),
        _interval(mean_square, t * math.sqrt(cov[0, 0])),
        _interval(mean_trace, t * math.sqrt(cov[1, 1])),
    )


def _means(values: Floats, blocks: int) -> Floats:
    """Means of blocks of one length; what does not fill them, the oldest, is left out."""
    length = len(values) // blocks
    found: Floats = values[len(values) - blocks * length :].reshape(blocks, length).mean(axis=1)
    return found


def _interval(value: float, reach: float) -> Interval:
    return Interval(value if value > 0 else None, max(0.0, value - reach), max(0.0, value + reach))


def _fieller(trace: float, square: float, cov: Floats, t: float) -> Interval:
    """All ratios r ≥ 0 with (trace − r·square)² ≤ t²·var(trace − r·square)."""
    a = square**2 - t**2 * float(cov[0, 0])
    b = square * trace - t**2 * float(cov[0, 1])
    c = trace**2 - t**2 * float(cov[1, 1])
    value = max(0.0, trace) / square if square > 0 else None
    root = b**2 - a * c
    if a > 0 and square > 0:
        reach = math.sqrt(max(0.0, root))
        low, high = max(0.0, (b - reach) / a), max(0.0, (b + reach) / a)
        return Interval(value, low, high)
    # |G|² may be 0, and the ratio anything from its lower end on.
    low = 0.0
    if c > 0 and root > 0:
        low = max(0.0, c / (b + math.sqrt(root))) if b + math.sqrt(root) > 0 else 0.0
    return Interval(value if value is not None and value >= low else None, low, None)


def t_quantile(free: int) -> float:
    """95th percentile of Student's t with ``free`` ≥ 4 degrees of freedom, within 0.1%.

    Abramowitz and Stegun, 26.7.5.
    """
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    )


# ---
# What was measured, from records and how they were made, as a result.


#: Measured steps of one moment of the history.
_MOMENT: Final = 64
_INFINITE: Final = "a gradient had NaN or infinity (AMP skips such steps, too)"


@dataclasses.dataclass
class Log:
    """How the records were made: ``weights`` and ``steps`` by their place in the ring.

    ``accumulation`` is that of the last step, 0 before the first; ``accumulations`` are those of
    the records.
    """

    groups: tuple[str, ...]
    group_sizes: tuple[int, ...]
    batch_size: int
    ranks: int
    window: int
    accumulation: int = 0
    steps_seen: int = 0
    committed: int = 0
    method: Method = "none"
    fault: str = ""
    weights: dict[int, Weights] = dataclasses.field(default_factory=dict)
    accumulations: dict[int, int] = dataclasses.field(default_factory=dict)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    steps_left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def usual_accumulation(self) -> int:
        """The accumulation of most records: the last step of an epoch may have fewer
        micro-batches."""
        if not self.accumulations:
            return max(1, self.accumulation)
        return statistics.mode(self.accumulations.values())

    @property
    def slot(self) -> int:
        """The slot of the next record."""
        return self.committed % self.window

    def commit(self, method: Method, weights: Weights) -> None:
        """The record at :attr:`slot` counts."""
        if method != self.method:  # the loop has changed: what was before is another measurement
            self.weights.clear()
            self.accumulations.clear()
            self.steps.clear()
        self.method = method
        self.weights[self.slot] = weights
        self.accumulations[self.slot] = max(1, self.accumulation)
        self.steps[self.slot] = self.steps_seen
        self.committed += 1

    def leave_out(self, reason: str) -> None:
        """A measured step does not count."""
        self.steps_left_out[reason] = self.steps_left_out.get(reason, 0) + 1

    def say(self, note: str) -> None:
        """Add a note, once."""
        if note and note not in self.notes:
            self.notes.append(note)


def summarize(log: Log, records: Floats | None, cost_share: float | None) -> NoiseResult:
    """``records`` has the shape (window, 2, groups); ``None``: nothing was measured."""
    squares, traces, steps, infinite = _solved(log, _ordered(log), records)
    whole = estimate(squares.sum(axis=1), traces.sum(axis=1))
    left_out = dict(log.steps_left_out)
    if infinite:
        left_out[_INFINITE] = infinite
    return NoiseResult(
        method=log.method,
        micro_batch=log.batch_size,
        accumulation=log.usual_accumulation,
        ranks=log.ranks,
        steps_seen=log.steps_seen,
        steps_used=len(steps),
        noise=whole.noise if whole is not None else None,
        gradient_square=whole.square if whole is not None else None,
        trace=whole.trace if whole is not None else None,
        modules=_modules(log, squares, traces) if whole is not None else (),
        history=_history(steps, squares.sum(axis=1), traces.sum(axis=1)),
        steps_left_out=left_out,
        left_out=tuple(f"{name}: {reason}" for name, reason in log.left_out.items()),
        cost_share=cost_share,
        cannot_tell=_cannot_tell(log, whole, len(steps)),
        notes=(
            *log.notes,
            *([f"measured only until this: {log.fault}"] if log.fault and steps else ()),
        ),
    )


def of_steps(log: Log, records: Floats | None) -> tuple[Floats, Floats]:
    """|G|² and tr Σ of each step that counts, in order."""
    squares, traces, _, _ = _solved(log, _ordered(log), records)
    return squares.sum(axis=1), traces.sum(axis=1)


def _ordered(log: Log) -> list[int]:
    """Places in the ring, the oldest step first."""
    return sorted(log.weights, key=lambda slot: (log.steps[slot], slot))


def _solved(
    log: Log, order: Sequence[int], records: Floats | None
) -> tuple[Floats, Floats, list[int], int]:
    """|G|² and tr Σ by step and group, the steps, and how many were not finite."""
    squares, traces, steps, infinite = [], [], list[int](), 0
    for slot in order if records is not None else ():
        assert records is not None
        if not np.isfinite(records[slot]).all():
            infinite += 1
            continue
        square, trace = log.weights[slot].solve(records[slot, 0], records[slot, 1])
        squares.append(square)
        traces.append(trace)
        steps.append(log.steps[slot])
    shape = (len(steps), len(log.groups))
    return np.reshape(squares, shape), np.reshape(traces, shape), steps, infinite


def _modules(log: Log, squares: Floats, traces: Floats) -> tuple[ModuleNoise, ...]:
    total = float(traces.sum())
    noises = []
    for number, (name, size) in enumerate(zip(log.groups, log.group_sizes, strict=True)):
        part = float(traces[:, number].sum())
        if part == 0 and not squares[:, number].any():
            continue  # no gradient, or none that is measured
        one = estimate(squares[:, number], traces[:, number])
        share = part / total if total > 0 else None
        noises.append(ModuleNoise(name, size, one.noise if one is not None else None, share))
    return tuple(noises)


def _history(steps: Sequence[int], squares: Floats, traces: Floats) -> tuple[NoiseMoment, ...]:
    moments = []
    for begin in range(0, len(steps) - _MOMENT + 1, _MOMENT):
        part = slice(begin, begin + _MOMENT)
        one = estimate(squares[part], traces[part])
        assert one is not None
        moments.append(NoiseMoment(steps[begin + _MOMENT // 2], one.noise))
    return tuple(moments)


def _cannot_tell(log: Log, estimate: NoiseEstimate | None, used: int) -> str:
    if log.fault and not used:
        return log.fault
    if estimate is not None:
        return _unbounded(estimate.noise)
    if log.steps_seen == 0 and not used:
        return "no step of a torch.optim optimizer of this model was seen"
    if log.accumulation * log.ranks <= 1 and log.method == "none":
        return (
            "a step has one micro-batch on one device, thus one batch size; accumulate, call "
            "NoiseScale.measure in the loop, or give per_example=True"
        )
    return f"{used} measured steps, {LEAST_STEPS} are needed; train on"


def _unbounded(noise: Interval) -> str:
    if noise.high is not None:
        return ""
    return (
        "the noise hides the gradient, so the noise scale has no upper bound; "
        "measure more steps, or with a larger effective batch"
    )
