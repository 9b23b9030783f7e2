"""A step's GPU time by phase and operator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trainfit.results.plan.speed import Limit, OperatorTime, StepWork
from trainfit.results.runs.kernels import DTYPES
from trainfit.results.runs.recording import PHASES, IntArray, Recording
from trainfit.speed.model.kernel_times import peak_flops
from trainfit.speed.model.step import Machine, TimedWork
from trainfit.speed.model.work import Floats, Work, one_off, steady


def step_work(recording: Recording, machine: Machine) -> StepWork | None:
    """Of the step that stands for all others; ``None`` where no kernel was recorded."""
    if not recording.steps:
        return None
    step = steady(recording)
    work = Work.of_step(recording, step)
    if not len(work.table):
        return None
    timed = TimedWork(work, machine)
    seconds = np.where(_once(recording, step, work), 0.0, timed.seconds)
    phases = work.op_phase[work.op]
    totals = np.bincount(phases, weights=seconds, minlength=len(PHASES)).tolist()
    bounds = timed.times.arithmetic(machine.efficiency), timed.times.traffic(machine.efficiency)
    operators = _operators(recording, step, work, bounds, seconds)
    peaks = dict(zip(DTYPES, peak_flops(machine.rated).tolist(), strict=True))
    with_flops = {each.dtype for each in operators if each.flops}
    return StepWork(
        gpu_s=float(seconds.sum()),
        by_phase_s={name: total for name, total in zip(PHASES, totals, strict=True) if total},
        operators=operators,
        peak_flops_per_s={name: peak for name, peak in peaks.items() if name in with_flops},
        bandwidth_bytes_per_s=machine.rated.bandwidth_bytes_per_s,
    )


def _once(recording: Recording, step: int, work: Work) -> NDArray[np.bool_]:
    """Kernels that no later step has: where the first step stands for all."""
    if step:
        return np.zeros(len(work.op), dtype=bool)
    found: NDArray[np.bool_] = one_off(recording)[recording.op_step == 0][work.op]
    return found


def _operators(
    recording: Recording, step: int, work: Work, bounds: tuple[Floats, Floats], seconds: Floats
) -> tuple[OperatorTime, ...]:
    """By name, phase and dtype; ``bounds`` are what arithmetic and traffic of each kernel need."""
    arithmetic, traffic = bounds
    names = recording.op_name[recording.op_step == step][work.op]
    columns = (names, work.op_phase[work.op], work.column("dtype"))
    keys, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    sums = {
        name: np.bincount(group.ravel(), weights=values, minlength=len(keys))
        for name, values in (
            ("gpu_s", seconds),
            ("kernels", np.where(seconds > 0, work.column("launches"), 0)),
            ("flops", work.column("flops")),
            ("moved", work.column("read") + work.column("written")),
            ("arithmetic", np.where(seconds > 0, arithmetic, 0.0)),
            ("traffic", np.where(seconds > 0, traffic, 0.0)),
        )
    }
    found = [_operator(recording, keys[row], {k: v[row] for k, v in sums.items()})
             for row in np.flatnonzero(sums["gpu_s"] > 0).tolist()]  # fmt: skip
    return tuple(sorted(found, key=lambda each: -each.gpu_s))


def _operator(recording: Recording, key: IntArray, sums: Mapping[str, float]) -> OperatorTime:
    name, phase, dtype = key.tolist()
    limit: Limit = "arithmetic" if sums["arithmetic"] > sums["traffic"] else "memory"
    if max(sums["arithmetic"], sums["traffic"]) < 0.5 * sums["gpu_s"]:
        limit = "latency"
    return OperatorTime(
        name=recording.strings[name],
        dtype=DTYPES[dtype],
        phase=PHASES[phase],
        kernels=int(sums["kernels"]),
        gpu_s=float(sums["gpu_s"]),
        flops=int(sums["flops"]),
        moved_bytes=int(sums["moved"]),
        limit=limit,
    )
