"""Step times on a GPU, at one batch size and at others, and what a step does meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

#: What bounds a step: arithmetic on Tensor cores or on shader cores, the memory's bandwidth, the
#: CPU that launches kernels, copies between host and device.
Bound = Literal["tensor cores", "shader cores", "bandwidth", "launches", "host copies"]

#: What an operator's kernels wait for.
Limit = Literal["arithmetic", "memory", "latency"]

#: The saturation batch size is the smallest with this share of the best throughput.
KNEE: Final = 0.95


@dataclasses.dataclass(frozen=True)
class StepSpeed:
    """One step (an optimizer's, or a call of the model), in seconds.

    ``range_s`` is the 90% prediction interval. ``gpu_s`` is the time of its kernels together,
    ``host_s`` the CPU time to launch them, ``copies_s`` copies between host and device.
    ``samples_per_s`` is ``None`` where the batch size is not known. ``core_s`` is how long it keeps
    a core busy, launching and in waits for the GPU (``None``: an older result).
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
