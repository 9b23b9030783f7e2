"""Step time: the GPU's kernels, as the CPU launches them; and its share by phase and operator."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainfit.hardware import GpuSpec
from trainfit.results.runs.recording import PHASES, IntArray, Recording
from trainfit.results.runs.steps import DTYPES, KINDS, PAGEABLE_COPIES, PINNED_COPIES
from trainfit.results.speed import Bound, Limit, OperatorTime, StepWork
from trainfit.simgpu.device.recorder import RecordingBuilder
from trainfit.speed.collectives import SLOWED_BY, collective_seconds, slowest_of
from trainfit.speed.efficiency import FITTED, Efficiency
from trainfit.speed.kernel_times import PLAIN, KernelTimes, peak_flops
from trainfit.speed.spread import ClassCost, StepSpread, factors_of, spread_of
from trainfit.speed.timeline import Timeline
from trainfit.speed.work import LEFT_OUT, Floats, Work, one_off, steady

# ---
# CPU time of dispatching operators and launching kernels.
#
# PyTorch in eager mode spends some microseconds of one core on every operator: Python, autograd's
# bookkeeping, the dispatcher, and the library's own set-up of a kernel. These times fall with the
# core's clock and its work a clock, so they are given for one core and scaled by how fast another
# is.


#: The clock of the core that the costs below are given for (Hz).
REFERENCE_HZ: Final = 3.0e9
#: What an operator takes that core in :mod:`trainfit.speed.dispatch_probe` (s): 2.79 to 2.85 us in
#: six runs on a virtual core of an AMD EPYC with torch 2.13, which is taken for one of 3 GHz (its
#: clock is not told).
REFERENCE_OPERATOR_S: Final = 2.8e-6


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """Seconds of one core at :data:`REFERENCE_HZ`.

    ``bare_s`` is an operator's in a loop of nothing else (``add_`` of a number; torch 2.13 on the
    reference's core), ``view_s`` that of one that launches nothing (a view, a detached gradient;
    likewise), ``tensor_s`` what each tensor of an operator over lists takes, with its share of the
    optimizer's own Python (likewise, AdamW and SGD), ``launch_s`` any kernel's launch: an H200
    launches ``add_`` every 7.1 us on a core of 0.7 times the reference's speed.

    In a training step, where modules, autograd and cold caches come on top, an operator that
    launches something takes ``forward_s``, or in the backward pass, which another thread makes,
    ``backward_s``; ``library_s`` and ``convolution_s`` are what cuBLAS, fused attention and batch
    normalization, and cuDNN's convolutions, take in addition for each kernel (finding an algorithm,
    descriptors, cuDNN's execution plans); cuDNN's recurrent layers call a matmul for every time
    step. These four are by steps of ACT, BERT, GPT-2, ResNet-50 and ViT at their smallest batches
    on that H200 (bench/gpu/truth), whose repeats differ by 20%.
    """

    forward_s: float = 6e-6
    backward_s: float = 16e-6
    library_s: float = 13e-6
    convolution_s: float = 28e-6
    launch_s: float = 2.5e-6
    view_s: float = 1.5e-6
    tensor_s: float = 1.05e-6
    bare_s: float = 2.5e-6


#: A kernel begins at once that waits no longer than this after its launch.
_AT_ONCE_S: Final = 1e-8

_LIBRARY: Final = tuple(
    name for name in KINDS if name.startswith(("matmul", "batch_norm", "attention"))
)
_CONVOLUTION: Final = tuple(
    name for name in KINDS if name.startswith(("convolution", "grouped", "depthwise"))
)
#: Kinds of operators over lists, whose ``batches`` are the lists' tensors.
_OVER_LISTS: Final = ("optimizer", "fill")


def _in_graphs(work: Work) -> NDArray[np.bool_]:
    """Which rows are launched by a graph's launch."""
    starts = np.flatnonzero(work.is_kind("graph"))
    changes = np.zeros(len(work.table) + 1, dtype=np.int64)
    np.add.at(changes, starts + 1, 1)
    ends = np.minimum(starts + 1 + work.column("rows")[starts], len(work.table))
    np.add.at(changes, ends, -1)
    covered: NDArray[np.bool_] = np.cumsum(changes[:-1]) > 0
    return covered


