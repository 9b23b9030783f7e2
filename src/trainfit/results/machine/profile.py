"""A calibration profile: memory and rates of one GPU with its driver and libraries.

Written by ``trainfit calibrate``, read by ``plan`` and ``simulate``; those that trainfit
ships have their publications in ``provenance``. ``None`` means not measured; 0 is a figure.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.machine.constants import LIBRARIES, Basis

FORMAT: Final = "trainfit-profile"
VERSION: Final = 1

Unit = Literal["B", "B/s", "FLOP/s", "s"]
#: When the driver loads kernels: as they are used, or all at once (CUDA_MODULE_LOADING).
ModuleLoading = Literal["lazy", "eager"]

_REMAKE: Final = "re-create it with `trainfit calibrate`"
_WANTED: Final = "give a profile that `trainfit calibrate` wrote"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a GPU in ``unit``, with its spread.

    ``low`` and ``high`` are the least and the most seen in ``samples`` measurements, or the
    range that a publication leaves open (``samples`` is 0 then). ``how`` says how it was
    measured, or where it was read.
    """

    value: float
    low: float
    high: float
    unit: Unit
    basis: Basis
    how: str
    samples: int = 0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise ValueError("a figure is not finite")
        if not 0 <= self.low <= self.value <= self.high:
            raise ValueError(f"a figure is not between its own limits ({self.how})")


@dataclasses.dataclass(frozen=True)
class ConvolutionWorkspace:
    """Workspace that cuDNN used for one convolution, in bytes.

    ``shape`` is (samples, input channels, output channels, height, width, kernel size) at
    stride 1 with equal padding; ``modelled_bytes`` is the simulated one.
    """

    shape: tuple[int, int, int, int, int, int]
    dtype: str
    direction: Literal["forward", "backward"]
    channels_last: bool
    measured_bytes: int
    modelled_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory, all in bytes.

    ``context`` is a fresh process after its first tensor; ``included`` are libraries whose
    memory is part of it (all kernels, where modules are loaded eagerly). ``libraries`` are
    additions when first used. ``others`` is what other processes held meanwhile, ``usable``
    the total of cudaMemGetInfo.
    """

    context: Figure | None
    included: tuple[str, ...] = ()
    libraries: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    usable: Figure | None = None
    others: Figure | None = None
    cublas_workspace: Figure | None = None
    convolutions: tuple[ConvolutionWorkspace, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a GPU: dense matmuls in FLOP/s by dtype, copies in bytes/s,
    and the cost of launching a kernel in seconds."""

    matmul: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    memory_bandwidth: Figure | None = None
    launch: Figure | None = None
    host_to_device_pinned: Figure | None = None
    host_to_device_pageable: Figure | None = None


@dataclasses.dataclass(frozen=True)
class Profile(ResultFile):
    """One GPU model under one driver and one set of libraries.

    ``gpus`` are names as the driver spells them, all of which the figures hold for. What is
    ``None`` of the software was not stated by the source.
    """

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED)

    gpus: tuple[str, ...]
    module_loading: ModuleLoading
    provenance: str
    memory: Memory
    rates: Rates = dataclasses.field(default_factory=Rates)
    capability: tuple[int, int] | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torch: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.gpus or not all(self.gpus):
            raise ValueError("it names no GPU")
        memory = self.memory
        for name in (*memory.included, *memory.libraries):
            if name not in LIBRARIES:
                raise ValueError(f"{name!r} is none of {', '.join(LIBRARIES)}")
        self._check_units()
        if memory.usable is not None and memory.usable.value < 1:
            raise ValueError("its GPU has no memory: usable is 0")

    def _check_units(self) -> None:
        memory, rates = self.memory, self.rates
        single = (memory.context, memory.usable, memory.others, memory.cublas_workspace)
        copies = (
            rates.memory_bandwidth,
            rates.host_to_device_pinned,
            rates.host_to_device_pageable,
        )
        for unit, figures in (
            ("B", (*single, *memory.libraries.values())),
            ("B/s", copies),
            ("FLOP/s", tuple(rates.matmul.values())),
            ("s", (rates.launch,)),
        ):
            for figure in figures:
                if figure is not None and figure.unit != unit:
                    raise ValueError(f"a figure in {figure.unit} should be in {unit}")

    @property
    def is_rehearsal(self) -> bool:
        """Was it measured on the simulated device?"""
        context = self.memory.context
        return context is not None and context.basis == "simulated"
