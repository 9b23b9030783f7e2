"""How long a step takes: the GPU's kernels, one after the other, as the CPU launches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.results.kernels import KINDS, LAUNCH_QUEUE
from trainfit.results.speed import Bound
from trainfit.speed.efficiency import Efficiency
from trainfit.speed.host import REFERENCE_HZ, HostCosts, issue_seconds
from trainfit.speed.kernel_times import KernelTimes
from trainfit.speed.work import Floats, Work


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU in a computer: copies from pinned and pageable memory in bytes a second (assumed: PCIe
    4.0 x16, and what the loader takes for pageable memory), and how fast a core of its CPU is, as
    a multiple of the reference (:mod:`trainfit.speed.host`; ``core_measured``: by a measurement).

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
    after the other whose launches are the limit."""
    timeline = Timeline()
    times, seconds, copies = timeline.add(work, machine)
    gpu_s, copies_s = float(seconds.sum()), float(copies.sum())
    by_kind = np.bincount(work.column("kind"), weights=seconds, minlength=len(KINDS))
    return StepTime(
        timeline.end_s,
        gpu_s,
        timeline.host_s,
        copies_s,
        _bound(times, machine, gpu_s, timeline.host_s, copies_s),
        {name: float(total) for name, total in zip(KINDS, by_kind, strict=True) if total},
        timeline.host_s + (0.0 if machine.gpu.shared_memory_device else timeline.waited_s),
    )


_WAITS: Final = ("upload", "download", "wait")


def _copy_seconds(work: Work, machine: Machine) -> Floats:
    moved = work.column("read").astype(np.float64)
    pageable = work.is_kind("upload", "download")
    rate = np.where(pageable, machine.pageable_bytes_per_s, machine.pinned_bytes_per_s)
    return np.where(pageable | work.is_kind("upload_pinned"), moved / rate, 0.0)


class Timeline:
    """A GPU that runs kernels in order, each when it is launched and the one before is done.

    Where the CPU waits for the GPU (for its data, or for a place in the launch queue), all that
    follows is launched later. Copies on a stream of their own run beside the kernels. ``host_s`` is
    what the CPU took to launch and for pauses, ``waited_s`` its waits.
    """

    def __init__(self, queue: int = LAUNCH_QUEUE) -> None:
        self.host_s = self.waited_s = 0.0
        self._gpu_free = 0.0
        self._queue = queue
        #: Of the latest kernels, when each is done.
        self._ends = np.full(queue, -np.inf)

    @property
    def cpu_s(self) -> float:
        """When the CPU has launched all that was added."""
        return self.host_s + self.waited_s

    @property
    def end_s(self) -> float:
        """When all that was added is done, and the CPU has launched it."""
        return max(self._gpu_free, self.cpu_s)

    def pause(self, seconds: float) -> None:
        """The CPU launches nothing for so long."""
        self.host_s += seconds

    def wait(self, until: float) -> None:
        """The CPU waits for a point in time, if that is not past."""
        self.waited_s += max(0.0, until - self.cpu_s)

    def add(self, work: Work, machine: Machine) -> tuple[KernelTimes, Floats, Floats]:
        """What is launched next; its kernels' times, and the seconds of kernels and of copies."""
        times = KernelTimes(work.table, machine.gpu)
        seconds, copies = times.seconds(machine.efficiency), _copy_seconds(work, machine)
        issued, host_s = issue_seconds(work, machine.host, machine.core_speed)
        self._run(work, seconds + copies, issued + self.host_s)
        self.host_s += host_s
        return times, seconds, copies

    def _run(self, work: Work, seconds: Floats, issued: Floats) -> None:
        waits = set(np.flatnonzero(work.is_kind(*_WAITS)).tolist())
        queues = range(0, len(seconds), self._queue)
        first = 0
        for last in sorted({len(seconds), *queues, *(wait + 1 for wait in waits)}):
            if last > first:
                self._launch(seconds[first:last], issued[first:last])
                if last - 1 in waits:
                    self.waited_s = max(self.waited_s, self._gpu_free - float(issued[last - 1]))
            first = last

    def _launch(self, took: Floats, issued: Floats) -> None:
        """No more kernels than the queue holds; rows count as one each."""
        # Each takes the place of one that many kernels before, which has to be done.
        behind = self._ends[: len(took)] - issued
        waited = np.maximum(np.maximum.accumulate(behind), self.waited_s)
        passed = np.cumsum(took)
        # end[i] = max(end[i-1], issued[i]) + took[i], solved for all i at once
        starts = np.maximum(issued + waited, self._gpu_free) - (passed - took)
        ends = np.maximum.accumulate(starts) + passed
        self.waited_s, self._gpu_free = float(waited[-1]), float(ends[-1])
        self._ends = np.concatenate((self._ends, ends))[-self._queue :]


def _bound(
    times: KernelTimes, machine: Machine, gpu_s: float, host_s: float, copies_s: float
) -> Bound:
    """What the most of the step's time goes to."""
    if copies_s > max(gpu_s, host_s):
        return "host copies"
    if host_s > gpu_s:
        return "launches"
    arithmetic = times.arithmetic(machine.efficiency)
    traffic = times.traffic(machine.efficiency)
    computes = arithmetic > traffic
    if traffic[~computes].sum() >= arithmetic[computes].sum():
        return "bandwidth"
    return "tensor cores" if machine.gpu.has_tensor_cores else "shader cores"