def issue_seconds(work: Work, costs: HostCosts, speed: float = 1.0) -> tuple[Floats, Floats]:
    """When each kernel is launched, and when each operator is done, from the step's begin if the
    CPU never waits.

    ``speed`` is the core's, as a multiple of the reference's.
    """
    by_phase = np.full(len(PHASES) + 1, costs.forward_s)
    by_phase[PHASES.index("backward")] = costs.backward_s
    launched = work.column("launches") > 0
    launching = np.bincount(work.op, weights=launched, minlength=len(work.op_phase)) > 0
    of_operators = np.where(launching, by_phase[work.op_phase], costs.view_s)
    of_operators[work.op_phase == LEFT_OUT] = 0.0
    if work.op_calls is not None:
        of_operators *= work.op_calls
    launches = work.column("launches") * costs.launch_s
    launches = launches + np.where(work.is_kind(*_LIBRARY), costs.library_s, 0.0)
    launches += np.where(work.is_kind(*_CONVOLUTION), costs.convolution_s, 0.0)
    tensors = work.column("batches")
    launches += np.where(work.is_kind("recurrent"), tensors * costs.library_s, 0.0)
    listed = work.is_kind(*_OVER_LISTS) & (tensors > 1)
    launches += np.where(listed, tensors * costs.tensor_s, 0.0)
    launches = np.where(_in_graphs(work), 0.0, launches) * work.calls
    of_kernels = np.bincount(work.op, weights=launches, minlength=len(of_operators))
    done = np.cumsum(of_operators + of_kernels)
    # A kernel is launched when its operator has been dispatched, after the kernels before it.
    before = np.cumsum(launches)
    dispatched = np.cumsum(of_operators)[work.op]
    return (dispatched + before) / speed, done / speed


