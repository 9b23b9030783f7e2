"""What a step costs on a machine, and how its memory and kernels scale with the batch size.

The machine is the planned GPU in its computer; a step's samples are told from its recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_figures import is_made_up
from trainfit.memory.affine import AffineStream
from trainfit.results.gpus import Rates
from trainfit.results.plan import HostCpu
from trainfit.results.runs.recording import Recording
from trainfit.results.speed import StepSpeed
from trainfit.results.text import byte_rate, ghz
from trainfit.speed.efficiency import FITTED
from trainfit.speed.measured import with_rates
from trainfit.speed.step import REFERENCE_HZ, HostedGpu, StepBreakdown, step_time
from trainfit.speed.work import Work, WorkLaw

# ---
# Scaling laws of memory and kernels with the batch size, from two recordings.


#: A recording at each of two batch sizes.
Pair = Sequence[tuple[int, Recording]]


def memory_law(pair: Pair) -> AffineStream:
    """Allocations, from as many steps as both runs made; raises ``NotAffineError``."""
    (one, first), (other, second) = _of_equal_length(pair)
    return AffineStream.between(first, one, second, other)


def work_law(pair: Pair) -> WorkLaw:
    """Kernels of the typical step of both runs; raises ``NotAffineError``."""
    (one, first), (other, second) = _of_equal_length(pair)
    return WorkLaw.between(Work.of_steady_step(first), one, Work.of_steady_step(second), other)


def _of_equal_length(pair: Pair) -> list[tuple[int, Recording]]:
    if all(recording.simulated is not None for _, recording in pair):
        return list(pair)  # texts have as many calls as their script asks for
    steps = min(recording.steps for _, recording in pair)
    # Like with like: neither goes on to an evaluation that the other has at another step.
    one, other = (recording.evaluated_steps() for _, recording in pair)
    differs = min((step for step in one ^ other if step < steps), default=steps)
    if differs > 1:
        steps = differs
    return [(batch, recording.first_steps(steps)) for batch, recording in pair]


def machine_of(
    gpu: GpuSpec, cpu: HostCpu | None = None, rates: Rates | None = None, profile: str = ""
) -> HostedGpu:
    """The GPU in a computer of which nothing is known but (perhaps) what a calibration profile
    measured (``rates``; ``profile`` is its name), and how fast the cores dispatch, or their clock:
    what a core does a cycle is taken to be alike then. What ``cpu`` says goes before the profile.
    """
    machine = HostedGpu(gpu, FITTED)
    if rates is not None and has_rates(gpu):
        machine = with_rates(machine, rates, profile)
    if cpu is not None and cpu.core_speed is not None:
        return dataclasses.replace(machine, core_speed=cpu.core_speed, core_measured=True)
    if cpu is not None and cpu.core_hz is not None:
        core_speed = cpu.core_hz / REFERENCE_HZ
        return dataclasses.replace(machine, core_speed=core_speed, core_measured=False)
    return machine


def step_seconds(recording: Recording, machine: HostedGpu) -> float | None:
    """The typical step of a recording; ``None`` where nothing can be said."""
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    work = Work.of_steady_step(recording)
    return step_time(work, machine).seconds if len(work.table) else None


def constants_of(machine: HostedGpu) -> str:
    """A sentence on where the model's constants are from."""
    source = f"{machine.efficiency.source}; "
    if machine.profile:
        classes = len(machine.classes)
        measured = f"rates and {classes} classes of kernels" if classes else "rates"
        source = (
            f"{measured} as measured (profile {machine.profile}), shares that kinds of kernels "
            f"reach {source}"
        )
    clock = f"assumed CPU: {ghz(machine.core_hz)}"
    if machine.core_measured:
        clock = (
            f"measured CPU: {machine.core_speed:.2g} times the "
            f"reference's speed at {ghz(REFERENCE_HZ)}"
        )
    copies = f"copies over PCIe at {byte_rate(machine.pinned_bytes_per_s)}"
    return f"{source}{clock}, {copies}" + ("" if machine.profile else " (assumed)")


def has_rates(gpu: GpuSpec) -> bool:
    """Is it a real card, not one made to measure?"""
    return not is_made_up(gpu, "fp32_flops")


def samples_per_batch(recording: Recording, batch: int | None) -> float | None:
    """Samples that an optimizer step has for each of ``batch``, the recording's batch size.

    With gradient accumulation as many as micro-batches, where the batch size is theirs; 1 where
    it is of the whole step, and for recordings that do not say. ``None``: cannot be told.
    """
    makeup = recording.makeup
    if makeup is None:
        return 1.0
    if makeup.effective_batch is None:
        return None
    return makeup.effective_batch / batch if batch else None


def speed_of(took: StepBreakdown, batch: int | None, per_batch: float | None) -> StepSpeed:
    """A step's time with the range that the truth lies in, and its rate: a step has ``per_batch``
    samples (:func:`samples_per_batch`) for each of ``batch``."""
    spread = took.spread
    return StepSpeed(
        batch,
        took.seconds,
        (took.seconds * spread.low, took.seconds * spread.high),
        took.gpu_s,
        took.host_s,
        took.copies_s,
        took.bound,
        batch * per_batch / took.seconds if batch and per_batch and took.seconds > 0 else None,
        took.core_s,
        spread.wide_for,
        took.communication_s,
        took.exposed_s,
        took.slowest_s,
    )


def of_whole_step(step: StepSpeed, recording: Recording) -> StepSpeed:
    """The same step with the rate, too, of a script whose batch size has no name but whose samples
    were seen."""
    makeup = recording.makeup
    if step.batch_size or makeup is None or not makeup.effective_batch or step.seconds <= 0:
        return step
    return dataclasses.replace(step, samples_per_s=makeup.effective_batch / step.seconds)
