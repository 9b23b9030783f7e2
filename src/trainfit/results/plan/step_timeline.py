"""A step of a simulated run over time: operators on the CPU, kernels on the GPU, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