@dataclasses.dataclass(frozen=True)
class HostedGpu:
    """A GPU in a computer: copies from pinned and pageable memory in bytes a second (assumed: PCIe
    4.0 x16, and what the loader takes for pageable memory), and how fast a core of its CPU is, as
    a multiple of the reference (:mod:`trainfit.speed.step`; ``core_measured``: by a
    measurement).

    ``gpu`` has the rates that the model reckons with: where those of ``profile`` are in it, what
    was sold is ``datasheet``. ``classes`` are classes of kernels that were measured on the GPU.
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
    classes: Mapping[str, ClassCost] = dataclasses.field(default_factory=dict)

    @property
    def rated(self) -> GpuSpec:
        """The GPU with the rates of its datasheet."""
        return self.datasheet or self.gpu

    @property
    def core_hz(self) -> float:
        """The clock of a core that is so fast, if it does as much a cycle as the reference."""
        return self.core_speed * REFERENCE_HZ


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """A step's time in seconds, and what it is made of.

    ``gpu_s`` is what its kernels take together, ``host_s`` what the CPU takes to launch them,
    ``copies_s`` what copies between host and device take. ``by_kind_s`` divides ``gpu_s``.
    ``core_s`` is how long the step keeps a core busy: launching, and in waits for the GPU, in which
    CUDA spins (cudaDeviceScheduleAuto, the default, unless there are more contexts than CPUs;
    integrated GPUs sleep). ``spread`` is how far from it the truth may be. ``communication_s`` is
    what the collectives take together, ``exposed_s`` by how much they make the step longer,
    ``slowest_s`` by how much the slowest of the ranks does.
    """

    seconds: float
    gpu_s: float
    host_s: float
    copies_s: float
    bound: Bound
    by_kind_s: Mapping[str, float]
    core_s: float
    spread: StepSpread
    communication_s: float = 0.0
    exposed_s: float = 0.0
    slowest_s: float = 0.0

    def of_each(self, steps: int) -> StepBreakdown:
        """The mean, where it is the time of so many steps."""
        times: dict[str, Any] = {
            name: number / steps for name, number in vars(self).items() if isinstance(number, float)
        }
        by_kind = {name: each / steps for name, each in self.by_kind_s.items()}
        return dataclasses.replace(self, by_kind_s=by_kind, **times)


def step_time(work: Work, machine: HostedGpu) -> StepBreakdown:
    """The time of one step whose last kernel ends it: as of a loop that reads its loss, or of steps
    one after the other whose launches are the limit.

    With several streams: of a step after another, which may have copied its data before. Of work
    of several steps it is their mean.
    """
    costed = TimedWork(work, machine)
    step_s, host_s, waited_s, launching_s = _one_of_many(costed)
    seconds, communication_s = costed.seconds, float(costed.links.sum())
    gpu_s, copies_s = float(seconds.sum()), float(costed.copies.sum())
    bound, exposed_s = _bound(costed, machine, host_s), 0.0
    if communication_s:
        exposed_s = max(0.0, step_s - _one_of_many(costed.alone())[0])
        slowed_s = SLOWED_BY * max(0.0, communication_s - exposed_s)
        step_s, exposed_s = step_s + slowed_s, exposed_s + slowed_s
        if exposed_s > step_s / 2:
            bound = "communication"
    slowest_s = step_s * slowest_of(work)
    step_s += slowest_s
    by_kind: dict[str, float] = {}
    totals = np.bincount(work.column("kind"), weights=seconds, minlength=len(KINDS))
    for name, total in zip(PLAIN.values(), totals.tolist(), strict=True):
        if total:
            by_kind[name] = by_kind.get(name, 0.0) + total
    breakdown = StepBreakdown(
        step_s,
        gpu_s,
        host_s,
        copies_s,
        bound,
        by_kind,
        host_s + (0.0 if machine.gpu.shared_memory_device else waited_s),
        spread_of(
            work,
            seconds,
            step_s,
            core_measured=machine.core_measured,
            calibrated=bool(machine.profile),
            measured=machine.classes,
            host_s=host_s,
            launching_s=launching_s,
            copies_s=copies_s,
            exposed_s=exposed_s + slowest_s,
        ),
        communication_s,
        exposed_s,
        slowest_s,
    )
    return breakdown if work.steps == 1 else breakdown.of_each(work.steps)


def _one_of_many(costed: TimedWork) -> tuple[float, float, float, float]:
    """Seconds of a step, what the CPU takes to launch it, and its waits; and of the step, what goes
    at the CPU's pace: up to the last kernel that begins when it is launched."""
    timeline = Timeline()
    launched = costed.launch(timeline)
    ended = host = waited = 0.0
    if timeline.several:
        ended, host, waited = timeline.end_s, timeline.host_s, timeline.waited_s
        launched = costed.launch(timeline)
    at_once = launched.began_s <= launched.launched_s + _AT_ONCE_S
    paced_s = max(0.0, float(launched.issued_s[at_once][-1]) - host) if at_once.any() else 0.0
    return timeline.end_s - ended, timeline.host_s - host, timeline.waited_s - waited, paced_s


@dataclasses.dataclass(frozen=True)
class LaunchedWork:
    """Work on a timeline, seconds from its begin: when the CPU is done with each operator and
    issues each kernel if it never waits, when it really launches each kernel, and when each begins
    and ends.
    """

    operator_s: Floats
    issued_s: Floats
    launched_s: Floats
    began_s: Floats
    ended_s: Floats


