"""How fast a job is: steps of its recordings, costed on the GPU that is planned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_custom import is_made_up
from trainfit.plan.laws import Pair, last_step, work_law
from trainfit.results.recording import Recording
from trainfit.results.speed import KNEE, Speed, StepSpeed
from trainfit.speed.efficiency import FITTED, RANGE
from trainfit.speed.host import REFERENCE_HZ, HostCosts
from trainfit.speed.kernel_times import peak_flops
from trainfit.speed.scaling import NotAffineError
from trainfit.speed.step import Machine, StepTime, step_time
from trainfit.speed.work import Work

#: Batch sizes that are costed lie in steps of a quarter of the power of two below them.
_PARTS: Final = 4
_TILE: Final = 8
_NO_LAUNCHES: Final = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0)


def machine_of(gpu: GpuSpec, core_hz: float | None = None) -> Machine:
    """The GPU in a computer of which nothing is known but (perhaps) the clock of its cores: what
    a core does a cycle is taken to be alike."""
    return Machine(gpu, FITTED, core_speed=(core_hz or REFERENCE_HZ) / REFERENCE_HZ)


def speed(
    recording: Recording,
    batch: int | None,
    gpu: GpuSpec,
    others: Sequence[tuple[int, Recording]] = (),
    largest: int | None = None,
    samples: int | None = None,
    core_hz: float | None = None,
) -> Speed | None:
    """Of the last whole step of ``recording``; ``None`` where nothing can be said.

    ``others`` are two recordings at different batch sizes, from which all up to ``largest``
    follow; ``samples`` is how many an epoch has, ``core_hz`` the clock of the CPU's cores.
    """
    if not has_rates(gpu) or not recording.steps:
        return None
    work = last_step(recording)
    if not len(work.table):
        return None
    machine = machine_of(gpu, core_hz)
    took = step_time(work, machine)
    now = speed_of(took, batch)
    curve, notes = _curve(others, machine, largest)
    return Speed(
        now=now,
        curve=curve,
        knee=knee(curve),
        mfu=_utilization(work, gpu, took.seconds),
        by_kind_s=took.by_kind_s,
        constants=constants_of(machine),
        epoch_s=samples / now.samples_per_s if samples and now.samples_per_s else None,
        graphed_s=step_time(work, dataclasses.replace(machine, host=_NO_LAUNCHES)).seconds,
        notes=notes,
    )


def step_seconds(recording: Recording, gpu: GpuSpec, core_hz: float | None = None) -> float | None:
    """The last whole step of a recording; ``None`` where nothing can be said."""
    if not has_rates(gpu) or not recording.steps:
        return None
    work = last_step(recording)
    return step_time(work, machine_of(gpu, core_hz)).seconds if len(work.table) else None


def enough(pair: Pair, gpu: GpuSpec, most: int, core_hz: float | None = None) -> int | None:
    """The smallest batch size with nearly the most samples a second of those up to ``most``, as a
    multiple of 8 where one is left (tiles of Tensor cores); ``None`` where that is not known."""
    if not has_rates(gpu):
        return None
    curve, _ = _curve(pair, machine_of(gpu, core_hz), most)
    found = knee(curve)
    if found is None or found <= _TILE // 2:
        return found
    return min(-(-found // _TILE) * _TILE, most)


def constants_of(machine: Machine) -> str:
    """Where the model's constants are from."""
    clock = f"launches as by a core of {machine.core_hz / 1e9:.3g} GHz"
    return f"{machine.efficiency.source}; {clock}, copies over PCIe 4.0 x16 (assumed)"


def has_rates(gpu: GpuSpec) -> bool:
    """Is it a real card, not one made to measure?"""
    return not is_made_up(gpu, "fp32_flops")


def speed_of(took: StepTime, batch: int | None) -> StepSpeed:
    """A step's time with the range that the truth lies in, and its rate."""
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
    try:
        law = work_law(others)
    except NotAffineError as error:
        return (), (f"the step's time is not known at other batch sizes: {error}",)
    found = [speed_of(step_time(law.at(size), machine), size) for size in batch_sizes(largest)]
    return tuple(found), ()


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, …: four to each doubling, and the largest."""
    sizes = {largest}
    power = 1
    while power <= largest:
        sizes |= {power + power * part // _PARTS for part in range(_PARTS)}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def knee(curve: Sequence[StepSpeed]) -> int | None:
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
