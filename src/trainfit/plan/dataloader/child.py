"""The process that measures a script's DataLoader, against the step of the GPU.

``main()`` has a request file as argument. The step is what the speed model predicts for what the
script did on the simulated GPU, else a lower bound of its time: the bound is no prediction.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_figures import is_made_up
from trainfit.loader.child import ChildMeasurement
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.speed import batches_per_step, fast_end, speed
from trainfit.results.runs.measurement import AS_FAST, Consumer
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import Compute, TraceOutcome
from trainfit.results.text import duration, with_prefix

# ---
# How fast a GPU could at best be with a step: a lower bound of its time, no prediction.
#
# A loader that keeps up with the bound keeps up with the GPU; the real step is longer, often
# several times as long. Kernels of one stream run one after the other. Some compute and others
# move, so that the first two of these times add up; each is launched meanwhile, so that the step
# needs their sum or the third, whichever is more:
#
# - arithmetic: the FLOPs of matrix products, convolutions and attention at the GPU's dense peak
#   for the dtype of their operands (as sold: with FP32 accumulation, at the boost clock, without
#   2:4 sparsity);
# - memory: the bytes that cannot stay in the L2 cache
#   (:mod:`trainfit.simgpu.operators.kernel_rules`) at peak bandwidth. What all operators read and
#   write is far more, for caches hold much of it;
# - launches: the kernels, at the least time from one to the next.
#
# With ``torch.compile`` kernels are fused: only the arithmetic holds then. A device made to
# measure ("custom:24GiB") has no rates of its own: only launches hold.


#: From one operator of eager PyTorch to the next at the least: launching an empty kernel alone
#: needs about two microseconds of a CPU, and PyTorch's dispatch comes on top.
LEAST_LAUNCH_S: Final = 2e-6
#: cuDNN may multiply less than the formula counts: a quarter, by Winograd's F(4x4, 3x3) (Lavin
#: and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015, section 4.3).
_CONVOLUTION_LEAST: Final = 0.25
#: float16 on the shader cores of GPUs without Tensor cores runs at up to twice the float32 rate.
_HALF_WITHOUT_TENSOR_CORES: Final = 2.0


@dataclasses.dataclass(frozen=True)
class StepBound:
    """A lower bound of one optimizer step's time on a GPU, in seconds, and what it is made of.

    ``seconds`` is arithmetic and memory, or the launches; ``why`` says in a line what it is. A
    part is ``None`` where it cannot be told or does not hold; ``seconds`` 0 says nothing.
    """

    seconds: float
    why: str
    arithmetic_s: float | None
    memory_s: float | None
    launch_s: float | None


def step_bound(compute: Compute, gpu: GpuSpec, autocast: str | None) -> StepBound:
    """The bound for one step's work as recorded (``TraceOutcome.compute``).

    ``autocast`` is the dtype of autocast regions, as ``TraceOutcome.autocast``; it only matters
    for recordings that do not say in which dtype products were computed.
    """
    arithmetic = memory = launch = None
    if not is_made_up(gpu, "fp32_flops"):
        arithmetic = _arithmetic(compute, gpu, autocast)
    if not compute.compiled:
        launch = compute.kernels * LEAST_LAUNCH_S
        if not is_made_up(gpu, "bandwidth_bytes_per_s"):
            memory = compute.moved_bytes / gpu.bandwidth_bytes_per_s
    work = (arithmetic or 0.0) + (memory or 0.0)
    seconds = max(work, launch or 0.0)
    why = _why(compute, gpu, seconds, is_work=work >= seconds, moves=memory is not None)
    return StepBound(seconds, why, arithmetic, memory, launch)


def _arithmetic(compute: Compute, gpu: GpuSpec, autocast: str | None) -> float:
    if compute.flops_of:
        return sum(flops / _rate(gpu, name) for name, flops in compute.flops_of.items())
    # Nothing says which dtypes there were: without autocast a model may be in half precision.
    return compute.flops / _rate(gpu, f"convolution/{autocast or 'float16'}")


def _rate(gpu: GpuSpec, name: str) -> float:
    """FLOP/s at most for "KIND/DTYPE", in the units of the formulas that count FLOPs."""
    kind, _, dtype = name.partition("/")
    tensor = _tensor_rate(gpu.tensor_flops, dtype)
    if tensor is not None:
        return tensor
    rate = gpu.fp32_flops
    if dtype in ("float16", "bfloat16"):
        rate *= _HALF_WITHOUT_TENSOR_CORES
    return rate / _CONVOLUTION_LEAST if kind == "convolution" else rate


def _tensor_rate(rates: Mapping[str, float], dtype: str) -> float | None:
    if dtype.startswith("float8"):
        dtype = "float8"
    if dtype == "bfloat16" and dtype not in rates:
        dtype = "float16"  # computed by way of others, none faster than this
    return rates.get(dtype)


def _why(compute: Compute, gpu: GpuSpec, seconds: float, *, is_work: bool, moves: bool) -> str:
    if not seconds:
        reason = "the script is compiled" if compute.compiled else "no operation was counted"
        return f"the lower bound of the step time is not known: {reason}; give --step-time"
    bound = f"no {gpu.key} runs the step in less than {duration(seconds)}"
    text = f"{compute.kernels} kernels of {duration(LEAST_LAUNCH_S)} at least"
    if is_work:
        text = f"{with_prefix(compute.flops, 'FLOP')} at the dense peak"
        if moves:
            text += f" and {with_prefix(compute.moved_bytes, 'B')} that no cache holds"
    if is_made_up(gpu, "fp32_flops"):
        return f"{bound}: {text}; a custom GPU specification has no rates: give --step-time"
    return f"{bound}: {text}; the real step is longer"


def step_from(trace: TraceOutcome, gpu: GpuSpec, recording: Recording | None = None) -> Consumer:
    """The fast end of what is predicted for the simulated step on the GPU; else the least time
    that its work takes; none where that cannot be told either."""
    if trace.compute is None:
        return Consumer(0.0, source=f"{AS_FAST} (no simulated step bounds it)")
    if recording is not None and not trace.compute.compiled:  # what is fused is not known
        predicted = speed(recording, None, machine_of(gpu))
        if predicted is not None:
            return fast_end(predicted.now, gpu.key, recording.makeup)
    bound = step_bound(trace.compute, gpu, trace.autocast)
    batches = batches_per_step(recording.makeup if recording is not None else None)
    several = f"; of {batches} batches (gradient accumulation)" if batches > 1 else ""
    return Consumer(bound.seconds / batches, source=bound.why + several)


def main() -> None:
    """The child process's entry point."""
    spec = RunSpec.load(Path(sys.argv[1]))
    gpu = spec.gpu
    assert gpu is not None
    if spec.target is None:
        sys.argv = [sys.argv[0]]
    ChildMeasurement(spec, lambda trace, found: step_from(trace, gpu, found)).run()
    sys.stdout.flush()
    sys.stderr.flush()
