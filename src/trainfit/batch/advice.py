"""What to mind when a batch gets smaller or larger: claims with sources, the learning rate, and
which batch size learns fastest.

Statistical efficiency times throughput: which batch size learns fastest, and how flat that is.

Pollux (Qiao et al., OSDI 2021, section 3): a sample of a batch of B makes (φ + B0) ÷ (φ + B) of the
progress of one at B0, with the noise scale φ. It is McCandlish's samples-to-target,
E_min·(1 + B ÷ φ), as a ratio. Nothing here is measured or random.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trainfit.results.batch import (
    NEARLY,
    Citation,
    Claim,
    Epoch,
    GoodputCurve,
    GoodputPoint,
    Interval,
    LearningRate,
    Optimizer,
    StepTime,
    Trade,
    samples_text,
)
from trainfit.results.text import percent

#: How far the critical batch of a training may be from its noise scale, either way
#: (docs/figures.md; Merrill et al. 2025, arXiv:2505.23971, call it a doubtful proxy).
CRITICAL_WITHIN: Final = 3.0


def critical_batch(noise: Interval) -> Interval:
    """The interval in which the critical batch lies: the noise scale's, :data:`CRITICAL_WITHIN`
    wider."""
    high = None if noise.high is None else CRITICAL_WITHIN * noise.high
    return Interval(noise.value, noise.low / CRITICAL_WITHIN, high)


def efficiency(batch: float, noise: float, reference: float) -> float:
    """Progress of a sample at ``batch`` compared with one at ``reference``; 1 where the noise scale
    is infinite."""
    return 1.0 if math.isinf(noise) else (noise + reference) / (noise + batch)


def steps_factor(before: float, after: float, noise: float) -> float:
    """Steps to the same loss at ``after``, as a multiple of those at ``before``."""
    return before / after / efficiency(after, noise, before)


def samples_factor(before: float, after: float, noise: float) -> float:
    """Samples to the same loss at ``after``, as a multiple of those at ``before``."""
    return 1 / efficiency(after, noise, before)


def over(noise: Interval, of: Callable[[float], float]) -> Interval:
    """A monotone function of the noise scale over its interval; no upper end is infinity.

    A noise scale of 0 is one far below any batch.
    """
    ends = [of(max(noise.low, 1e-9)), of(math.inf if noise.high is None else noise.high)]
    value = of(noise.value) if noise.value is not None and noise.value > 0 else None
    if value is None and noise.value is not None:
        value = ends[0]
    return Interval(value, min(ends), max(ends))


def curve(times: Iterable[StepTime], noise: Interval, reference: int) -> GoodputCurve:
    """Goodput of each step time, compared with samples at ``reference``.

    Of several steps of one batch size (other micro-batches, other GPUs) all are points. Without an
    estimate the lower end of the interval stands for it: it never says that a larger batch is
    better than the data tell. Raises ``ValueError`` without a step time.
    """
    ordered = sorted(times, key=lambda each: (each.batch_size, each.seconds))
    if not ordered:
        raise ValueError("a goodput curve needs a step time")
    value = noise.value if noise.value else max(noise.low, 1e-9)
    ends = max(noise.low, 1e-9), math.inf if noise.high is None else noise.high
    points = tuple(_point(step, value, ends, reference) for step in ordered)
    best = _best([point.per_s for point in points])
    limit = NEARLY * points[best].per_s
    flat = [point.step.batch_size for point in points if point.per_s >= limit]
    at_ends = [ordered[_best([_goodput(s, end, reference) for s in ordered])] for end in ends]
    return GoodputCurve(
        reference,
        points,
        best,
        min(time.batch_size for time in at_ends),
        max(time.batch_size for time in at_ends),
        min(flat),
        max(flat),
    )


def _point(step: StepTime, noise: float, ends: tuple[float, float], reference: int) -> GoodputPoint:
    values = [_goodput(step, end, reference) for end in ends]
    return GoodputPoint(
        step,
        efficiency(step.batch_size, noise, reference),
        _goodput(step, noise, reference),
        min(values),
        max(values),
    )


def _goodput(step: StepTime, noise: float, reference: int) -> float:
    return step.throughput * efficiency(step.batch_size, noise, reference)


def _best(values: Sequence[float]) -> int:
    """The first of the best: of equals, the smaller batch."""
    return max(range(len(values)), key=lambda place: (values[place], -place))


def accumulated(times: Sequence[StepTime], most: int) -> tuple[StepTime, ...]:
    """The step times, and for each one the same with accumulation, doubled up to ``most`` samples.

    A micro-batch costs what the step with one costs: an upper bound, as the optimizer's update is
    in it. With two accumulations of a micro-batch known, what lies between is their line. Nothing
    is said of fewer micro-batches than are known: they share the update among fewer.
    """
    found = {(time.micro_batch, time.accumulation, time.gpus): time for time in times}
    for micro, gpus in {(time.micro_batch, time.gpus) for time in times}:
        known = sorted(
            (time.accumulation, time.seconds)
            for time in times
            if (time.micro_batch, time.gpus) == (micro, gpus)
        )
        count = 2
        while micro * gpus * count <= most:
            key = (micro, count, gpus)
            if key not in found and count > known[0][0]:
                found[key] = StepTime(micro, count, gpus, _seconds(known, count), "derived")
            count *= 2
    return tuple(sorted(found.values(), key=lambda each: (each.batch_size, each.seconds)))


def _seconds(known: Sequence[tuple[int, float]], count: int) -> float:
    (first, first_s), (last, last_s) = known[0], known[-1]
    if last > first and last_s > first_s:
        each = (last_s - first_s) / (last - first)
        return max(first_s + each * (count - first), each * count)
    return first_s / first * count


# ---
# How a step is split: micro-batch × accumulation × GPUs, and what that makes of an epoch.


@dataclasses.dataclass(frozen=True)
class Split:
    """An optimizer step: ``accumulation`` micro-batches of ``micro`` samples on each GPU."""

    micro: int
    accumulation: int = 1
    gpus: int = 1

    @property
    def batch_size(self) -> int:
        """Samples of the step."""
        return self.micro * self.accumulation * self.gpus

    @property
    def text(self) -> str:
        """``4 micro-batches of 8 on each of 2 GPUs``."""
        where = f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""
        if self.accumulation == 1:
            return f"{self.micro}{where}"
        return f"{self.accumulation} micro-batches of {self.micro}{where}"


def split(effective: int, largest: int, gpus: int = 1) -> Split:
    """``effective`` samples on ``gpus``, with micro-batches of ``largest`` at most.

    All micro-batches are equal. Exact where a divisor allows it with at most twice the accumulation
    that is needed; else the nearest number of samples above.
    """
    share = -(-effective // gpus)
    least = -(-share // largest)
    for accumulation in range(least, 2 * least + 1):
        if effective % (accumulation * gpus) == 0:
            return Split(effective // (accumulation * gpus), accumulation, gpus)
    return Split(-(-share // least), least, gpus)


def after(present: Split, effective: int) -> Split:
    """The step of ``effective`` samples that the same training has: with the present micro-batch,
    where that is accumulated now, as then memory is likely to allow no more."""
    largest = present.micro if present.accumulation > 1 else effective
    return split(effective, largest, present.gpus)


def epoch(samples: int, of: Split) -> Epoch:
    """Full steps of an epoch, and the samples outside of full micro-batches.

    Each GPU gets an equal share, as of a DistributedSampler.
    """
    micro_batches = samples // of.gpus // of.micro
    full = micro_batches * of.micro * of.gpus
    return Epoch(of.batch_size, micro_batches // of.accumulation, samples - full)


def left_over(samples: int, of: Split) -> int:
    """Full micro-batches of a GPU after the last full step of an epoch."""
    return samples // of.gpus // of.micro % of.accumulation


def last_micro_batch(samples: int, of: Split) -> int:
    """Samples of the uneven last micro-batch of a GPU; 0: there is none."""
    return samples // of.gpus % of.micro


def same_samples(steps: int, before: int, after: int) -> int:
    """Steps of ``after`` samples for as many samples as ``steps`` of ``before``."""
    return -(-steps * before // after)


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
