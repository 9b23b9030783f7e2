"""|G|², tr Σ and their ratio from squared norms of gradients at two batch sizes, with intervals.

All is linear: the expected square of a sum of micro-batch gradients is ``a·|G|² + c·tr Σ``, with
``a`` and ``c`` from the sizes alone. Two such sums give both unknowns without bias (McCandlish et
al. 2018, appendix A.1); numerator and denominator are averaged apart, as the mean of a ratio
would be biased.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainfit.results.batch.noise import Interval

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
        found = self._determinant
        square = (small * self.big_t - big * self.small_t) / found
        trace = (big * self.small_g - small * self.big_g) / found
        return square, trace


def first_against_all(sizes: Sequence[int], loss: Loss = "mean", ranks: int = 1) -> Weights:
    """Of the gradient of a step's first micro-batch, and of the sum over all of them.

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
    """Of the mean of the parts' squared norms, and of the square of the sum of their gradients.

    Each part's loss is a mean over its samples.
    """
    count, inverse = float(len(sizes)), sum(1 / size for size in sizes)
    return Weights(1.0, inverse / count, count**2, inverse)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The noise scale and what it consists of; ``noise.high`` is ``None`` where |G|² may be 0."""

    noise: Interval
    square: Interval
    trace: Interval


def estimate(square: Floats, trace: Floats) -> Estimate | None:
    """From |G|² and tr Σ of each step, in order; ``None`` for fewer than :data:`LEAST_STEPS`.

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
    return Estimate(
        _fieller(mean_trace, mean_square, cov, t),
        _interval(mean_square, t * math.sqrt(cov[0, 0])),
        _interval(mean_trace, t * math.sqrt(cov[1, 1])),
    )


def _means(values: Floats, blocks: int) -> Floats:
    """Of blocks of one length; what does not fill them, the oldest, is left out."""
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
