"""What is asked of a process that measures a GPU, and what it read there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trainfit.results.files.exchange import Exchanged
from trainfit.results.machine.constants import DeviceConstants
from trainfit.results.machine.gpu_spec import GpuSpec
from trainfit.results.machine.profile import ConvolutionWorkspace

Subject = Literal["memory", "workspaces", "rates"]


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
class Device:
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

    device: Device
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
class MeasuringOutcome(Exchanged):
    """What a measuring process wrote: readings, or why there are none.

    ``without_gpu`` is set where PyTorch finds no GPU.
    """

    memory: MemoryReadings | None = None
    workspaces: WorkspaceReadings | None = None
    rates: RateReadings | None = None
    error: str = ""
    without_gpu: bool = False
