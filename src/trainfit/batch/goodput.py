"""Statistical efficiency times throughput: which batch size learns fastest, and how flat that is.

Pollux (Qiao et al., OSDI 2021, section 3): a sample of a batch of B makes (φ + B0) ÷ (φ + B) of the
progress of one at B0, with the noise scale φ. It is McCandlish's samples-to-target,
E_min·(1 + B ÷ φ), as a ratio. Nothing here is measured or random.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trainfit.results.batch import NEARLY, Epoch, GoodputCurve, GoodputPoint, Interval, StepTime

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
        min(each.batch_size for each in at_ends),
        max(each.batch_size for each in at_ends),
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
    found = {(each.micro_batch, each.accumulation, each.gpus): each for each in times}
    for micro, gpus in {(each.micro_batch, each.gpus) for each in times}:
        known = sorted(
            (each.accumulation, each.seconds)
            for each in times
            if (each.micro_batch, each.gpus) == (micro, gpus)
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