class TimedWork:
    """Work with what it takes on a machine: ``seconds`` of each kernel, ``copies`` of those between
    host and device, ``links`` of collectives; all of the ``calls`` that it stands for."""

    def __init__(self, work: Work, machine: HostedGpu) -> None:
        self._work = work
        self.times = KernelTimes(work.table, machine.gpu)
        self.seconds = self.times.seconds(machine.efficiency)
        if machine.classes:
            self.seconds = self.seconds * factors_of(work, machine.classes)
        self.calls = work.calls
        self.seconds = self.seconds * self.calls
        self.copies = _copy_seconds(work, machine) * self.calls
        self.links = collective_seconds(work, machine.gpu)
        self._issued, self._done = issue_seconds(work, machine.host, machine.core_speed)

    def alone(self) -> TimedWork:
        """The work with collectives that need no time, as in a job of one process."""
        other = copy.copy(self)
        other.links = np.zeros_like(self.links)
        return other

    def issued(self) -> tuple[Floats, float]:
        """When each kernel is launched if the CPU never waits, and when the CPU is done."""
        return self._issued, float(self._done[-1]) if len(self._done) else 0.0

    def launch(self, timeline: Timeline) -> LaunchedWork:
        """It comes next on the timeline."""
        host_s = float(self._done[-1]) if len(self._done) else 0.0
        began = timeline.host_s
        took = self.seconds + self.copies + self.links
        ready, ends = timeline.add(self._work, took, self._issued, host_s)
        return LaunchedWork(began + self._done, self._issued + began, ready, ends - took, ends)


def _copy_seconds(work: Work, machine: HostedGpu) -> Floats:
    moved = work.column("read").astype(np.float64)
    pageable, pinned = work.is_kind(*PAGEABLE_COPIES), work.is_kind(*PINNED_COPIES)
    rate = np.where(pageable, machine.pageable_bytes_per_s, machine.pinned_bytes_per_s)
    return np.where(pageable | pinned, moved / rate, 0.0)


def _bound(costed: TimedWork, machine: HostedGpu, host_s: float) -> Bound:
    """What the most of the step's time goes to."""
    times, seconds, calls = costed.times, costed.seconds, costed.calls
    gpu_s, copies_s = float(seconds.sum()), float(costed.copies.sum())
    if copies_s > max(gpu_s, host_s):
        return "host copies"
    if host_s > gpu_s:
        return "launches"
    # What takes no time here (copies from the host, and for cores that the GPU lacks) is no load.
    arithmetic = np.where(seconds > 0, times.arithmetic(machine.efficiency), 0.0) * calls
    traffic = np.where(seconds > 0, times.traffic(machine.efficiency), 0.0) * calls
    computes = arithmetic > traffic
    if traffic[~computes].sum() >= arithmetic[computes].sum():
        return "bandwidth"
    on_tensor_cores = computes & times.on_tensor_cores()
    mostly = arithmetic[on_tensor_cores].sum() >= arithmetic[computes & ~on_tensor_cores].sum()
    return "tensor cores" if mostly else "shader cores"


# ---
# The simulated GPU's clock, by the model of a step's time.


