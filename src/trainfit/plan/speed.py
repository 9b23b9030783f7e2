"""How fast a job is: steps of its recordings, costed on the GPU that is planned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu.custom import is_made_up
from trainfit.plan.sizing.batch_scaling import Pair, steady_work, work_law
from trainfit.results.machine.profile import Rates
from trainfit.results.plan.result import HostCpu
from trainfit.results.plan.speed import KNEE, PacedCalls, SlowedCall, Speed, StepSpeed
from trainfit.results.runs.loading import Consumer
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import StepMakeup
from trainfit.speed.model.efficiency import FITTED, RANGE
from trainfit.speed.model.host import REFERENCE_HZ, HostCosts
from trainfit.speed.model.kernel_times import peak_flops
from trainfit.speed.model.measured_rates import with_rates
from trainfit.speed.model.scaling import NotAffineError
from trainfit.speed.model.step import Machine, StepTime, step_time
from trainfit.speed.model.work import Work

#: Batch sizes that are costed lie in steps of a quarter of the power of two below them.
_PARTS: Final = 4
_TILE: Final = 8
#: Of its highest clock, what a core was seen to have at 30 calls a second: 3.5 to 1.7 of 4.0 GHz
#: (ACT on an RTX 4090 with a 12th-generation Intel, `powersave`).
CLOCK_SHARES: Final = (3.5 / 4.0, 1.7 / 4.0)
_NO_LAUNCHES: Final = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps at other batch sizes, the smallest first, and what is to be said of them."""

    steps: tuple[StepSpeed, ...] = ()
    notes: tuple[str, ...] = ()


def machine_of(
    gpu: GpuSpec, cpu: HostCpu | None = None, rates: Rates | None = None, profile: str = ""
) -> Machine:
    """The GPU in a computer of which nothing is known but (perhaps) what a calibration profile
    measured (``rates``; ``profile`` is its name), and how fast the cores dispatch, or their clock:
    what a core does a cycle is taken to be alike then. What ``cpu`` says goes before the profile.
    """
    machine = Machine(gpu, FITTED)
    if rates is not None and has_rates(gpu):
        machine = with_rates(machine, rates, profile)
    if cpu is not None and cpu.core_speed is not None:
        return dataclasses.replace(machine, core_speed=cpu.core_speed, core_measured=True)
    if cpu is not None and cpu.core_hz is not None:
        core_speed = cpu.core_hz / REFERENCE_HZ
        return dataclasses.replace(machine, core_speed=core_speed, core_measured=False)
    return machine


def speed(
    recording: Recording,
    batch: int | None,
    machine: Machine,
    curve: Curve | None = None,
    samples: int | None = None,
    *,
    calls: bool = False,
) -> Speed | None:
    """Of the typical step of ``recording``; ``None`` where nothing can be said.

    ``curve`` has its steps at other batch sizes; ``samples`` is how many an epoch has; ``calls``
    says that a step is a call of the model, which may come at a fixed rate.
    """
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    work = steady_work(recording)
    if not len(work.table):
        return None
    took = step_time(work, machine)
    now = of_whole_step(speed_of(took, batch, samples_per_batch(recording, batch)), recording)
    curve = curve or Curve()
    return Speed(
        now=now,
        curve=curve.steps,
        knee=knee(curve.steps),
        mfu=_utilization(work, machine.rated, took.seconds),
        by_kind_s=took.by_kind_s,
        constants=constants_of(machine),
        epoch_s=samples / now.samples_per_s if samples and now.samples_per_s else None,
        graphed_s=step_time(work, dataclasses.replace(machine, host=_NO_LAUNCHES)).seconds,
        notes=(*curve.notes, *_notes(recording)),
        paced=paced_calls(work, machine) if calls else None,
    )


def paced_calls(work: Work, machine: Machine) -> PacedCalls:
    """The call by cores whose clock fell between calls; the GPU's is taken to stay up."""
    slowed = []
    for share in CLOCK_SHARES:
        slower = dataclasses.replace(machine, core_speed=share * machine.core_speed)
        slowed.append(SlowedCall(share, step_time(work, slower).seconds))
    launches = int(work.column("launches").sum())
    return PacedCalls(launches, machine.core_hz, tuple(slowed))


def step_seconds(recording: Recording, machine: Machine) -> float | None:
    """The typical step of a recording; ``None`` where nothing can be said."""
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    work = steady_work(recording)
    return step_time(work, machine).seconds if len(work.table) else None


