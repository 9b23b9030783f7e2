"""Throughput over batch sizes, and the smallest of them that is nearly as fast as any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.steps.batch_scaling import Pair, work_law
from trainfit.plan.steps.costing import has_rates, samples_per_batch, speed_of
from trainfit.results.plan.speed import KNEE, StepSpeed
from trainfit.speed.model.scaling import NotAffineError
from trainfit.speed.model.step import Machine, step_time

#: Batch sizes that are costed lie in steps of a quarter of the power of two below them.
_PARTS: Final = 4
_TILE: Final = 8


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps at other batch sizes, the smallest first, and what is to be said of them.

    Of ``tile`` samples a multiple is recommended (:func:`tile_of`).
    """

    steps: tuple[StepSpeed, ...] = ()
    notes: tuple[str, ...] = ()
    tile: int = _TILE


def tile_of(gpu: GpuSpec) -> int:
    """Samples that a batch size is best a multiple of: Tensor cores work on tiles of 8; without
    them 1."""
    return _TILE if gpu.has_tensor_cores else 1


def saturation_batch(curve: Curve, noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any (:func:`knee`), as a multiple of the
    curve's tile where one is left; ``None`` where that is not known.

    The multiple has to be nearly as fast itself: where a script takes a batch in parts of 3, that
    of 6 is, and that of 8 is not."""
    fast = [each.batch_size or 0 for each in _nearly_as_fast(curve.steps, noise_scale)]
    for size in fast:
        if size <= curve.tile // 2 or not size % curve.tile:
            return size
    most = curve.steps[-1].batch_size or 0 if fast else 0
    return min(-(-fast[0] // curve.tile) * curve.tile, most) if fast else None


def curve_of(pair: Pair, machine: Machine, largest: int) -> Curve:
    """Steps at batch sizes up to ``largest``, from two recordings at different ones."""
    if not has_rates(machine.gpu) or len(pair) != 2 or not largest:
        return Curve()
    try:
        law = work_law(pair)
    except NotAffineError as error:
        return Curve((), (f"the step's time is not known at other batch sizes: {error}",))
    shares = {samples_per_batch(recording, batch) for batch, recording in pair}
    if len(shares) > 1:
        return Curve(
            (),
            (
                "the step's time is not known at other batch sizes: the samples of an optimizer "
                "step do not grow with the batch size",
            ),
        )
    per_batch = shares.pop()
    sizes = batch_sizes(largest)
    return Curve(
        tuple(speed_of(step_time(law.at(size), machine), size, per_batch) for size in sizes),
        tile=tile_of(machine.gpu),
    )


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, …: four to each doubling, and the largest."""
    sizes = {largest}
    power = 1
    while power <= largest:
        sizes |= {power + power * part // _PARTS for part in range(_PARTS)}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def knee(curve: Sequence[StepSpeed], noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any, by samples a second.

    With the gradients' ``noise_scale`` B, in samples, by those that the same loss needs: with a
    batch size b as many as 1 + b / B times the least (McCandlish et al., "An Empirical Model of
    Large-Batch Training", 2018).
    """
    return next((each.batch_size for each in _nearly_as_fast(curve, noise_scale)), None)


def _nearly_as_fast(curve: Sequence[StepSpeed], noise_scale: float | None) -> list[StepSpeed]:
    """The steps that :func:`knee` chooses from, in the curve's order."""
    rates = [_rate(each) for each in curve]
    if noise_scale is not None:
        rates = [
            rate / (1 + rate * each.seconds / noise_scale)
            for each, rate in zip(curve, rates, strict=True)
        ]
    most = max(rates, default=0.0)
    timed = zip(curve, rates, strict=True)
    return [step for step, rate in timed if rate >= KNEE * most]


def _rate(step: StepSpeed) -> float:
    """Samples a second, or what is in proportion to them at all batch sizes."""
    if step.samples_per_s is not None:
        return step.samples_per_s
    return (step.batch_size or 0) / step.seconds if step.seconds > 0 else 0.0