class StepClock:
    """When everything that was submitted so far is done, as :func:`speed.step.step_time` has it:
    kernels in order, each when the CPU has launched it (see :class:`simgpu.clock.Clock`)."""

    def __init__(self, recorder: RecordingBuilder, gpu: GpuSpec) -> None:
        self._recorder, self._machine = recorder, HostedGpu(gpu, FITTED)
        self._timeline = Timeline()
        self._ops = self._kernels = 0
        #: What nobody has asked the time of yet: operators and kernels up to each pause, and its
        #: seconds. Few scripts look at the time, and costing a few kernels takes as long as many.
        self._pauses: list[tuple[int, int, float]] = []

    def now(self, stream: int | None = None) -> float:
        """See :class:`simgpu.clock.Clock`; what was launched since the last call is costed now."""
        self._cost()
        return self._timeline.end_s if stream is None else self._timeline.end_of(stream)

    def host(self) -> float:
        """See :class:`simgpu.clock.Clock`."""
        self._cost()
        return self._timeline.cpu_s

    def pause(self, seconds: float) -> None:
        """See :class:`simgpu.clock.Clock`."""
        at = self._recorder.op_count, self._recorder.kernel_count
        if self._pauses and self._pauses[-1][:2] == at:
            seconds += self._pauses.pop()[2]
        self._pauses.append((*at, seconds))

    def _cost(self) -> None:
        """All that was recorded since the last call, with the pauses in between."""
        for ops, kernels, seconds in self._pauses:
            self._launch(ops, kernels)
            self._timeline.pause(seconds)
        self._pauses.clear()
        self._launch(self._recorder.op_count, self._recorder.kernel_count)

    def _launch(self, ops: int, kernels: int) -> None:
        """Operators and kernels up to these numbers."""
        first = self._ops
        table, stream, op, phase = self._recorder.launched(
            slice(first, ops), slice(self._kernels, kernels)
        )
        self._ops, self._kernels = ops, kernels
        if not len(phase) and not len(table):
            return
        # A wait that follows no operator belongs to one that has been counted: to the first of
        # these, or (without any) to one that takes nothing.
        own = np.maximum(op - first, 0)
        if not len(phase):
            work, machine = Work(table, stream, own, np.zeros(1, np.int64)), self._idle()
        else:
            work, machine = Work(table, stream, own, phase), self._machine
        TimedWork(work, machine).launch(self._timeline)

    def _idle(self) -> HostedGpu:
        """A machine whose operators need no time."""
        host = self._machine.host
        free = dataclasses.replace(host, forward_s=0.0, backward_s=0.0, view_s=0.0)
        return dataclasses.replace(self._machine, host=free)


# ---
# A step's GPU time by phase and operator.


def step_work(recording: Recording, machine: HostedGpu) -> StepWork | None:
    """The work of the step that stands for all others; ``None`` where no kernel was recorded."""
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
    dtypes = work.column("dtype")
    if "tfloat32" not in machine.rated.tensor_flops:  # recordings say what may round, on any GPU
        dtypes = np.where(dtypes == DTYPES.index("tfloat32"), DTYPES.index("float32"), dtypes)
    operators = _operators(recording, step, work, dtypes, bounds, seconds)
    peaks = dict(zip(DTYPES, peak_flops(machine.rated).tolist(), strict=True))
    with_flops = {operator.dtype for operator in operators if operator.flops}
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
    recording: Recording,
    step: int,
    work: Work,
    dtypes: IntArray,
    bounds: tuple[Floats, Floats],
    seconds: Floats,
) -> tuple[OperatorTime, ...]:
    """Times of operators by name, phase and dtype (``dtypes``: that of each kernel); ``bounds`` are
    what arithmetic and traffic of each kernel need."""
    (arithmetic, traffic), calls = bounds, work.calls
    names = recording.op_name[recording.op_step == step][work.op]
    columns = (names, work.op_phase[work.op], dtypes)
    keys, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    sums = {
        name: np.bincount(group.ravel(), weights=values, minlength=len(keys))
        for name, values in (
            ("gpu_s", seconds),
            ("kernels", np.where(seconds > 0, work.column("launches"), 0) * calls),
            ("flops", work.column("flops") * calls),
            ("moved", (work.column("read") + work.column("written")) * calls),
            ("arithmetic", np.where(seconds > 0, arithmetic, 0.0) * calls),
            ("traffic", np.where(seconds > 0, traffic, 0.0) * calls),
        )
    }
    times = [_operator(recording, keys[row], {k: v[row] for k, v in sums.items()})
             for row in np.flatnonzero(sums["gpu_s"] > 0).tolist()]  # fmt: skip
    return tuple(sorted(times, key=lambda each: -each.gpu_s))


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
