"""What to mind when a batch gets smaller or larger: claims with sources, the learning rate."""

from __future__ import annotations

import math
from typing import Final

from trainfit.batch.goodput import CRITICAL_WITHIN, Split, epoch, last_micro_batch, left_over
from trainfit.results.batch import (
    Citation,
    Claim,
    Interval,
    LearningRate,
    Optimizer,
    Trade,
    samples_text,
)
from trainfit.results.text import percent

_MCCANDLISH: Final = (Citation("McCandlish 2018", "arXiv:1812.06162"),)
#: Below this many samples a GPU the error with BatchNorm rises (Wu and He 2018, figure 1).
_FEW_FOR_BATCH_NORM: Final = 16
#: Of these multiples of the noise scale a batch is far below, or far above it.
_FAR: Final = 4.0


def noise_claim(after: int, noise: Interval | None) -> Claim:
    """A claim on where the new batch lies compared with the noise scale."""
    if noise is None:
        text = (
            "not known: below it small batches cost little, above it large ones gain little; "
            "`trainfit watch --noise-scale` or trainfit.batch.NoiseScale measures it"
        )
    elif noise.low > _FAR * after:
        text = (
            f"{after} is far below it: gradients are mostly noise, and twice the batch needs "
            "half the steps"
        )
    elif noise.high is not None and noise.high * _FAR < after:
        text = f"{after} is far above it: more samples hardly improve a step"
    else:
        text = f"{after} is near it: fewer steps cost more samples in total"
    return Claim("noise scale", text, _MCCANDLISH)


def doubt_claim() -> Claim:
    """How far the noise scale can be trusted."""
    return Claim(
        "noise scale",
        "grows as the loss falls: measure late in training; the critical batch of a training is "
        f"within {CRITICAL_WITHIN:g} times of it, which all ranges here include",
        (
            Citation("Merrill 2025", "arXiv:2505.23971"),
            Citation("docs/figures.md"),
        ),
    )


def steps_claim(trade: Trade | None) -> Claim | None:
    """Steps and samples to the same loss."""
    if trade is None:
        return None
    text = "grow as 1 + critical batch ÷ batch, with the learning rate tuned"
    if trade.steps_now is not None and trade.steps_same_samples is not None:
        text += (
            f": {trade.steps_now:,} steps become {trade.steps_same_samples:,} for the same samples"
        )
        if trade.steps_then is not None:
            low, high = trade.steps.low, trade.steps.high
            assert high is not None
            ends = f"{trade.steps_now * low:,.0f} to {trade.steps_now * high:,.0f}"
            text += f", {trade.steps_then:,} ({ends}) for the same loss"
    return Claim("steps", text, _MCCANDLISH)


def factor_text(interval: Interval) -> str:
    """``0.27 × (0.25 to 0.31)``."""
    if interval.high is None:
        return f"at least {interval.low:.2g} ×"
    if interval.value is None:
        return f"{interval.low:.2g} to {interval.high:.2g} ×"
    value, low, high = f"{interval.value:.2g}", f"{interval.low:.2g}", f"{interval.high:.2g}"
    return f"{value} ×" if value == low == high else f"{value} × ({low} to {high})"


def rate_claim(rate: LearningRate, before: int, after: int) -> Claim:
    """The learning rate, both betas and warm-up."""
    if rate.factor is None or rate.low is None or rate.high is None:
        return Claim("learning rate", rate.holds, rate.sources)
    factor = factor_text(Interval(rate.factor, rate.low, rate.high))
    text = f"multiply by {factor.replace(' ×', '', 1)}"
    if rate.value is not None:
        text += f", to {rate.value:.3g}"
    if after > before:
        text += " (also try half of that: no rule holds above the largest stable rate)"
    if rate.beta2 is not None:
        text += f", and set beta2 to {rate.beta2:.4g}"
        if rate.beta1 is not None:
            text += f", beta1 to {rate.beta1:.2g}"
    if rate.warm_up:
        text += ", with a warm-up"
    text += f"; {rate.holds}"
    if before != after:
        text += "; count warm-up, schedule and EMA in samples"
    return Claim("learning rate", text, rate.sources)


def accumulation_claim(before: int, kept: Split | None) -> Claim | None:
    """Instead of a smaller batch."""
    if kept is None:
        return None
    same = "" if kept.batch_size == before else f" ({kept.batch_size} samples)"
    return Claim(
        "accumulation",
        f"or keep {before}: {kept.text}{same}, learning rate unchanged; below the noise scale the "
        "smaller batch is as good",
        (Citation("Marek 2025", "arXiv:2507.07101"),),
    )


