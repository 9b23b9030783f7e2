"""How fast a job is: step times on a GPU and on others, and whether the DataLoader keeps up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.steps import StepMakeup

#: What bounds a step: arithmetic on Tensor cores or on shader cores, the memory's bandwidth, the
#: CPU that launches kernels, copies between host and device.
Bound = Literal[
    "tensor cores", "shader cores", "bandwidth", "launches", "host copies", "communication"
]

#: What an operator's kernels wait for.
Limit = Literal["arithmetic", "memory", "latency"]

#: How a training is spread over GPUs: copies of the model (DDP), with the optimizer's state in
#: parts (ZeRO-1), or with all of it in parts (FSDP, as ZeRO-3). "" is a process on one GPU.
Strategy = Literal["", "DDP", "ZeRO-1", "FSDP"]

#: The saturation batch size is the smallest with this share of the best throughput.
KNEE: Final = 0.95


@dataclasses.dataclass(frozen=True)
class StepSpeed:
    """One step (an optimizer's, or a call of the model), in seconds.

    ``range_s`` is the 90% prediction interval. ``gpu_s`` is the time of its kernels together,
    ``host_s`` the CPU time to launch them, ``copies_s`` copies between host and device.
    ``samples_per_s`` is ``None`` where the batch size is not known. ``core_s`` is how long it keeps
    a core busy, launching and in waits for the GPU. ``wide_for`` names
    the classes of kernels that make the interval wide, the widest first. ``communication_s`` is the
    time of the collectives together, ``exposed_s`` by how much they make the step longer, and
    ``slowest_s`` by how much waiting for the slowest process does (0 in a job of one). In a job of
    several processes it is the step of one, with its samples.
    """

    batch_size: int | None
    seconds: float
    range_s: tuple[float, float]
    gpu_s: float
    host_s: float
    copies_s: float
    bound: Bound
    samples_per_s: float | None = None
    core_s: float | None = None
    wide_for: tuple[str, ...] = ()
    communication_s: float = 0.0
    exposed_s: float = 0.0
    slowest_s: float = 0.0

    @property
    def efficiency(self) -> float:
        """Throughput of each process as a share of what it would be alone."""
        lost = self.exposed_s + self.slowest_s
        return 1 - lost / self.seconds if self.seconds > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """All collectives of one kind in a step: ``nbytes`` as nccl-tests count them (predicted)."""

    kind: str
    calls: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """The stages of a pipeline that one rank has: what it holds, ``allocated_bytes`` at the peak
    and ``device_bytes`` as nvidia-smi shows it; the seconds of a step in which its GPU computes
    (``None``: not known), and the bytes that it sends to other ranks in it."""

    rank: int
    allocated_bytes: int
    device_bytes: int
    computing_s: float | None
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes of a job, one for each GPU of a machine.

    Rank 0 was simulated: memory and steps are its, and ``equal`` says what was taken of the others.
    ``link`` is what connects the GPUs and the ``machines``. ``collectives`` are those of the
    typical step as the job is, the longest first. ``stages`` are the ranks of a pipeline, each of
    them simulated (none: there is no pipeline); memory is that of the one that needs the most then.
    ``bubble_share`` is the part of a step in which their GPUs compute nothing, on average
    (``None``: not known). Of all of them ``sharing`` work on the same samples together (tensor
    parallelism, context parallelism).
    """

    count: int
    link: str
    collectives: tuple[CollectiveTime, ...]
    equal: str
    machines: int = 1
    stages: tuple[PipelineStage, ...] = ()
    bubble_share: float | None = None
    sharing: int = 1

    @property
    def replicas(self) -> int:
        """How many have samples of their own."""
        return max(1, self.count // max(1, len(self.stages)) // self.sharing)


@dataclasses.dataclass(frozen=True)
class GpuShare:
    """What one of a process's GPUs holds, ``allocated_bytes`` at the peak and ``device_bytes`` as
    nvidia-smi shows it, and its kernels' share of a step's time (``None``: not known)."""

    gpu: int
    allocated_bytes: int
    device_bytes: int
    busy_share: float | None


@dataclasses.dataclass(frozen=True)
class GpusOfProcess:
    """The GPUs that one process uses, by number: a model that is split over them, or copies of it
    (``replicated``: DataParallel).

    ``transfers`` are what passes between them in the typical step, over ``link``, the longest
    first. ``ddp_s`` is what a step of as many samples takes with a process for each GPU
    (DistributedDataParallel), if nothing of its all-reduce is hidden (``None``: there is one model,
    or it is not known).
    """

    link: str
    shares: tuple[GpuShare, ...]
    transfers: tuple[CollectiveTime, ...]
    replicated: bool
    ddp_s: float | None = None


@dataclasses.dataclass(frozen=True)
class SlowedCall:
    """A call by a core whose clock has fallen to this share of the one that was reckoned with."""

    core_share: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class PacedCalls:
    """What to expect of calls that come at a fixed rate, between which the CPU's clock falls.

    ``launches`` are the kernels of a call; ``slowed`` its time at lower clocks, the lowest
    last; ``core_hz`` is the full clock.
    """

    launches: int
    core_hz: float
    slowed: tuple[SlowedCall, ...]


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a job is, if its DataLoader keeps up.

    ``curve`` are steps at other batch sizes up to the largest that fits, smallest first (empty
    where they are not known); ``knee`` the smallest of them with :data:`KNEE` of the most samples
    a second. ``mfu`` is the FLOPs of matmuls, convolutions and attention as a share of what the
    GPU could do in the time in their numbers (model FLOPs utilization). ``by_kind_s`` divides
    ``now.gpu_s`` by kind of kernel. ``constants`` says where the model's constants are from.
    ``epoch_s`` is ``None`` where the data set's size is not known. ``graphed_s`` is what a step
    would take if no kernel waited for its launch, as under CUDA graphs. ``paced`` is of jobs that
    call a model and do not train.
    """

    now: StepSpeed
    curve: tuple[StepSpeed, ...]
    knee: int | None
    mfu: float | None
    by_kind_s: Mapping[str, float]
    constants: str
    epoch_s: float | None = None
    notes: tuple[str, ...] = ()
    graphed_s: float | None = None
    paced: PacedCalls | None = None

    def at(self, batch: int | None) -> StepSpeed | None:
        """The step at this batch size, if it is among those that were costed."""
        return next((each for each in (self.now, *self.curve) if each.batch_size == batch), None)


@dataclasses.dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator in one dtype within a step.

    ``gpu_s`` is what its ``kernels`` need together; ``flops`` are those of matmuls, convolutions
    and attention (0 for others), ``moved_bytes`` what they read and write. ``limit``: what most of
    the time goes to; "latency" are kernels that are too small for either.
    """

    name: str
    dtype: str
    phase: str
    kernels: int
    gpu_s: float
    flops: int
    moved_bytes: int
    limit: Limit


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The typical step, costed kernel by kernel (predicted), largest operators first.

    ``peak_flops_per_s`` are the GPU's dense peaks by the dtypes that occur, ``bandwidth`` that of
    its memory, both as sold.
    """

    gpu_s: float
    by_phase_s: Mapping[str, float]
    operators: tuple[OperatorTime, ...]
    peak_flops_per_s: Mapping[str, float]
    bandwidth_bytes_per_s: float


# --- A step over time: operators on the CPU, kernels on the GPU, memory ---------------------------


@dataclasses.dataclass(frozen=True)
class OperatorSpan:
    """An operator while the CPU dispatches it; seconds from the step's begin."""

    name: str
    phase: str
    module: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class KernelSpan:
    """A kernel, or a copy between host and device, while the GPU runs it. ``operator`` is the index
    of the one that launches it; ``flops`` and ``moved_bytes`` (read and written) are its work."""

    kind: str
    dtype: str
    stream: int
    operator: int
    start_s: float
    end_s: float
    flops: int
    moved_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """Allocated bytes by kind from ``time_s`` on, when the CPU asks for them."""

    time_s: float
    by_kind_bytes: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class StepTimeline:
    """Predicted, all of it: by the model of kernels on ``gpu`` and of the CPU's launches. ``step``
    is the number (from 0) of the step that stands for all others."""

    gpu: str
    step: int
    seconds: float
    operators: tuple[OperatorSpan, ...]
    kernels: tuple[KernelSpan, ...]
    memory: tuple[MemoryPoint, ...]


# ---
# How the DataLoader keeps up with the GPU, in a plan.


#: Which part makes the other wait; "unknown" where the time of a step is.
Bottleneck = Literal["gpu", "loader", "unknown"]
#: Where a DataLoader's rate is from; "busy": predicted, as other processes kept the cores busy.
RateFrom = Literal["measured", "predicted", "busy", ""]
#: What a run is as fast as; "gpu only": the DataLoader was not measured; "unknown": its rate is
#: not known.
RunLimit = Literal["gpu", "loader", "gpu only", "unknown"]


@dataclasses.dataclass(frozen=True)
class RunRate:
    """How fast the launched run will be, at ``batch_size`` (``None``: not known).

    ``step_s`` is the time from one step (an optimizer's, or a call of the model) to the next,
    ``samples_per_s`` and ``epoch_s`` are ``None`` where they are not known. ``limit`` is the slower
    part, which they are of; ``gpu_step_s`` and ``gpu_samples_per_s`` what the GPU alone would do
    (predicted). ``loader`` says where the DataLoader's rate is from (empty: there is none);
    ``is_bound``: it is what another processor gives at best.
    """

    batch_size: int | None
    step_s: float
    samples_per_s: float | None
    epoch_s: float | None
    limit: RunLimit
    gpu_step_s: float
    gpu_samples_per_s: float | None
    loader: RateFrom = ""
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class DataLoading:
    """How the DataLoader keeps up with the GPU at ``batch_size`` (``None``: the script's own).

    ``result`` is the whole of what ``trainfit loader`` finds; where it is ``None``, ``failure``
    says why, with the fix. ``bottleneck`` is for the recommended settings, and ``factor`` says by
    how much: what the other part could do, divided by what it can (1 and more; ``None`` where that
    is not known). ``step_is_bound``: ``result.step_s`` is a lower bound of the GPU's step time, not
    measured. ``input_at_most`` are the batches a second that the cores of ``PlanResult.cpu`` give
    at best, ``input_range`` what they may be, ``input_basis`` what that is from, and
    ``input_workers`` the fewest workers that give as many as the GPU uses, or all. ``launched`` are
    the settings in the launch command (``None``: those of ``result``).
    """

    result: LoaderResult | None
    batch_size: int | None = None
    step_is_bound: bool = True
    bottleneck: Bottleneck = "unknown"
    factor: float | None = None
    failure: str = ""
    input_at_most: float | None = None
    input_range: tuple[float, float] | None = None
    input_basis: tuple[str, ...] = ()
    input_workers: int | None = None
    launched: LoaderSettings | None = None

    @property
    def evidence(self) -> RateFrom:
        """The evidence for the rate of the launched settings."""
        loader_result = self.result
        if loader_result is None:
            return ""
        if self.input_at_most is None and loader_result.measured(
            self.launched or loader_result.recommended
        ):
            return "measured"
        return "busy" if loader_result.was_busy else "predicted"


# ---
# What ``trainfit gpus --for`` answers: a job on each of several GPUs.
#
# Bytes, seconds, samples; ``None`` is not known. Prices are in the user's currency.


@dataclasses.dataclass(frozen=True)
class FigureEffect:
    """What a tenth more of one figure of a GPU changes for the job.

    ``value`` is written for people, with its unit. ``step_change`` is that of the step's time
    (-0.04: 4% shorter), ``largest_batch`` the one that would fit then; ``None``: not known, or
    no matter of it.
    """

    figure: str
    value: str
    step_change: float | None = None
    largest_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class GpuEstimate:
    """The job on one GPU.

    ``device_bytes`` is the device memory of the unchanged job, ``fits`` says whether that fits.
    ``largest_batch`` is 0 where one sample does not fit, and about right where it is not exact.
    ``now`` is the step as the job is,
    ``at_saturation`` that at the smallest batch size with nearly the best throughput of those
    that fit. What follows is of the whole run: at the job's own batch size where that fits, else
    at ``at_saturation`` or ``at_largest`` (``run_batch``). ``power_w`` is the board's limit as
    sold.

    Of a job on ``count`` GPUs of a machine, ``gpu`` is one of them, with what a process on it has:
    memory, steps and batch sizes. ``strategy`` is what is estimated of it from the run on one GPU.
    Samples, power and price are of all GPUs together; ``efficiency`` is the throughput of each as a
    share of what one alone has at the same batch size. ``high_bytes`` is the upper bound of
    ``device_bytes`` (90% prediction interval), ``at_largest`` the step at the largest batch that
    fits, where the job's own does not.
    """

    gpu: str
    capability: tuple[int, int]
    laptop: bool
    shared_memory: bool
    memory_bytes: int
    power_w: float | None
    device_bytes: int
    fits: bool
    largest_batch: int | None = None
    now: StepSpeed | None = None
    at_saturation: StepSpeed | None = None
    run_batch: int | None = None
    samples_per_s: float | None = None
    samples_per_joule: float | None = None
    run_s: float | None = None
    price_per_hour: float | None = None
    samples_per_unit: float | None = None
    cost: float | None = None
    notes: tuple[str, ...] = ()
    effects: tuple[FigureEffect, ...] = ()
    largest_is_exact: bool = True
    count: int = 1
    strategy: Strategy = ""
    efficiency: float | None = None
    high_bytes: int | None = None
    at_largest: StepSpeed | None = None

    @property
    def name(self) -> str:
        """The GPU; of several, their number and the strategy, too."""
        return f"{self.count}x {self.gpu}, {self.strategy}" if self.count > 1 else self.gpu

    @property
    def runs(self) -> bool:
        """Does it fit, with the job's batch size or another?"""
        return self.fits or bool(self.largest_batch)


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A step that the user measured: ``factor`` times the prediction for it."""

    gpu: str
    seconds: float
    factor: float


@dataclasses.dataclass(frozen=True)
class GpuComparison(ResultFile):
    """A job on GPUs, the best first: what fits, by the cost of the run where it is known, else by
    its time.

    ``samples`` are the whole run's, or one epoch's where it is not known how many it has
    (``is_one_epoch``; ``None``: not known). ``cheapest`` and ``fastest`` are names of GPUs that the
    job fits and, with a ``budget``, whose run costs no more. ``step`` is what an optimizer step
    consists of. ``counts`` are the numbers of GPUs that were requested (none: one). ``unseen`` says
    why it is not known what an evaluation or a checkpoint needs (empty: it is, or there is none).
    """

    FILE: ClassVar = Format.of("trainfit-gpu-comparison", "trainfit gpus --for RESULT --json")

    job: str
    batch_size: int | None
    samples: int | None
    gpus: tuple[GpuEstimate, ...]
    currency: str = ""
    budget: float | None = None
    cheapest: str | None = None
    fastest: str | None = None
    anchor: Anchor | None = None
    constants: str = ""
    notes: tuple[str, ...] = ()
    step: StepMakeup | None = None
    counts: tuple[int, ...] = ()
    is_one_epoch: bool = False
    unseen: str = ""

    @property
    def length(self) -> str:
        """What ``samples``, times and costs are of, in words."""
        return "epoch" if self.is_one_epoch else "run"

    @property
    def fits(self) -> bool:
        """Does the job fit any of them?"""
        return any(estimate.runs for estimate in self.gpus)
