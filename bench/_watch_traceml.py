"""TraceML's own package (traceml-ai) on the same recordings, where it is installed.

Its diagnosis of step times, memory, processes and the machine, each in the form that its summary
has at the end of a run, with the thresholds that the package ships. Times are given on both of its
clocks; it takes the GPU's where each step has CUDA events.

    pip install --no-deps traceml-ai==0.5.0 && pip install msgspec pyyaml
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from trainfit.results.runs.watched import RunRecord
from trainfit.watch.view import RankView, RunView, known

Kinds = set[str]
#: Its kinds of diagnoses, as kinds of this project's findings. COMPUTE_BOUND, BALANCED and the like
#: say that nothing is wrong; RESIDUAL_HEAVY is time of a step in no phase of it.
_MEANS: Final = {
    "INPUT_BOUND": ("input_bound",),
    "H2D_BOUND": ("unpinned_copies", "copies"),
    "RESIDUAL_HEAVY": ("host_bound_launches", "hidden_syncs", "checkpoint_stalls"),
    "STRAGGLER": ("straggler",),
    "INPUT_STRAGGLER": ("straggler",),
    "COMPUTE_STRAGGLER": ("straggler",),
    "H2D_STRAGGLER": ("straggler",),
    "HIGH_PRESSURE": ("memory_near_limit",),
    "CREEP_EARLY": ("memory_growth",),
    "CREEP_CONFIRMED": ("memory_growth",),
    "VERY_HIGH_GPU_MEMORY": ("memory_near_limit",),
    "VERY_HIGH_PROCESS_GPU_MEMORY": ("memory_near_limit",),
    "HIGH_GPU_MEMORY": ("memory_near_limit",),
    "HIGH_PROCESS_GPU_MEMORY": ("memory_near_limit",),
    "GPU_MEMORY_RESERVED_OVERHANG": ("reserved_above_allocated",),
    "HIGH_GPU_TEMPERATURE": ("thermal_throttling",),
    "HIGH_GPU_POWER": ("power_throttling",),
    "HIGH_HOST_MEMORY": ("ram_near_limit",),
    "HIGH_PROCESS_RSS": ("ram_near_limit",),
    "HIGH_CPU": ("cpu_contention",),
    "HIGH_PROCESS_CPU": ("thread_oversubscription",),
}
#: Its metric: our column on the CPU's clock, and on the GPU's.
_TIMES: Final = {
    "input_wait": ("input_s", "gpu_gap_s"),
    "h2d": ("copy_s", "gpu_copy_s"),
    "forward": ("forward_s", "gpu_forward_s"),
    "backward": ("backward_s", "gpu_backward_s"),
    "optimizer_step": ("optimizer_s", "gpu_optimizer_s"),
}
_MEMORY: Final = {
    "peak_allocated": "peak_allocated_bytes",
    "peak_reserved": "reserved_bytes",
}


def diagnoser() -> Callable[[RunRecord], Kinds] | None:
    """Names the kinds that its diagnoses of a run stand for; ``None``: it is not installed."""
    try:
        import traceml_ai.diagnostics.step_time  # noqa: F401
    except ImportError:
        return None
    return lambda run: _named((*_of_steps(RunView(run)), *_of_resources(RunView(run))))


def _named(issues: Iterable[Any]) -> Kinds:
    warned = [issue for issue in issues if issue.severity != "info" and issue.kind in _MEANS]
    return {"|".join(_MEANS[issue.kind]) for issue in warned}


def _of_steps(view: RunView) -> Iterable[Any]:
    from traceml_ai.diagnostics.step_time.api import diagnose_step_time_window
    from traceml_ai.diagnostics.step_time.policy import SUMMARY_STEP_TIME_POLICY
    from traceml_ai.step_time.analysis import StepTimeAnalyzer
    from traceml_ai.step_time.model import StepTimeRepositorySnapshot

    rows = [row for rank in view.ranks for row in _rows(rank)]
    ranks = tuple(rank.header.rank for rank in view.ranks)
    window = StepTimeAnalyzer().analyze(
        StepTimeRepositorySnapshot(tuple(rows), ranks), window_size=None
    )
    found = diagnose_step_time_window(window, policy=SUMMARY_STEP_TIME_POLICY)
    return (found.primary, *found.issues)


def _rows(rank: RankView) -> Iterable[Any]:
    from traceml_ai.step_time.model import StepTimeClockValues, StepTimeSourceRow

    for place, step in enumerate(rank.steps):
        metrics = {
            name: StepTimeClockValues(*(_ms(step[column]) for column in columns))
            for name, columns in _TIMES.items()
        }
        inner = np.nan_to_num(step["step_s"]) - np.nan_to_num(step["input_s"])
        metrics["traced_step_time"] = StepTimeClockValues(_ms(inner), _ms(step["gpu_s"]))
        yield StepTimeSourceRow(place, rank.header.rank, place, metrics)


def _ms(seconds: float) -> float | None:
    return 1e3 * float(seconds) if np.isfinite(seconds) else None


def _of_resources(view: RunView) -> Iterable[Any]:
    from traceml_ai.diagnostics.process.api import diagnose_process
    from traceml_ai.diagnostics.process.context import (
        ProcessDiagnosisInput,
        ProcessRankDiagnosisInput,
    )
    from traceml_ai.diagnostics.step_memory.api import build_step_memory_summary_diagnosis_result
    from traceml_ai.diagnostics.system.api import diagnose_system
    from traceml_ai.diagnostics.system.context import (
        SystemDiagnosisInput,
        SystemGpuDiagnosisInput,
        SystemNodeDiagnosisInput,
    )

    rank, header = view.judged, view.judged.header
    total = header.gpus[0].memory_bytes if header.gpus else None
    yield from build_step_memory_summary_diagnosis_result(
        [_memory(view, *each) for each in _MEMORY.items()],
        gpu_total_bytes=total,
        no_gpu_detected=not header.gpus,
    ).issues
    used, reserved = (_mean_and_peak(rank.steps[name]) for name in _MEMORY.values())
    cores = header.usable_cores or 1.0
    cpu = _mean_and_peak(rank.machine["cores_busy"] / cores * 100)
    ram = _mean_and_peak((header.ram_bytes or np.nan) - rank.machine["ram_available_bytes"])
    common = (*cpu, *ram, header.ram_bytes)
    samples, gpu = len(rank.machine), rank.gpu
    process = ProcessRankDiagnosisInput(
        None, None, None, None, header.ram_bytes, *used, *reserved, total,
        reserved[1] / used[1] if used[1] and reserved[1] else None,
    )  # fmt: skip
    yield from diagnose_process(
        ProcessDiagnosisInput(
            rank.seconds, samples, 1, None, None, int(cores), None, None, header.ram_bytes,
            bool(header.gpus), len(header.gpus), *used, *reserved, total, {header.rank: process},
        )
    ).issues  # fmt: skip
    of_gpu = (
        *_mean_and_peak(100 * gpu["utilization"]), *_mean_and_peak(gpu["used_bytes"]),
        *_mean_and_peak(gpu["temperature_c"]), *_mean_and_peak(gpu["power_w"]),
    )  # fmt: skip
    limits = known(gpu["power_limit_w"])
    one = SystemGpuDiagnosisInput(
        *of_gpu[:4], total, *of_gpu[4:], float(limits.max()) if len(limits) else None
    )
    gpus = (bool(header.gpus), len(header.gpus), *of_gpu)
    node = SystemNodeDiagnosisInput("0", 0, rank.seconds, samples, *common, *gpus, {0: one})
    yield from diagnose_system(
        SystemDiagnosisInput(rank.seconds, samples, 1, *common, *gpus, {"0": node})
    ).issues


def _memory(view: RunView, metric: str, column: str) -> Any:
    from traceml_ai.renderers.step_memory import schema

    count = min(len(rank.steps) for rank in view.ranks)
    table = np.array([rank.steps[column][-count:] for rank in view.ranks], dtype=float)
    table = np.where(table < 0, 0.0, table)
    peaks = table.max(axis=1)
    median, worst = float(np.median(peaks)), float(peaks.max())
    skew = (worst - median) / median if median else 0.0
    ranks = len(view.ranks)
    return schema.StepMemoryCombinedMetric(
        metric,
        "cuda:0",
        schema.StepMemoryCombinedSeries(
            list(range(count)), np.median(table, axis=0).tolist(), table.max(axis=0).tolist()
        ),
        schema.StepMemoryCombinedSummary(
            count, count, median, worst, int(peaks.argmax()), worst / median if median else 0, skew
        ),
        schema.StepMemoryCombinedCoverage(count, count, count, ranks, ranks, False),
    )


def _mean_and_peak(values: Any) -> tuple[float | None, float | None]:
    found = known(np.asarray(values))
    return (float(found.mean()), float(found.max())) if len(found) else (None, None)
