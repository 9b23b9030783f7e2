"""Published rules for diagnosing a training run, on the same recordings.

As their documentation gives them (thresholds are theirs): SageMaker Debugger's built-in profiler
rules, the recommendations of Kineto's TensorBoard plug-in, and TraceML's. Each gives the kinds of
this project's findings that its name stands for ("a|b" where it may mean either).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trainfit.results.runs.watched import RunRecord
from trainfit.watch.view import RunView, known

Kinds = set[str]


def sagemaker(run: RunRecord) -> Kinds:
    """LowGPUUtilization, CPUBottleneck, IOBottleneck, BatchSize, GPUMemoryIncrease, StepOutlier."""
    view, found = RunView(run).judged, set[str]()
    gpu, machine = known(view.gpu["utilization"]) * 100, view.machine
    cores = view.header.usable_cores or 1.0
    cpu = known(machine["cores_busy"]) / cores * 100
    waits = known(machine["iowait_cores"]) / cores * 100
    if not len(gpu) or not len(cpu):
        return found
    idle = gpu < 10
    count = min(len(gpu), len(cpu), len(waits))
    if np.mean(idle[:count] & (cpu[:count] > 90)) > 0.5:
        found.add("input_bound")
    if np.mean(idle[:count] & (waits[:count] > 50)) > 0.5:
        found.add("input_bound")
    high, low = np.percentile(gpu, 95), np.percentile(gpu, 5)
    if high < 70:
        found.add("host_bound_launches|small_batch")
    elif low < 10:
        found.add("input_bound")
    total = view.header.gpus[0].memory_bytes or 1
    memory = known(view.gpu["used_bytes"]) / total * 100
    if all(np.percentile(each, 95) < 70 for each in (gpu, cpu, memory) if len(each)):
        found.add("small_batch")
    if len(memory) > 40:
        averages = np.convolve(memory, np.ones(20) / 20, "valid")
        if averages[-1] - averages[0] > 5:
            found.add("memory_growth")
    steps = known(view.steps["step_s"])
    if len(steps) and np.sum(steps > steps.mean() + 3 * steps.std()) > 10:
        found.add("checkpoint_stalls")
    if len(run.ranks) > 1:  # LoadBalancing compares histograms of utilisation; one is sampled here
        pass
    return found


def kineto(run: RunRecord) -> Kinds:
    """DataLoader above 5% of the step, GPU utilisation below 50%, memory peak above 90%."""
    view, found = RunView(run).judged, set[str]()
    if (view.share("input") or 0.0) > 0.05:
        found.add("input_bound")
    gpu = known(view.gpu["utilization"])
    if len(gpu) and gpu.mean() < 0.5:
        found.add("host_bound_launches|small_batch")
    total, reserved = view.header.gpus[0].memory_bytes, known(view.steps["reserved_bytes"])
    if total and len(reserved) and reserved.max() > 0.9 * total:
        found.add("memory_near_limit")
    return found


def traceml(run: RunRecord) -> Kinds:
    """Input or copies 10% of the step, straggler 0.10, memory 92%, 85 degrees, reserved twice
    allocated, a creep of 1 GiB over 50 steps."""
    view, found = RunView(run).judged, set[str]()
    if (view.share("input") or 0.0) > 0.10:
        found.add("input_bound")
    if (view.share("copy") or 0.0) > 0.10:
        found.add("unpinned_copies")
    total = view.header.gpus[0].memory_bytes or 1
    reserved, peak = known(view.steps["reserved_bytes"]), known(view.steps["peak_allocated_bytes"])
    if len(reserved) and reserved.max() > 0.92 * total:
        found.add("memory_near_limit")
    if len(reserved) and reserved.max() >= max(2 * peak.max(), 0.3 * total):
        found.add("reserved_above_allocated")
    held = known(view.steps["allocated_bytes"])
    if len(held) > 5 and len(view.steps) >= 50 and held[-1] - held[0] > 2**30:
        found.add("memory_growth")
    heat = known(view.gpu["temperature_c"])
    if len(heat) and np.percentile(heat, 95) >= 85:
        found.add("thermal_throttling")
    if len(run.ranks) > 1:
        own = [
            np.mean(sum(np.nan_to_num(each.steps[f"{part}_s"]) for part in ("input", "forward")))
            for each in run.ranks
        ]
        step = float(np.mean(run.ranks[0].steps["step_s"]))
        if (max(own) - float(np.median(own))) / step > 0.10:
            found.add("straggler")
    return found


PUBLISHED: dict[str, Callable[[RunRecord], Kinds]] = {
    "SageMaker": sagemaker,
    "Kineto": kineto,
    "TraceML": traceml,
}
