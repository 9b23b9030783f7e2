"""A job on GPUs that it was not simulated for: does it fit, how fast, at what cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from trainfit.doctor.packages import index_for
from trainfit.hardware import GpuSpec, catalogue, device_constants
from trainfit.memory.capacity import context_parts
from trainfit.plan.command.interpreter import own_pytorch
from trainfit.plan.gpu_job import Job, job_on_several
from trainfit.plan.prices import Prices
from trainfit.plan.sizing.costing import (
    constants_of,
    has_rates,
    machine_of,
    of_whole_step,
    samples_per_batch,
    speed_of,
)
from trainfit.plan.sizing.curve import batch_sizes, knee
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.runs.steps import DTYPES
from trainfit.results.speed import (
    Anchor,
    FigureEffect,
    GpuComparison,
    GpuEstimate,
    StepSpeed,
    Strategy,
)
from trainfit.results.text import byte_rate, ghz, size, three_digits, times, with_prefix
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import COLUMNS, Work

# ---
# A job on one GPU that it was not simulated for: memory, speed, cost.


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
    strategy: Strategy | None = None,
) -> GpuEstimate:
    """The job on one GPU; with a ``strategy`` on each of ``gpu.count``, without a look for the
    saturation batch size."""
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
        count=gpu.count,
        strategy=strategy or "",
        high_bytes=None if strategy is None else job.capacity.most(memory_model),
    )
    if not has_rates(gpu) or not len(job.work.table) or not estimate.runs:
        return estimate
    grows = grows_on(job, estimate)
    if strategy is None:
        return _with_price(_with_speed(estimate, job, gpu, factor), prices, grows=grows)
    return _with_price(_at_its_batch(estimate, job, gpu, factor), prices, grows=grows)


def memory_model_of(job: Job, gpu: GpuSpec) -> MemoryModel:
    """An idle GPU in which the process uses the libraries that it used in the simulation."""
    libraries = {part.name for part in context_parts(job.recording)}
    return MemoryModel(gpu, job.settings, 0.0, device_constants(gpu).used(libraries))


def runnable(work: Work, gpu: GpuSpec) -> Work:
    """The same work in float16 where the GPU has no bfloat16."""
    if gpu.supports_bf16 or not (work.column("dtype") == _BF16).any():
        return work
    table = work.table.copy()
    table[table[:, _DTYPE] == _BF16, _DTYPE] = _FP16
    return dataclasses.replace(work, table=table)


def step_on(
    job: Job, machine: HostedGpu, batch: int | None, factor: float = 1.0
) -> StepSpeed | None:
    work = job.work_at(batch)
    if work is None:
        return None
    per_batch = samples_per_batch(job.recording, job.batch)
    speed = speed_of(step_time(runnable(work, machine.gpu), machine), batch, per_batch)
    return _scaled(of_whole_step(speed, job.recording), factor)


def _scaled(step: StepSpeed, factor: float) -> StepSpeed:
    """The same step with all of its times multiplied by ``factor``, as a measurement elsewhere has
    it."""
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
    found = dataclasses.replace(estimate, now=now, at_saturation=saturated)
    return _of_run(found, now or saturated, job, grows=grows)


def _at_its_batch(estimate: GpuEstimate, job: Job, gpu: GpuSpec, factor: float) -> GpuEstimate:
    """The same estimate with the step at the job's batch size, or where that is too large, at the
    largest."""
    machine, grows = machine_of(gpu), grows_on(job, estimate)
    now = step_on(job, machine, job.batch, factor) if estimate.fits else None
    largest = None
    if now is None and not grows:
        largest = step_on(job, machine, estimate.largest_batch, factor)
    found = dataclasses.replace(estimate, now=now, at_largest=largest)
    return _of_run(found, now or largest, job, grows=grows)


def _of_run(estimate: GpuEstimate, run: StepSpeed | None, job: Job, *, grows: bool) -> GpuEstimate:
    """What follows from a step for the whole run, on all GPUs together."""
    if run is None:
        return estimate
    rate = run.samples_per_s
    if rate is not None:
        rate *= estimate.count
    power = estimate.power_w * estimate.count if estimate.power_w else None
    return dataclasses.replace(
        estimate,
        run_batch=run.batch_size,
        samples_per_s=rate,
        samples_per_joule=rate / power if rate and power else None,
        run_s=job.samples / rate if rate and job.samples and not grows else None,
    )


def _saturated(
    job: Job, machine: HostedGpu, largest: int | None, factor: float
) -> StepSpeed | None:
    """The step at the saturation batch size, of the batch sizes that fit.

    First among the powers of two, then among all that are costed between two of them.
    """
    if not largest or job.kernels is None:
        return None
    sizes = batch_sizes(largest)
    steps = {number: step_on(job, machine, number, factor) for number in _coarse(sizes)}
    first = knee([step for step in steps.values() if step is not None])
    if first is None:
        return None
    below = max((step for step in steps if step < first), default=0)
    between = [batch_size for batch_size in sizes if below < batch_size < first]
    steps |= {batch_size: step_on(job, machine, batch_size, factor) for batch_size in between}
    found = knee([each for _, each in sorted(steps.items()) if each is not None])
    return steps[found] if found is not None else None


def _coarse(sizes: Sequence[int]) -> list[int]:
    return [each for each in sizes if not each & (each - 1) or each == sizes[-1]]


def _with_price(estimate: GpuEstimate, prices: Prices | None, *, grows: bool) -> GpuEstimate:
    price = prices.per_hour.get(estimate.gpu) if prices is not None else None
    if price is None:
        return estimate
    price *= estimate.count
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


# ---
# A job on GPUs that it was not simulated for: does it fit, how fast, at what cost.
#
# Everything follows from recordings that are there already: memory by replaying the allocations
# at each GPU's capacity, time by costing the kernels with each GPU's figures.


#: Factor on a figure for its effect on the job.
_MORE: Final = 1.1
#: A measured step that is so many times what was predicted, or less, is hardly the same step.
_UNLIKELY: Final = 3.0


def compare_gpus(
    job: Job,
    gpus: Sequence[GpuSpec],
    prices: Prices | None = None,
    budget: float | None = None,
    measured: tuple[GpuSpec, float] | None = None,
    *,
    exact: bool = True,
    explain: bool = False,
    counts: Sequence[int] = (),
) -> GpuComparison:
    """The job on each of these GPUs, the best first; on so many of each with ``counts``.

    ``measured`` is a step of the job as it is on a GPU, in seconds: all others are scaled by what
    it is to the prediction. Largest batch sizes are ``exact``, or (quicker, for many GPUs) about
    right. With ``explain`` also what each figure of a GPU does for the job.
    """
    notes = _job_notes(job)
    anchor, words = _anchor(job, measured)
    factor = anchor.factor if anchor is not None else 1.0
    if counts:
        several = job_on_several(job, counts)
        notes += several.notes
        estimates = [
            _against_one(estimated(each, dataclasses.replace(gpu, count=count), factor, prices,
                                   exact=exact, strategy=strategy), several.one, factor, gpu)
            for gpu in gpus
            for count, strategy, each in several.jobs
        ]  # fmt: skip
    else:
        estimates = [estimated(job, gpu, factor, prices, exact=exact) for gpu in gpus]
    if explain and not counts:
        estimates = [
            _with_effects(estimate, job, gpu) for estimate, gpu in zip(estimates, gpus, strict=True)
        ]
    best = sorted(estimates, key=_best_first)
    within = [o for o in best if o.runs and (budget is None or _costs_at_most(o, budget))]
    priced = [estimate for estimate in within if estimate.cost is not None]
    timed = [estimate for estimate in within if estimate.samples_per_s is not None]
    notes += _growth_notes(job, best)
    if not any(estimate.runs for estimate in best):
        notes.append(_too_large(best))
    elif budget is not None and not within:
        notes.append(f"no run costs at most {budget:g} {prices.currency if prices else ''}")
    return GpuComparison(
        job=job.name,
        batch_size=job.batch,
        samples=job.samples,
        is_one_epoch=job.is_one_epoch,
        unseen="" if job.after is not None else job.unseen,
        gpus=tuple(best),
        currency=prices.currency if prices is not None else "",
        budget=budget,
        cheapest=min(priced, key=lambda o: o.cost or 0.0).name if priced else None,
        fastest=max(timed, key=lambda o: o.samples_per_s or 0.0).name if timed else None,
        anchor=anchor,
        constants=constants_of(machine_of(catalogue()[0])),
        notes=(*notes, *words, *(prices.notes if prices is not None else ())),
        step=job.recording.makeup,
        counts=tuple(counts),
    )


def _against_one(estimate: GpuEstimate, one: Job, factor: float, gpu: GpuSpec) -> GpuEstimate:
    """The same estimate with the throughput of each GPU against that of one alone, whether it fits
    one or not."""
    step = estimate.now or estimate.at_largest
    if step is None or step.seconds <= 0:
        return estimate
    alone = step_on(one, machine_of(gpu), step.batch_size, factor)
    if alone is None:
        return estimate
    return dataclasses.replace(estimate, efficiency=alone.seconds / step.seconds)


def _job_notes(job: Job) -> list[str]:
    notes = []
    if job.after is not None:
        needs = size(job.after.reserved_bytes)
        at = f" at batch size {job.after.batch}"
        notes.append(
            f"the {job.after.title}, not training, has the peak of memory ({needs} reserved{at}): "
            "it is what the job uses, and what limits its largest batch"
        )
    if job.memory is None:
        notes.append(
            "no other batch size is known: give the result of `trainfit plan --output`, or two "
            "recordings of `trainfit simulate` with different --batch-size"
        )
    elif job.kernels is None:
        notes.append(
            "the step time is known at the current batch size only: other batch sizes "
            "launch other kernels"
        )
    makeup = job.recording.makeup
    if makeup is not None and makeup.effective_batch is None:
        notes.append(f"samples/s is not known: {makeup.why}")
    elif makeup is None and "step" not in job.recording.header:
        notes.append(
            "the recording does not say how many batches an optimizer step uses: one is assumed; "
            "re-record it if the script accumulates gradients"
        )
    if not len(job.work.table):
        notes.append("no step time is known: the recording has no kernels; re-record it")
    return notes


def _growth_notes(job: Job, estimates: Sequence[GpuEstimate]) -> list[str]:
    """What is left out where memory grows, and when the GPUs are full."""
    filled = [estimate for estimate in estimates if estimate.runs and grows_on(job, estimate)]
    if not filled:
        return []
    growth, steps = job.growth_on(filled[0]), job.pattern.steps
    until = {
        estimate.gpu: steps
        + max(estimate.memory_bytes - estimate.device_bytes, 0) // growth.bytes_per_step
        for estimate in filled
    }
    first, last = min(until, key=lambda gpu: until[gpu]), max(until, key=lambda gpu: until[gpu])
    full = f"after about {until[first]:,} steps on {first}"
    full += f", {until[last]:,} on {last}" if last != first else ""
    return [
        f"{growth.unfit}; the GPU would be full {full}: no saturation batch size and no run is "
        f"given, and the largest batch is for the {steps} simulated steps only; see `trainfit "
        "memory` for what stays behind"
    ]


def _anchor(
    job: Job, measured: tuple[GpuSpec, float] | None
) -> tuple[Anchor | None, tuple[str, ...]]:
    if measured is None:
        return None, ()
    gpu, seconds = measured
    if not has_rates(gpu) or not len(job.work.table):
        return None, (
            f"the step measured on {gpu.key} cannot be used: no step time is predicted "
            "for that GPU",
        )
    factor = seconds / step_time(runnable(job.work, gpu), machine_of(gpu)).seconds
    words: tuple[str, ...] = ()
    if not 1 / _UNLIKELY < factor < _UNLIKELY:
        words = (
            f"the step measured on {gpu.key} is {times(factor)} the predicted one: check that "
            "it is the same job, at the same batch size, with a DataLoader that keeps up",
        )
    return Anchor(gpu.key, seconds, factor), words


def _with_effects(estimate: GpuEstimate, job: Job, gpu: GpuSpec) -> GpuEstimate:
    return dataclasses.replace(estimate, effects=tuple(_effects(job, gpu, estimate)))


# --- Memory ------------------------------------------------------------------------------------


def _too_large(estimates: Sequence[GpuEstimate]) -> str:
    if not estimates:
        return "no GPU was given"
    least = min(estimate.device_bytes for estimate in estimates)
    most = max(estimates, key=lambda estimate: estimate.memory_bytes)
    return (
        f"the job needs {size(least)} and fits none of the GPUs (the largest, "
        f"{most.gpu}, "
        f"has {size(most.memory_bytes)}): see `trainfit plan --remedies`"
    )


# --- Speed and cost ----------------------------------------------------------------------------


def _best_first(estimate: GpuEstimate) -> tuple[object, ...]:
    """What fits by the run's cost, then what has no price by its rate; what does not fit last,
    by memory."""
    rate = estimate.samples_per_s or 0.0
    if not estimate.runs:
        return (3, -estimate.memory_bytes * estimate.count, estimate.name)
    if estimate.samples_per_unit is not None:
        # Of several numbers of GPUs, what runs as it is comes first: it is the training as written.
        return (0, estimate.high_bytes is not None and not estimate.fits,
                -estimate.samples_per_unit, estimate.name)  # fmt: skip
    if estimate.high_bytes is not None:  # without prices: the fewest GPUs
        return (1, not estimate.fits, estimate.count, -rate, estimate.name)
    return (2, -rate, estimate.name)


def _costs_at_most(estimate: GpuEstimate, budget: float) -> bool:
    return estimate.cost is not None and estimate.cost <= budget


# --- Words -------------------------------------------------------------------------------------


#: Figures that can be changed one at a time, what they are called, and how they are written.
_FIGURES: Final[Mapping[str, tuple[str, Callable[[GpuSpec], str]]]] = {
    "tensor_flops": (
        "Tensor-core rate",
        lambda gpu: with_prefix(gpu.tensor_flops.get("float16", 0.0), "FLOP/s"),
    ),
    "fp32_flops": ("CUDA-core rate", lambda gpu: with_prefix(gpu.fp32_flops, "FLOP/s")),
    "bandwidth_bytes_per_s": (
        "memory bandwidth",
        lambda gpu: f"{three_digits(gpu.bandwidth_bytes_per_s / 1e9)} GB/s",
    ),
    "l2_bytes": ("L2 cache", lambda gpu: size(gpu.l2_bytes or 0)),
    "power_watts": ("power", lambda gpu: f"{gpu.power_watts:g} W"),
}


def _effects(job: Job, gpu: GpuSpec, estimate: GpuEstimate) -> Iterable[FigureEffect]:
    """Effect of 10% more of each figure, everything else unchanged."""
    machine, batch = machine_of(gpu), estimate.run_batch
    base = step_on(job, machine, batch) if estimate.samples_per_s is not None else None
    if base is None:
        return

    def change(other: HostedGpu) -> float:
        found = step_on(job, other, batch)
        return found.seconds / base.seconds - 1 if found is not None else 0.0

    more_memory = dataclasses.replace(gpu, memory_bytes=int(gpu.memory_bytes * _MORE))
    yield FigureEffect(
        "memory",
        size(gpu.memory_bytes),
        largest_batch=job.capacity.largest(memory_model_of(job, more_memory)),
    )
    for field, (figure, written) in _FIGURES.items():
        value = getattr(gpu, field)
        if not value:
            continue
        more: Any = (
            {name: rate * _MORE for name, rate in value.items()}
            if isinstance(value, Mapping)
            else value * _MORE
        )
        better = dataclasses.replace(gpu, **{field: more})
        yield FigureEffect(figure, written(gpu), change(dataclasses.replace(machine, gpu=better)))
    faster = dataclasses.replace(machine, core_speed=machine.core_speed * _MORE)
    yield FigureEffect("the CPU's clock", f"{ghz(machine.core_hz)} (assumed)", change(faster))
    link = dataclasses.replace(
        machine,
        pinned_bytes_per_s=machine.pinned_bytes_per_s * _MORE,
        pageable_bytes_per_s=machine.pageable_bytes_per_s * _MORE,
    )
    yield FigureEffect("PCIe", f"{byte_rate(machine.pinned_bytes_per_s)} (assumed)", change(link))
