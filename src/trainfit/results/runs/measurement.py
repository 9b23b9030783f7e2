"""What is asked of a process that measures a GPU, and what it read there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainfit.results.files.decoding import decode
from trainfit.results.files.exchange import as_json, write_whole
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
class MeasuringRequest:
    """One measuring process.

    ``result`` is the file to write. With ``hold`` the process measures no more than its
    context and then keeps it until its standard input is closed.
    """

    subject: Subject
    result: str
    stand_in: StandIn | None = None
    hold: bool = False

    def to_json(self) -> str:
        return as_json(self)

    @classmethod
    def from_json(cls, text: str) -> MeasuringRequest:
        return decode(cls, json.loads(text))


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
class MeasuringOutcome:
    """What a measuring process wrote: readings, or why there are none.

    ``without_gpu`` is set where PyTorch finds no GPU.
    """

    memory: MemoryReadings | None = None
    workspaces: WorkspaceReadings | None = None
    rates: RateReadings | None = None
    error: str = ""
    without_gpu: bool = False

    def save(self, path: Path) -> None:
        """Write the outcome; the file appears whole or not at all."""
        write_whole(path, as_json(self))

    @classmethod
    def load(cls, path: Path) -> MeasuringOutcome:
        document: Any = json.loads(path.read_text())
        return decode(cls, document)
