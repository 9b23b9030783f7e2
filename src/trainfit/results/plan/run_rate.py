"""How fast a planned run will be: as fast as the slower of its DataLoader and its GPU."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.plan.loading import DataLoading, RunRate
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.speed import StepSpeed

#: A DataLoader that is slower than the GPU by less keeps up: its rate is good to some percent.
KEEPS_UP: Final = 0.05


def with_run_rate(plan: PlanResult) -> PlanResult:
    """``plan`` with its ``run``."""
    return dataclasses.replace(plan, run=run_rate(plan))


def run_rate(plan: PlanResult) -> RunRate | None:
    """Of the recommended batch size, else of the current one; ``None`` where the time of a step on
    the GPU is not known."""
    batch = plan.chosen.recommended_batch or plan.now.batch_size
    step = plan.speed.at(batch) if plan.speed is not None else None
    if step is None:
        return None
    gpu = RunRate(
        batch_size=step.batch_size,
        step_s=step.seconds,
        samples_per_s=step.samples_per_s,
        epoch_s=_epoch(plan, step.samples_per_s),
        limit="gpu",
        gpu_step_s=step.seconds,
        gpu_samples_per_s=step.samples_per_s,
    )
    loading = plan.loading
    if loading is None or loading.result is None:
        feeds = plan.loader_at is not None and plan.inference is None
        return dataclasses.replace(gpu, limit="gpu only") if feeds or loading is not None else gpu
    settings = loading.launched or loading.result.recommended
    there = _is_of_another(plan)
    batches = loading.input_at_most if there else loading.result.rate(settings)
    if not batches:
        return dataclasses.replace(gpu, limit="unknown")
    seconds = _loader_step_s(plan, loading, settings, step, batches)
    fastest = (loading.input_range or (batches, batches))[1] if there else batches
    evidence = loading.evidence
    if seconds * batches / fastest <= (1 + KEEPS_UP) * step.seconds:
        return dataclasses.replace(gpu, loader=evidence)
    samples = step.samples_per_s
    rate = None if samples is None else samples * step.seconds / seconds
    return dataclasses.replace(
        gpu,
        step_s=seconds,
        samples_per_s=rate,
        epoch_s=_epoch(plan, rate),
        limit="loader",
        loader=evidence,
        is_bound=there,
    )


def _epoch(plan: PlanResult, samples_per_s: float | None) -> float | None:
    return plan.samples / samples_per_s if plan.samples and samples_per_s else None


def _is_of_another(plan: PlanResult) -> bool:
    """Is the DataLoader's rate that of another processor than this machine's?"""
    cpu, loading = plan.cpu, plan.loading
    given = cpu is not None and cpu.cores is not None and cpu.core_speed is None
    return given and loading is not None and loading.input_at_most is not None


def _loader_step_s(
    plan: PlanResult,
    loading: DataLoading,
    settings: LoaderSettings,
    step: StepSpeed,
    batches_per_s: float,
) -> float:
    """Seconds between two optimizer steps at this rate of the DataLoader.

    It may have been measured at another batch size, with the same samples a second. Without
    workers a batch is made while the GPU waits: what a step lasts beyond the one that the rate is
    for comes on top.
    """
    found = loading.result
    assert found is not None
    makeup, size = plan.step, found.probe.batch_size
    batches = float((makeup.loader_batches if makeup is not None else None) or 1)
    if step.samples_per_s and size:
        batches = step.samples_per_s * step.seconds / size
    seconds = batches / batches_per_s
    if not settings.num_workers:
        seconds += max(0.0, step.seconds - batches * found.step_s)
    return seconds
