"""The learning rate at another batch size: rules, their sources, and where they hold.

With a known noise scale φ both rules saturate, as the best step of a noisy gradient does: a step of
ε_max ÷ (1 + φ ÷ B) (McCandlish et al. 2018, equation 2.6); for Adam the same with the exponent ½,
as its step is normalized by the gradient's noise. Far below φ these are the linear and the
square-root rule; far above nothing changes.
"""

from __future__ import annotations

import math
from typing import Final

from trainfit.results.batch.explanation import LearningRate, Optimizer
from trainfit.results.batch.noise import Interval, samples_text

_EXPONENT: Final[dict[Optimizer, float]] = {"sgd": 1.0, "adam": 0.5}
_RULE: Final[dict[Optimizer, str]] = {"sgd": "linear", "adam": "square root"}
_SOURCE: Final[dict[Optimizer, str]] = {
    "sgd": "Goyal 2017, arXiv:1706.02677; McCandlish 2018",
    "adam": "Malladi 2022, arXiv:2205.10287; Marek 2025",
}
#: A learning rate that grows by more than this begins with a warm-up (Goyal et al. 2017, 2.2).
_WARM_UP: Final = 2.0


def factor(optimizer: Optimizer, before: float, after: float, noise: float) -> float:
    """Of the learning rate, from ``before`` to ``after`` samples; ``noise`` may be infinite."""
    linear = after / before
    if not math.isinf(noise):
        linear = (1 + noise / before) / (1 + noise / after)
    return float(linear ** _EXPONENT[optimizer])


def beta(value: float, before: float, after: float) -> float:
    """A decay of Adam's moments with the same half-life in samples."""
    return float(value ** (after / before))


def learning_rate(
    optimizer: Optimizer,
    before: int,
    after: int,
    noise: Interval | None,
    *,
    value: float | None = None,
    first: float | None = None,
    second: float | None = None,
) -> LearningRate:
    """What to set at ``after`` samples a step; ``value``, ``first`` and ``second`` are the learning
    rate, beta1 and beta2 at ``before``.

    The square-root rule keeps the half-lives of both betas in samples (Malladi et al. 2022). beta1
    is said for a larger batch alone: for a smaller one a fixed beta1 is as good (Marek et al.
    2025), but as steps get few, momentum over ten of them limits a training.
    """
    if optimizer not in _EXPONENT:
        return LearningRate(
            optimizer, "none", None, None, None, None, None, False,
            "no rule is known for this optimizer: tune it, starting from the current value",
            "Shallue 2018, arXiv:1811.03600: no rule holds for all",
        )  # fmt: skip
    adapts = optimizer == "adam"
    low, high = (0.0, math.inf)
    if noise is not None:
        low, high = noise.low, math.inf if noise.high is None else noise.high
    ends = sorted(factor(optimizer, before, after, max(end, 1e-9)) for end in (low, high))
    known = noise.value if noise is not None else None
    found = factor(optimizer, before, after, known if known is not None else math.inf)
    return LearningRate(
        optimizer=optimizer,
        rule=_RULE[optimizer],
        factor=found,
        low=ends[0],
        high=ends[1],
        value=value * found if value is not None else None,
        beta2=beta(second, before, after) if adapts and second else None,
        warm_up=found > _WARM_UP,
        holds=_holds(optimizer, max(before, after), noise),
        source=_SOURCE[optimizer],
        beta1=beta(first, before, after) if adapts and first and after > before else None,
    )


def _holds(optimizer: Optimizer, largest: int, noise: Interval | None) -> str:
    rule = f"the {_RULE[optimizer]} rule"
    if noise is None:
        return f"{rule} holds below the noise scale, which is not known here"
    if noise.low > 4 * largest:
        return f"{rule} holds: both batches are well below the noise scale"
    if noise.high is not None and noise.high < largest:
        limit = samples_text(noise.high)
        return f"{rule} ends at the noise scale ({limit} at most): above it the rate stays constant"
    return f"{rule}, flattened near the noise scale"
