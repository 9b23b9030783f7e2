"""What is asked of a process that measures a GPU or a DataLoader, and what it read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.files.decoding import Exchanged
from trainfit.results.gpus import ConvolutionWorkspace, DeviceConstants, GpuSpec, Kernel
from trainfit.results.runs.trace import OwnFault, TraceOutcome

Subject = Literal["memory", "workspaces", "rates", "programs"]


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A simulated device in the real one's place: a rehearsal, or a test."""

    gpu: GpuSpec
    constants: DeviceConstants


@dataclasses.dataclass(frozen=True)
class MeasuringRequest(Exchanged):
    """One measuring process.

    ``result`` is the file to write. With ``hold`` the process measures no more than its
    context and then keeps it until its standard input is closed.
    """

    subject: Subject
    result: str
    stand_in: StandIn | None = None
    hold: bool = False


@dataclasses.dataclass(frozen=True)
class GpuEnvironment:
    """The GPU and the software, as PyTorch names them; ``None`` where it does not know."""

    gpu: str
    capability: tuple[int, int]
    memory_bytes: int
    torch: str
    cuda: str | None
    cudnn: str | None
    eager_loading: bool


@dataclasses.dataclass(frozen=True)
class MemoryReadings:
    """Device memory that is held, without what PyTorch's allocator reserved, in bytes.

    ``outside_bytes`` was read after the context was made and after each library's first use,
    in the order of use; it contains what other processes held. ``failed`` has the reason for
    stages that could not be run.
    """

    device: GpuEnvironment
    outside_bytes: Mapping[str, int]
    cublas_workspace_bytes: int | None
    failed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class WorkspaceReadings:
    """Convolutions' workspaces; ``failed`` has the reasons for those that could not be run."""

    convolutions: tuple[ConvolutionWorkspace, ...]
    failed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RateReadings:
    """Rates in base units, each in several trials (FLOP/s, B/s; ``launch`` in seconds).

    Matmuls are under ``matmul.`` and the dtype.
    """

    trials: Mapping[str, tuple[float, ...]]
    failed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ProgramReadings:
    """Programs of single classes of kernels, by name.

    Attributes:
        trials: seconds of a call, in several trials.
        kernels: what a call launches; empty on a real one.
        failed: why a program could not be run.
    """

    trials: Mapping[str, tuple[float, ...]]
    kernels: Mapping[str, tuple[Kernel, ...]]
    failed: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class MeasuringOutcome(Exchanged):
    """What a measuring process wrote: readings, or why there are none.

    ``without_gpu`` is set where PyTorch finds no GPU.
    """

    memory: MemoryReadings | None = None
    workspaces: WorkspaceReadings | None = None
    rates: RateReadings | None = None
    programs: ProgramReadings | None = None
    error: str = ""
    without_gpu: bool = False


# ---
# What became of a process that measures a script's DataLoader.


#: Source of a step time of 0.
AS_FAST: Final = "as fast as the loader can: a step time of 0"


@dataclasses.dataclass(frozen=True)
class Consumer:
    """What happens between two calls of a DataLoader's ``next``: a training step, in seconds.

    ``work_s`` of it keeps a core busy (launching kernels); in the rest the main thread waits.
    ``pageable_s`` comes on top where batches are not pinned: the driver copies them to its own
    pinned buffers first, and the main thread works at it. ``source`` says in words where the
    figures are from.
    """

    step_s: float
    work_s: float = 0.0
    pageable_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.work_s <= self.step_s:
            raise ValueError("expected a work time from 0 to the step time")


#: What became of it: "measured" (``result.json`` is there), "script" (the script came to no
#: batch; see ``trace``), "loader" (there is none that can be measured; see ``error``),
#: "failed" (measuring failed; see ``error`` and ``traceback``).
LoadingStatus = Literal["measured", "script", "loader", "failed"]


@dataclasses.dataclass(frozen=True)
class LoadingOutcome(Exchanged):
    """What became of a run that measures a DataLoader; ``outcome.json`` in its folder.

    ``result.json`` is there too if its task gave a result, and ``partial.json`` is the last
    that it kept before something risky. ``progress`` has a line of JSON for each thing begun.
    ``loader`` says in words which it was, ``trace`` what became of the script: the work of its
    first step (``compute``), ``autocast``, and the rest. ``error`` is one line.
    """

    status: LoadingStatus
    loader: str = ""
    trace: TraceOutcome | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    own_fault: OwnFault | None = None