def accumulating_claim(before: int, then: Split, trade: Trade | None) -> Claim | None:
    """A claim on a larger batch by accumulation, which makes no samples/s more."""
    if trade is None or then.batch_size <= before:
        return None
    return Claim(
        "accumulation",
        f"without more samples/s, as by accumulation alone, {then.batch_size} cost "
        f"{factor_text(trade.samples)} the time of {before}",
        (Citation("Pollux", "OSDI 2021"),),
    )


def accumulation_caveats(present: Split, kept: Split | None) -> list[Claim]:
    """What accumulation does not keep."""
    if kept is None:
        return []
    of_gpu = " on each GPU" if kept.gpus > 1 else ""
    return [
        Claim(
            "contrastive loss",
            f"with accumulation negatives of {kept.micro}, not {present.micro}{of_gpu}, unless "
            "gradients are cached",
            (Citation("GradCache", "arXiv:2101.06983"),),
        ),
        Claim(
            "token mean",
            "with accumulation: divide the sum of losses by the tokens of the whole step",
            (Citation("transformers#34191", "#35203"),),
        ),
    ]


def batch_norm_claim(present: Split, then: Split, has_batch_norm: bool | None) -> Claim | None:
    """What BatchNorm layers see, and the choices; ``None`` where it does not change or there are
    none."""
    sees = then.micro
    if has_batch_norm is False or sees >= present.micro:
        return None
    start = "BatchNorm layers see" if has_batch_norm else "BatchNorm layers, if any, see"
    is_few = sees < _FEW_FOR_BATCH_NORM
    few = f"below {_FEW_FOR_BATCH_NORM} the error rises" if is_few else "enough"
    sync = "SyncBatchNorm over the GPUs, " if then.gpus > 1 else ""
    return Claim(
        "batch norm",
        f"{start} {sees} samples, not {present.micro} ({few}): {sync}GroupNorm, or statistics "
        "frozen",
        (Citation("Wu 2018", "arXiv:1803.08494"),),
    )


def epoch_claim(samples: int, present: Split, then: Split) -> Claim:
    """Steps of an epoch, and what is left over at its end."""
    now, found = epoch(samples, present), epoch(samples, then)
    text = f"an epoch of {samples:,} samples: {now.steps:,} → {found.steps:,} steps"
    if over := left_over(samples, then):
        text += (
            f" and {over} of {then.accumulation} micro-batches, which make a short step, or begin "
            "the next epoch's first"
        )
    if last := last_micro_batch(samples, then):
        lost = percent(found.dropped / samples, decimals=1)
        text += f"; drop_last leaves out {found.dropped} samples ({lost}); without it each counts "
        text += f"{then.micro / last:.3g} times"
        if last == 1:
            text += ", and BatchNorm raises an error for a single sample"
    return Claim("last batch", text, (Citation("DataLoader"),))


def generalization_claim(before: int, after: int) -> Claim:
    """What is said of sharp minima, and what was found."""
    if after > before:
        text = "large batches generalize worse with epochs and rates kept, not with both tuned"
    else:
        text = "no gain by the noise of small batches was found once learning rates are tuned"
    return Claim("generalization", text, (Citation("Shallue 2018", "arXiv:1811.03600"),))


# ---
# The learning rate at another batch size: rules, their sources, and where they hold.
#
# With a known noise scale φ both rules saturate, as the best step of a noisy gradient does: a step
# of ε_max ÷ (1 + φ ÷ B) (McCandlish et al. 2018, equation 2.6); for Adam the same with the exponent
# ½, as its step is normalized by the gradient's noise. Far below φ these are the linear and the
# square-root rule; far above nothing changes.


_EXPONENT: Final[dict[Optimizer, float]] = {"sgd": 1.0, "adam": 0.5}
_RULE: Final[dict[Optimizer, str]] = {"sgd": "linear", "adam": "square root"}
_SOURCES: Final[dict[Optimizer, tuple[Citation, ...]]] = {
    "sgd": (
        Citation("Goyal 2017", "arXiv:1706.02677"),
        Citation("McCandlish 2018"),
    ),
    "adam": (
        Citation("Malladi 2022", "arXiv:2205.10287"),
        Citation("Marek 2025"),
    ),
}
#: A learning rate that grows by more than this begins with a warm-up (Goyal et al. 2017, 2.2).
_WARM_UP: Final = 2.0


def family(name: str) -> Optimizer:
    """The family of an optimizer's class, by the name that it has: which rule its rate follows.

    Adam's rule is RMSprop's, too (Malladi et al. 2022).
    """
    plain = name.lower()
    if "adam" in plain or plain == "rmsprop":
        return "adam"
    return "sgd" if plain == "sgd" else "other"


def factor(optimizer: Optimizer, before: float, after: float, noise: float) -> float:
    """The factor of the learning rate from ``before`` to ``after`` samples; ``noise`` may be
    infinite."""
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
            (Citation("Shallue 2018", "arXiv:1811.03600: no rule holds for all"),),
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
        sources=_SOURCES[optimizer],
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
