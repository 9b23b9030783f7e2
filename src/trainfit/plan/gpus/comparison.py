"""A job on GPUs that it was not simulated for: does it fit, how fast, at what cost.

Everything follows from recordings that are there already: memory by replaying the allocations
at each GPU's capacity, time by costing the kernels with each GPU's figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from trainfit.hardware import GpuSpec, catalogue
from trainfit.plan.gpus.estimate import estimated, grows_on, memory_model_of, runnable, step_on
from trainfit.plan.gpus.job import Job
from trainfit.plan.gpus.prices import Prices
from trainfit.plan.steps.costing import constants_of, has_rates, machine_of
from trainfit.results.format import byte_rate, ghz, size, three_digits, times, with_prefix
from trainfit.results.plan.gpu_comparison import Anchor, Effect, GpuComparison, GpuEstimate
from trainfit.speed.model.step import Machine, step_time

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
) -> GpuComparison:
    """The job on each of these GPUs, the best first.

    ``measured`` is a step of the job as it is on a GPU, in seconds: all others are scaled by what
    it is to the prediction. Largest batch sizes are ``exact``, or (quicker, for many GPUs) about
    right. With ``explain`` also what each figure of a GPU does for the job.
    """
    notes = _job_notes(job)
    anchor, words = _anchor(job, measured)
    factor = anchor.factor if anchor is not None else 1.0
    found = [estimated(job, gpu, factor, prices, exact=exact) for gpu in gpus]
    if explain:
        found = [
            _with_effects(estimate, job, gpu) for estimate, gpu in zip(found, gpus, strict=True)
        ]
    best = sorted(found, key=_best_first)
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
        gpus=tuple(best),
        currency=prices.currency if prices is not None else "",
        budget=budget,
        cheapest=min(priced, key=lambda o: o.cost or 0.0).gpu if priced else None,
        fastest=max(timed, key=lambda o: o.samples_per_s or 0.0).gpu if timed else None,
        anchor=anchor,
        constants=constants_of(machine_of(catalogue()[0])),
        notes=(*notes, *words, *(prices.notes if prices is not None else ())),
        step=job.recording.makeup,
    )


def _job_notes(job: Job) -> list[str]:
    notes = []
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


def _growth_notes(job: Job, found: Sequence[GpuEstimate]) -> list[str]:
    """What is left out where memory grows, and when the GPUs are full."""
    filled = [estimate for estimate in found if estimate.runs and grows_on(job, estimate)]
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


def _too_large(found: Sequence[GpuEstimate]) -> str:
    if not found:
        return "no GPU was given"
    least = min(estimate.device_bytes for estimate in found)
    most = max(found, key=lambda estimate: estimate.memory_bytes)
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
        return (2, -estimate.memory_bytes, estimate.gpu)
    if estimate.samples_per_unit is not None:
        return (0, -estimate.samples_per_unit, estimate.gpu)
    return (1, -rate, estimate.gpu)


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


def _effects(job: Job, gpu: GpuSpec, estimate: GpuEstimate) -> Iterable[Effect]:
    """Effect of 10% more of each figure, everything else unchanged."""
    machine, batch = machine_of(gpu), estimate.run_batch
    base = step_on(job, machine, batch) if estimate.samples_per_s is not None else None
    if base is None:
        return

    def change(other: Machine) -> float:
        found = step_on(job, other, batch)
        return found.seconds / base.seconds - 1 if found is not None else 0.0

    more_memory = dataclasses.replace(gpu, memory_bytes=int(gpu.memory_bytes * _MORE))
    yield Effect(
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
        yield Effect(figure, written(gpu), change(dataclasses.replace(machine, gpu=better)))
    faster = dataclasses.replace(machine, core_speed=machine.core_speed * _MORE)
    yield Effect("the CPU's clock", f"{ghz(machine.core_hz)} (assumed)", change(faster))
    link = dataclasses.replace(
        machine,
        pinned_bytes_per_s=machine.pinned_bytes_per_s * _MORE,
        pageable_bytes_per_s=machine.pageable_bytes_per_s * _MORE,
    )
    yield Effect("PCIe", f"{byte_rate(machine.pinned_bytes_per_s)} (assumed)", change(link))
