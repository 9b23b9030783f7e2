"""How fast a job is: steps of its recordings, costed on the GPU that is planned for."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_topology import link_of, network_words
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import (
    constants_of,
    has_rates,
    of_whole_step,
    samples_per_batch,
    speed_of,
)
from trainfit.plan.sizing.curve import Curve, knee, parts_of
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import TRANSFERS, StepMakeup
from trainfit.results.speed import CollectiveTime, PacedCalls, Ranks, SlowedCall, Speed, StepSpeed
from trainfit.results.text import duration
from trainfit.speed.collectives import collective_seconds
from trainfit.speed.kernel_times import peak_flops
from trainfit.speed.step import HostCosts, HostedGpu, step_time
from trainfit.speed.work import Work, period_of

#: Of its highest clock, what a core was seen to have at 30 calls a second: 3.5 to 1.7 of 4.0 GHz
#: (ACT on an RTX 4090 with a 12th-generation Intel, `powersave`).
CLOCK_SHARES: Final = (3.5 / 4.0, 1.7 / 4.0)
_NO_LAUNCHES: Final = HostCosts(*([0.0] * len(dataclasses.fields(HostCosts))))


def speed(
    recording: Recording,
    batch: int | None,
    machine: HostedGpu,
    curve: Curve | None = None,
    samples: int | None = None,
    *,
    calls: bool = False,
) -> Speed | None:
    """The speed of the typical step of ``recording``; ``None`` where nothing can be said.

    ``curve`` has its steps at other batch sizes; ``samples`` is how many an epoch has; ``calls``
    says that a step is a call of the model, which may come at a fixed rate.
    """
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    work = Work.of_steady_step(recording)
    if not len(work.table):
        return None
    took = step_time(work, machine)
    now = of_whole_step(speed_of(took, batch, samples_per_batch(recording, batch)), recording)
    curve = curve or Curve()
    return Speed(
        now=now,
        curve=curve.steps,
        knee=knee(curve.steps),
        mfu=_utilization(work, machine.rated, work.steps * took.seconds),
        by_kind_s=took.by_kind_s,
        constants=constants_of(machine),
        epoch_s=samples / now.samples_per_s if samples and now.samples_per_s else None,
        graphed_s=step_time(work, dataclasses.replace(machine, host=_NO_LAUNCHES)).seconds,
        notes=(*curve.notes, *_notes(recording)),
        paced=paced_calls(work, machine) if calls else None,
    )


def paced_calls(work: Work, machine: HostedGpu) -> PacedCalls:
    """The call by cores whose clock fell between calls; the GPU's is taken to stay up."""
    slowed = []
    for share in CLOCK_SHARES:
        slower = dataclasses.replace(machine, core_speed=share * machine.core_speed)
        slowed.append(SlowedCall(share, step_time(work, slower).seconds))
    launches = int((work.column("launches") * work.calls).sum())
    return PacedCalls(launches, machine.core_hz, tuple(slowed))


def _notes(recording: Recording) -> tuple[str, ...]:
    """What a step's time or rate includes, or lacks."""
    notes = []
    if recording.steps == 1:
        notes.append(
            "only one step was simulated: set-up, parameter uploads and creating the optimizer's "
            "state are left out of its time, other work that is done once is not"
        )
    if (period := period_of(recording)) > 1:
        notes.append(f"the step's time is the mean of {period} steps, after which they repeat")
    makeup = recording.makeup
    if makeup is not None and makeup.effective_batch is None:
        notes.append(f"samples/s is not known: {makeup.why}")
    return tuple(notes)


def fast_end(step: StepSpeed, gpu: str, makeup: StepMakeup | None) -> Consumer:
    """The shortest time that a step is likely to take between two batches of the DataLoader, with
    where it is from: who keeps up with that keeps up.

    An optimizer step with gradient accumulation uses several batches.
    """
    low, high = step.range_s
    batches = _batches_of(step, makeup)
    source = f"lower bound for {gpu} (90% interval: {duration(low)} to {duration(high)})"
    if batches > 1:
        source += f", for {batches:g} batches (gradient accumulation)"
    busy = (step.core_s or 0.0) / step.seconds if step.seconds > 0 else 0.0
    return Consumer(low / batches, low / batches * min(1.0, busy), source=source)


