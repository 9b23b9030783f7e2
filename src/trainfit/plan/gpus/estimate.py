"""A job on one GPU that it was not simulated for: memory, speed, cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from trainfit.doctor.gpu_visibility.torch_wheels import index_for
from trainfit.hardware import GpuSpec, device_constants
from trainfit.memory.stream.device import context_parts
from trainfit.plan.command.interpreter import own_pytorch
from trainfit.plan.gpus.job import Job
from trainfit.plan.gpus.prices import Prices
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.steps.costing import (
    has_rates,
    machine_of,
    of_whole_step,
    samples_per_batch,
    speed_of,
)
from trainfit.plan.steps.curve import batch_sizes, knee
from trainfit.results.plan.gpu_comparison import GpuEstimate
from trainfit.results.plan.speed import StepSpeed
from trainfit.results.runs.kernels import DTYPES
from trainfit.speed.model.step import Machine, step_time
from trainfit.speed.model.work import COLUMNS, Work

#: Any driver: that of a machine which is still to be found.
_NEWEST_DRIVER: Final = 1 << 20
_BF16, _FP16 = DTYPES.index("bfloat16"), DTYPES.index("float16")
_DTYPE: Final = COLUMNS.index("dtype")


def grows_on(job: Job, estimate: GpuEstimate) -> bool:
    """Does what stays behind with each step fill this GPU?"""
    return bool(job.growth_on(estimate).unfit)


def estimated(
    job: Job,
    gpu: GpuSpec,
    factor: float,
    prices: Prices | None,
    *,
    exact: bool,
) -> GpuEstimate:
    memory_model = memory_model_of(job, gpu)
    needed, fits = job.capacity.now(memory_model)
    estimate = GpuEstimate(
        gpu=gpu.key,
        capability=gpu.capability,
        laptop=gpu.is_laptop,
        shared_memory=gpu.shared_memory_device,
        memory_bytes=gpu.memory_bytes,
        power_w=gpu.power_watts or None,
        device_bytes=needed,
        fits=fits,
        largest_batch=job.capacity.largest(memory_model)
        if exact
        else job.capacity.about(memory_model),
        largest_is_exact=exact,
        notes=tuple(_gpu_notes(job, gpu)),
    )
    if not has_rates(gpu) or not len(job.work.table) or not estimate.runs:
        return estimate
    return _with_price(
        _with_speed(estimate, job, gpu, factor), prices, grows=grows_on(job, estimate)
    )


def memory_model_of(job: Job, gpu: GpuSpec) -> MemoryModel:
    """An idle GPU in which the process uses the libraries that it used in the simulation."""
    libraries = {part.name for part in context_parts(job.recording)}
    return MemoryModel(gpu, job.settings, 0.0, device_constants(gpu).used(libraries))


def runnable(work: Work, gpu: GpuSpec) -> Work:
    """The same in float16 where the GPU has no bfloat16."""
    if gpu.supports_bf16 or not (work.column("dtype") == _BF16).any():
        return work
    table = work.table.copy()
    table[table[:, _DTYPE] == _BF16, _DTYPE] = _FP16
    return dataclasses.replace(work, table=table)


def step_on(job: Job, machine: Machine, batch: int | None, factor: float = 1.0) -> StepSpeed | None:
    work = job.work_at(batch)
    if work is None:
        return None
    per_batch = samples_per_batch(job.recording, job.batch)
    found = speed_of(step_time(runnable(work, machine.gpu), machine), batch, per_batch)
    return _scaled(of_whole_step(found, job.recording), factor)


def _scaled(step: StepSpeed, factor: float) -> StepSpeed:
    """As a measurement elsewhere has it: all of its times, so many times."""
    if factor == 1.0:
        return step
    low, high = step.range_s
    rate = step.samples_per_s
    return dataclasses.replace(
        step,
        seconds=step.seconds * factor,
        range_s=(low * factor, high * factor),
        gpu_s=step.gpu_s * factor,
        host_s=step.host_s * factor,
        copies_s=step.copies_s * factor,
        samples_per_s=None if rate is None else rate / factor,
    )


def _with_speed(estimate: GpuEstimate, job: Job, gpu: GpuSpec, factor: float) -> GpuEstimate:
    machine, grows = machine_of(gpu), grows_on(job, estimate)
    now = step_on(job, machine, job.batch, factor) if estimate.fits else None
    # While memory grows, no batch size fits for long: no saturation batch size is given, and no run
    # time.
    saturated = None if grows else _saturated(job, machine, estimate.largest_batch, factor)
    run = now or saturated
    if run is None:
        return estimate
    rate = run.samples_per_s
    return dataclasses.replace(
        estimate,
        now=now,
        at_saturation=saturated,
        run_batch=run.batch_size,
        samples_per_s=rate,
        samples_per_joule=rate / estimate.power_w if rate and estimate.power_w else None,
        run_s=job.samples / rate if rate and job.samples and not grows else None,
    )


def _saturated(job: Job, machine: Machine, largest: int | None, factor: float) -> StepSpeed | None:
    """The step at the saturation batch size, of the batch sizes that fit.

    First among the powers of two, then among all that are costed between two of them.
    """
    if not largest or job.kernels is None:
        return None
    sizes = batch_sizes(largest)
    steps = {each: step_on(job, machine, each, factor) for each in _coarse(sizes)}
    first = knee([each for each in steps.values() if each is not None])
    if first is None:
        return None
    below = max((each for each in steps if each < first), default=0)
    between = [each for each in sizes if below < each < first]
    steps |= {each: step_on(job, machine, each, factor) for each in between}
    found = knee([each for _, each in sorted(steps.items()) if each is not None])
    return steps[found] if found is not None else None


def _coarse(sizes: Sequence[int]) -> list[int]:
    return [each for each in sizes if not each & (each - 1) or each == sizes[-1]]


def _with_price(estimate: GpuEstimate, prices: Prices | None, *, grows: bool) -> GpuEstimate:
    price = prices.per_hour.get(estimate.gpu) if prices is not None else None
    if price is None:
        return estimate
    rate = estimate.samples_per_s
    return dataclasses.replace(
        estimate,
        price_per_hour=price,
        samples_per_unit=3600 * rate / price if rate and price and not grows else None,
        cost=estimate.run_s / 3600 * price if estimate.run_s is not None else None,
    )


def _gpu_notes(job: Job, gpu: GpuSpec) -> Iterable[str]:
    dtypes = job.work.column("dtype")
    if (dtypes == _BF16).any() and not gpu.supports_bf16:
        yield "no bfloat16: as float16 AMP, which needs a GradScaler"
    if not gpu.has_tensor_cores:
        yield "no Tensor cores"
    version = own_pytorch()
    if index_for(_NEWEST_DRIVER, [gpu.capability], version) is None:
        major, minor = gpu.capability
        release = version.partition("+")[0]
        yield f"no build of PyTorch {release} serves compute capability {major}.{minor}"