def saturation_batch(curve: Curve, noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any (:func:`knee`), as a multiple of 8
    where one is left (tiles of Tensor cores); ``None`` where that is not known.

    The multiple has to be nearly as fast itself: where a script takes a batch in parts of 3, that
    of 6 is, and that of 8 is not."""
    fast = [each.batch_size or 0 for each in _nearly_as_fast(curve.steps, noise_scale)]
    for size in fast:
        if size <= _TILE // 2 or not size % _TILE:
            return size
    return min(-(-fast[0] // _TILE) * _TILE, curve.steps[-1].batch_size or 0) if fast else None


def constants_of(machine: Machine) -> str:
    """Where the model's constants are from."""
    source = f"{machine.efficiency.source}; "
    if machine.profile:
        source = (
            f"rates as measured (profile {machine.profile}), shares that kinds of kernels reach "
            f"{source}"
        )
    clock = f"assumed CPU: {machine.core_hz / 1e9:.3g} GHz"
    if machine.core_measured:
        clock = (
            f"measured CPU: {machine.core_speed:.2g} times the "
            f"reference's speed at {REFERENCE_HZ / 1e9:g} GHz"
        )
    copies = f"copies over PCIe at {machine.pinned_bytes_per_s / 1e9:.3g} GB/s"
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


def speed_of(took: StepTime, batch: int | None, per_batch: float | None = 1.0) -> StepSpeed:
    """A step's time with the range that the truth lies in, and its rate: a step has ``per_batch``
    samples (:func:`samples_per_batch`) for each of ``batch``."""
    low, high = RANGE
    return StepSpeed(
        batch,
        took.seconds,
        (took.seconds * low, took.seconds * high),
        took.gpu_s,
        took.host_s,
        took.copies_s,
        took.bound,
        batch * per_batch / took.seconds if batch and per_batch and took.seconds > 0 else None,
        took.core_s,
    )


def of_whole_step(step: StepSpeed, recording: Recording) -> StepSpeed:
    """With the rate, too, of a script whose batch size has no name but whose samples were seen."""
    makeup = recording.makeup
    if step.batch_size or makeup is None or not makeup.effective_batch or step.seconds <= 0:
        return step
    return dataclasses.replace(step, samples_per_s=makeup.effective_batch / step.seconds)


def _notes(recording: Recording) -> tuple[str, ...]:
    """What a step's time or rate includes, or lacks."""
    notes = []
    if recording.steps == 1:
        notes.append(
            "only one step was simulated: set-up, parameter uploads and creating the optimizer's "
            "state are left out of its time, other work that is done once is not"
        )
    makeup = recording.makeup
    if makeup is not None and makeup.effective_batch is None:
        notes.append(f"samples/s is not known: {makeup.why}")
    return tuple(notes)


def fast_end(step: StepSpeed, gpu: str, makeup: StepMakeup | None = None) -> Consumer:
    """The shortest time that a step is likely to take between two batches of the DataLoader, with
    where it is from: who keeps up with that keeps up.

    An optimizer step with gradient accumulation uses several batches.
    """
    low, high = step.range_s
    batches = batches_per_step(makeup)
    source = (
        f"the lower bound of the 90% prediction interval for {gpu}: {1e3 * low:.3g} to "
        f"{1e3 * high:.3g} ms"
    )
    if batches > 1:
        source += f", for {batches} batches (gradient accumulation)"
    busy = (step.core_s or 0.0) / step.seconds if step.seconds > 0 else 0.0
    return Consumer(low / batches, low / batches * min(1.0, busy), source=source)


def batches_per_step(makeup: StepMakeup | None) -> int:
    """Batches of the DataLoader that an optimizer step uses; 1 where that is not known."""
    return (makeup.loader_batches if makeup is not None else None) or 1


def curve_of(pair: Pair, machine: Machine, largest: int) -> Curve:
    """Steps at batch sizes up to ``largest``, from two recordings at different ones."""
    if not has_rates(machine.gpu) or len(pair) != 2 or not largest:
        return Curve()
    try:
        law = work_law(pair)
    except NotAffineError as error:
        return Curve((), (f"the step's time is not known at other batch sizes: {error}",))
    shares = {samples_per_batch(recording, batch) for batch, recording in pair}
    if len(shares) > 1:
        return Curve(
            (),
            (
                "the step's time is not known at other batch sizes: the samples of an optimizer "
                "step do not grow with the batch size",
            ),
        )
    per_batch = shares.pop()
    sizes = batch_sizes(largest)
    return Curve(
        tuple(speed_of(step_time(law.at(size), machine), size, per_batch) for size in sizes)
    )


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, …: four to each doubling, and the largest."""
    sizes = {largest}
    power = 1
    while power <= largest:
        sizes |= {power + power * part // _PARTS for part in range(_PARTS)}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


def knee(curve: Sequence[StepSpeed], noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any, by samples a second.

    With the gradients' ``noise_scale`` B, in samples, by those that the same loss needs: with a
    batch size b as many as 1 + b / B times the least (McCandlish et al., "An Empirical Model of
    Large-Batch Training", 2018).
    """
    return next((each.batch_size for each in _nearly_as_fast(curve, noise_scale)), None)


def _nearly_as_fast(curve: Sequence[StepSpeed], noise_scale: float | None) -> list[StepSpeed]:
    """The steps that :func:`knee` chooses from, in the curve's order."""
    rates = [_rate(each) for each in curve]
    if noise_scale is not None:
        rates = [
            rate / (1 + rate * each.seconds / noise_scale)
            for each, rate in zip(curve, rates, strict=True)
        ]
    most = max(rates, default=0.0)
    timed = zip(curve, rates, strict=True)
    return [step for step, rate in timed if rate >= KNEE * most]


def _rate(step: StepSpeed) -> float:
    """Samples a second, or what is in proportion to them at all batch sizes."""
    if step.samples_per_s is not None:
        return step.samples_per_s
    return (step.batch_size or 0) / step.seconds if step.seconds > 0 else 0.0


def _utilization(work: Work, gpu: GpuSpec, seconds: float) -> float | None:
    """FLOPs of each dtype in the time that they take at the peak, over the step's."""
    flops = np.bincount(work.column("dtype"), weights=work.column("flops"))
    if seconds <= 0 or not flops.any():
        return None
    peak = peak_flops(gpu)[: len(flops)]
    return float((flops / peak).sum() / seconds)
