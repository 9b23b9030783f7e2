"""How fast a job is: steps of its recordings, costed on the GPU that is planned for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_custom import CUSTOM_DEFAULT
from trainfit.results.recording import Recording
from trainfit.results.speed import KNEE, Speed, StepSpeed
from trainfit.speed.efficiency import FITTED, RANGE
from trainfit.speed.kernel_times import peak_flops
from trainfit.speed.scaling import NotAffineError, WorkLaw
from trainfit.speed.step import Machine, StepTime, step_time
from trainfit.speed.work import Work

#: Batch sizes that are costed lie in steps of a quarter of the power of two below them.
_PARTS: Final = 4
#: What is taken of the computer around the GPU.
_HOST: Final = "launches as by a core of 3 GHz, copies over PCIe 4.0 x16 (assumed)"


def machine_of(gpu: GpuSpec) -> Machine:
    """The GPU in a computer of which nothing else is known."""
    return Machine(gpu, FITTED)


def speed(
    recording: Recording,
    batch: int | None,
    gpu: GpuSpec,
    others: Sequence[tuple[int, Recording]] = (),
    largest: int | None = None,
    samples: int | None = None,
) -> Speed | None:
    """Of the last whole step of ``recording``; ``None`` where nothing can be said.

    ``others`` are two recordings at different batch sizes, from which all up to ``largest``
    follow; ``samples`` is how many an epoch has.
    """
    if gpu.sources.get("fp32_flops", "").startswith(CUSTOM_DEFAULT) or not recording.steps:
        return None
    work = Work.of_step(recording, recording.steps - 1)
    if not len(work.table):
        return None
    machine = machine_of(gpu)
    took = step_time(work, machine)
    now = _speed_of(took, batch)
    curve, notes = _curve(others, machine, largest)
    return Speed(
        now=now,
        curve=curve,
        knee=_knee(curve),
        mfu=_utilization(work, gpu, took.seconds),
        by_kind_s=took.by_kind_s,
        constants=f"{machine.efficiency.source}; {_HOST}",
        epoch_s=samples / now.samples_per_s if samples and now.samples_per_s else None,
        notes=notes,
    )


def _speed_of(took: StepTime, batch: int | None) -> StepSpeed:
    low, high = RANGE
    return StepSpeed(
        batch,
        took.seconds,
        (took.seconds * low, took.seconds * high),
        took.gpu_s,
        took.host_s,
        took.copies_s,
        took.bound,
        batch / took.seconds if batch and took.seconds > 0 else None,
    )


def _curve(
    others: Sequence[tuple[int, Recording]], machine: Machine, largest: int | None
) -> tuple[tuple[StepSpeed, ...], tuple[str, ...]]:
    if len(others) != 2 or not largest:
        return (), ()
    (one, first), (other, second) = others
    steps = min(first.steps, second.steps)
    try:
        law = WorkLaw.between(
            Work.of_step(first, steps - 1), one, Work.of_step(second, steps - 1), other
        )
    except NotAffineError as error:
        return (), (f"the step's time is not known at other batch sizes: {error}",)
    found = [_speed_of(step_time(law.at(size), machine), size) for size in batch_sizes(largest)]
    return tuple(found), ()


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, …: four to each doubling, and the largest."""
    sizes = {largest}
    power = 1
    while power <= largest:
        sizes |= {power + power * part // _PARTS for part in range(_PARTS)}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def _knee(curve: Sequence[StepSpeed]) -> int | None:
    """The smallest batch size that is nearly as fast as any, by samples a second."""
    rates = [each.samples_per_s or 0.0 for each in curve]
    most = max(rates, default=0.0)
    fast = (each.batch_size for each, rate in zip(curve, rates, strict=True) if rate >= KNEE * most)
    return next(fast, None)


def _utilization(work: Work, gpu: GpuSpec, seconds: float) -> float | None:
    """FLOPs of each dtype in the time that they take at the peak, over the step's."""
    flops = np.bincount(work.column("dtype"), weights=work.column("flops"))
    if seconds <= 0 or not flops.any():
        return None
    peak = peak_flops(gpu)[: len(flops)]
    return float((flops / peak).sum() / seconds)