def batches_per_step(makeup: StepMakeup | None) -> int:
    """Batches of the DataLoader that an optimizer step uses; 1 where that is not known."""
    return (makeup.loader_batches if makeup is not None else None) or 1


def _batches_of(step: StepSpeed, makeup: StepMakeup | None) -> float:
    """Batches of the DataLoader that ``step`` uses, which may have another accumulation than the
    steps of ``makeup``."""
    batches = float(batches_per_step(makeup))
    if batches == 1 or makeup is None or not makeup.accumulation or not step.samples_per_s:
        return batches
    return batches * parts_of(step) / makeup.accumulation


def launched_step(
    recording: Recording | None, batch: int, parts: int, curve: Curve, machine: HostedGpu
) -> StepSpeed | None:
    """The step with ``parts`` micro-batches of ``batch`` samples: that of ``recording``, its run,
    or what the curve's has in proportion; ``None``: not known."""
    if recording is not None and recording.steps and has_rates(machine.gpu):
        took = step_time(Work.of_steady_step(recording), machine)
        return speed_of(took, batch, samples_per_batch(recording, batch))
    near = next((step for step in curve.steps if step.batch_size == batch), None)
    if near is None or not near.samples_per_s:
        return None
    share = parts / parts_of(near)
    low, high = near.range_s
    return dataclasses.replace(
        near,
        seconds=share * near.seconds,
        range_s=(share * low, share * high),
        gpu_s=share * near.gpu_s,
        host_s=share * near.host_s,
        copies_s=share * near.copies_s,
        core_s=None if near.core_s is None else share * near.core_s,
    )


def _utilization(work: Work, gpu: GpuSpec, seconds: float) -> float | None:
    """FLOPs of each dtype in the time that they take at the peak, over the step's."""
    flops = np.bincount(work.column("dtype"), weights=work.column("flops") * work.calls)
    if seconds <= 0 or not flops.any():
        return None
    peak = peak_flops(gpu)[: len(flops)]
    return float((flops / peak).sum() / seconds)


# ---
# The processes of a job for several GPUs, by what the first of them does.


_EQUAL: Final = (
    "rank 0 was simulated; the others are taken to have batches of the same shapes, the same model "
    "and a GPU of the same speed"
)
#: What is said of sharded training in addition.
_SHARDED: Final = "; sharded training (FSDP) has not been compared with real runs"
#: Likewise of a pipeline of more ranks than are simulated side by side.
_STAGES: Final = (
    "; it sends to and receives from other ranks in its steps: stages of a pipeline hold other "
    "layers, and what those need cannot be told from rank 0"
)


def ranks_of(recording: Recording, machine: HostedGpu, compared: str = "") -> Ranks | None:
    """The ranks of a job of several processes; ``None`` for one. ``compared`` says which other rank
    was."""
    count = recording.ranks
    if count < 2:
        return None
    times = transfers(Work.of_steady_step(recording), machine) if recording.steps else ()
    sharded = any(transfer.kind == "reduce_scatter" for transfer in times)
    words = ", ".join(filter(None, (link_of(machine.gpu).words, network_words(machine.gpu))))
    equal = _EQUAL + (f"; {compared}" if compared else "") + (_SHARDED if sharded else "")
    if any(transfer.kind == "send_receive" for transfer in times):
        equal += _STAGES
    sharing = recording.sharing
    return Ranks(count, words, times, equal, machine.gpu.machines, sharing=sharing)


def replicas_of(trace: Trace) -> int:
    """How many processes of its job have samples of their own."""
    recording = recording_of(trace)
    return max(1, recording.ranks // max(1, len(trace.ranks)) // recording.sharing)


def transfers(work: Work, machine: HostedGpu) -> tuple[CollectiveTime, ...]:
    """What passes between GPUs in a step, by kind, the longest first; of work of several steps
    their mean."""
    rated = has_rates(machine.gpu)
    seconds = collective_seconds(work, machine.gpu) if rated else np.zeros(len(work.table))
    times = []
    for kind in TRANSFERS:
        chosen = work.is_kind(kind)
        if chosen.any():
            count = max(1, round(int(chosen.sum()) / work.steps))
            nbytes = int(work.column("read")[chosen].sum()) // work.steps
            took = float(seconds[chosen].sum()) / work.steps
            times.append(CollectiveTime(kind, count, nbytes, took))
    return tuple(sorted(times, key=lambda each: -each.seconds))
