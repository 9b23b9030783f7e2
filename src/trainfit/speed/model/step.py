"""Step time: the GPU's kernels, as the CPU launches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.results.plan.speed import Bound
from trainfit.results.runs.kernels import KINDS
from trainfit.speed.model.efficiency import Efficiency
from trainfit.speed.model.host import REFERENCE_HZ, HostCosts, issue_seconds
from trainfit.speed.model.kernel_times import PLAIN, KernelTimes
from trainfit.speed.model.timeline import Timeline
from trainfit.speed.model.work import Floats, Work


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU in a computer: copies from pinned and pageable memory in bytes a second (assumed: PCIe
    4.0 x16, and what the loader takes for pageable memory), and how fast a core of its CPU is, as
    a multiple of the reference (:mod:`trainfit.speed.model.host`; ``core_measured``: by a
    measurement).

    ``gpu`` has the rates that the model reckons with: where those of ``profile`` are in it, what
    was sold is ``datasheet``.
    """

    gpu: GpuSpec
    efficiency: Efficiency
    host: HostCosts = dataclasses.field(default_factory=HostCosts)
    core_speed: float = 1.0
    pinned_bytes_per_s: float = 20e9
    pageable_bytes_per_s: float = 6e9
    core_measured: bool = False
    datasheet: GpuSpec | None = None
    profile: str = ""

    @property
    def rated(self) -> GpuSpec:
        """The GPU with the rates of its datasheet."""
        return self.datasheet or self.gpu

    @property
    def core_hz(self) -> float:
        """The clock of a core that is so fast, if it does as much a cycle as the reference."""
        return self.core_speed * REFERENCE_HZ


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step's time in seconds, and what it is made of.

    ``gpu_s`` is what its kernels take together, ``host_s`` what the CPU takes to launch them,
    ``copies_s`` what copies between host and device take. ``by_kind_s`` divides ``gpu_s``.
    ``core_s`` is how long the step keeps a core busy: launching, and in waits for the GPU, in which
    CUDA spins (cudaDeviceScheduleAuto, the default, unless there are more contexts than CPUs;
    integrated GPUs sleep).
    """

    seconds: float
    gpu_s: float
    host_s: float
    copies_s: float
    bound: Bound
    by_kind_s: Mapping[str, float]
    core_s: float


def step_time(work: Work, machine: Machine) -> StepTime:
    """Of one step whose last kernel ends it: as of a loop that reads its loss, or of steps one
    after the other whose launches are the limit.

    With several streams: of a step after another, which may have copied its data before.
    """
    timeline, costed = Timeline(), TimedWork(work, machine)
    costed.launch(timeline)
    ended = host = waited = 0.0
    if timeline.several:
        ended, host, waited = timeline.end_s, timeline.host_s, timeline.waited_s
        costed.launch(timeline)
    host_s, waited_s = timeline.host_s - host, timeline.waited_s - waited
    seconds = costed.seconds
    gpu_s, copies_s = float(seconds.sum()), float(costed.copies.sum())
    by_kind: dict[str, float] = {}
    totals = np.bincount(work.column("kind"), weights=seconds, minlength=len(KINDS))
    for name, total in zip(PLAIN.values(), totals.tolist(), strict=True):
        if total:
            by_kind[name] = by_kind.get(name, 0.0) + total
    return StepTime(
        timeline.end_s - ended,
        gpu_s,
        host_s,
        copies_s,
        _bound(costed.times, machine, seconds, host_s, copies_s),
        by_kind,
        host_s + (0.0 if machine.gpu.shared_memory_device else waited_s),
    )


@dataclasses.dataclass(frozen=True)
class Launched:
    """Work on a timeline, seconds from its begin: when the CPU is done with each operator and
    issues each kernel if it never waits, when it really launches each kernel, and when each ends.
    """

    operator_s: Floats
    issued_s: Floats
    launched_s: Floats
    ended_s: Floats


class TimedWork:
    """Work with what it takes on a machine: ``seconds`` of each kernel, ``copies`` of those between
    host and device."""

    def __init__(self, work: Work, machine: Machine) -> None:
        self._work = work
        self.times = KernelTimes(work.table, machine.gpu)
        self.seconds = self.times.seconds(machine.efficiency)
        self.copies = _copy_seconds(work, machine)
        self._issued, self._done = issue_seconds(work, machine.host, machine.core_speed)

    def launch(self, timeline: Timeline) -> Launched:
        """It comes next on the timeline."""
        host_s = float(self._done[-1]) if len(self._done) else 0.0
        began = timeline.host_s
        ready, ends = timeline.add(self._work, self.seconds + self.copies, self._issued, host_s)
        return Launched(began + self._done, self._issued + began, ready, ends)


def _copy_seconds(work: Work, machine: Machine) -> Floats:
    moved = work.column("read").astype(np.float64)
    pageable = work.is_kind("upload", "download")
    rate = np.where(pageable, machine.pageable_bytes_per_s, machine.pinned_bytes_per_s)
    return np.where(pageable | work.is_kind("upload_pinned"), moved / rate, 0.0)


def _bound(
    times: KernelTimes, machine: Machine, seconds: Floats, host_s: float, copies_s: float
) -> Bound:
    """What the most of the step's time goes to; ``seconds`` is each kernel's."""
    gpu_s = float(seconds.sum())
    if copies_s > max(gpu_s, host_s):
        return "host copies"
    if host_s > gpu_s:
        return "launches"
    # What takes no time here (copies from the host, and for cores that the GPU lacks) is no load.
    arithmetic = np.where(seconds > 0, times.arithmetic(machine.efficiency), 0.0)
    traffic = np.where(seconds > 0, times.traffic(machine.efficiency), 0.0)
    computes = arithmetic > traffic
    if traffic[~computes].sum() >= arithmetic[computes].sum():
        return "bandwidth"
    on_tensor_cores = computes & times.on_tensor_cores()
    mostly = arithmetic[on_tensor_cores].sum() >= arithmetic[computes & ~on_tensor_cores].sum()
    return "tensor cores" if mostly else "shader cores"
