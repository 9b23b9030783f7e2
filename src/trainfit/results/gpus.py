"""Figures of GPUs: specifications, what they mean for a job, memory and rates as calibrated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile


@dataclasses.dataclass(frozen=True)
class MeaningLine:
    """One figure with what it says and what it does not.

    ``value`` is written for people, with its unit; ``None`` where it is not known, and then
    ``says`` is the reason. ``source`` is where the figure is from.
    """

    figure: str
    value: str | None
    says: str
    does_not_say: str = ""
    source: str = ""
    assumed: bool = False


@dataclasses.dataclass(frozen=True)
class JobFigures:
    """What follows from a GPU's own figures; ``None`` where one of them is not known.

    Mappings are by dtype: "float32" on the CUDA cores, "tfloat32", "float16", "bfloat16" and
    "float8" on Tensor cores.
    """

    read_memory_once_s: float | None
    """Memory divided by bandwidth: the least time of a pass over all of it."""
    balance_flop_per_byte: Mapping[str, float]
    """Rate divided by bandwidth: an operation of fewer FLOP per byte waits for memory."""
    addition_share: float | None
    """c = a + b in float32 (1 FLOP per 12 bytes) as a share of the FP32 rate, at best."""
    matmul_balance_size: int | None
    """From this n on an n x n x n matmul of 2-byte elements is not bound by bandwidth."""
    tensor_speedup: Mapping[str, float]
    """Tensor-core rate divided by the FP32 rate of the CUDA cores."""
    fill_elements: int | None
    """Elements of an elementwise operation from which on each SM has a block."""
    fill_rows: int | None
    """Rows through a linear layer of 1024 outputs from which on each SM has a tile."""
    adamw_parameters: int
    """Trained float32 parameters that fit with gradients and AdamW's moments, nothing else."""
    adamw_step_s_per_billion: float | None
    """Time of AdamW's memory traffic a step, for each 10^9 float32 parameters."""
    l2_elements: int | None
    """float32 elements that fit in the L2 cache."""
    pin_bits_per_s: float | None
    """Bandwidth per bit of the memory's bus."""
    flop_per_joule: float | None
    """The GPU's highest 16-bit or FP32 rate divided by its power."""


@dataclasses.dataclass(frozen=True)
class GpuFigures:
    """A GPU's figures in base units; ``None`` is not known, as of a custom GPU specification.

    Rates are dense. ``sources`` says of each figure where it is from; it begins with
    "assumed" where nobody published or measured it.
    """

    key: str
    name: str
    architecture: str
    capability: tuple[int, int]
    laptop: bool
    shared_memory: bool
    memory_bytes: int
    memory_is_assumed: bool
    nominal_memory_bytes: int | None
    context_bytes: int
    context_range_bytes: tuple[int, int]
    bandwidth_bytes_per_s: float | None
    bus_bits: int | None
    l2_bytes: int | None
    sm_count: int | None
    cuda_cores: int | None
    boost_clock_hz: float | None
    fp32_flop_per_s: float | None
    tensor_dtypes: tuple[str, ...]
    tensor_flop_per_s: Mapping[str, float] | None
    """By dtype; empty without Tensor cores."""
    power_w: float | None
    for_a_job: JobFigures
    sources: Mapping[str, str]
    inline_ecc: bool = False
    """Do the codes of ECC, on as sold, pass the same bus as the data?"""
    memory_type: str = ""
    """Such as "GDDR6"; empty is not known."""
    tensor_cores: int | None = None
    meaning: tuple[MeaningLine, ...] = ()
    """In words; empty unless asked for."""


@dataclasses.dataclass(frozen=True)
class GpusResult(ResultFile):
    """The GPUs in the order in which they are shown."""

    FILE: ClassVar = Format.of("trainfit-gpus", "trainfit gpus --json")

    gpus: tuple[GpuFigures, ...]


# ---
# What a GPU has: resolved from its name once, and part of every request to another process.


#: Where the figure of a card's Tensor cores is from, if it has none.
NO_TENSOR_CORES: Final = "no Tensor cores"


@dataclass(frozen=True)
class GpuSpec:
    """What a GPU has, in base units (bytes, Hz, FLOP/s, W)."""

    name: str
    """As `torch.cuda.get_device_name` says it: "NVIDIA GeForce RTX 4090"."""
    key: str
    """Short name shown to users: "RTX 4090"."""
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    sm_count: int
    memory_bytes: int
    """Total as cudaMemGetInfo reports it, below the nominal size (Linux)."""
    memory_is_assumed: bool
    """True where `memory_bytes` is derived by a rule (good to about 2%), not reported."""
    bandwidth_bytes_per_s: float
    """Device memory bandwidth, peak."""
    l2_bytes: int | None
    boost_clock_hz: float | None
    fp32_flops: float
    """Dense FP32 rate of the shader cores."""
    tensor_flops: Mapping[str, float] = field(hash=False)
    """Dense Tensor-core rate by dtype name; empty without Tensor cores."""
    power_watts: float
    """Board power limit as sold."""
    shared_memory_device: bool
    """True for Jetson and the like, whose memory the CPU uses as well."""
    context_bytes: int
    """Assumed size of the CUDA context with a PyTorch process's lazily loaded modules."""
    context_range_bytes: tuple[int, int]
    """Least and most that `context_bytes` may be."""
    sources: Mapping[str, str] = field(hash=False)
    """Field name to where its figure comes from; "assumed: ..." where nobody measured it."""
    nominal_bytes: int | None = None
    """Memory as sold; None of a card that is not known."""
    bus_bits: int | None = None
    """Width of the memory's bus."""
    memory_type: str = ""
    """Such as "GDDR6"; empty of a card that is not known."""
    tensor_cores: int | None = None
    """Their number as datasheets count them; None of a card that is not known."""
    is_laptop: bool = False
    """True of a laptop's or an embedded module's card, whose power the maker of the device sets."""
    inline_ecc: bool = False
    """True of cards whose GDDR memory keeps the codes of its ECC, on as sold, among the data."""
    count: int = 1
    """GPUs of this kind in the machine."""
    machines: int = 1
    """Machines of that kind, over a network."""
    network_bytes_per_s: float | None = None
    """What a network card of a machine sends while it receives as much; None of one machine."""
    network_cards: int = 1
    """Network cards of a machine."""
    peer_to_peer: bool = True
    """False where the job keeps NCCL from it (`NCCL_P2P_DISABLE=1`)."""

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_tensor_cores(self) -> bool:
        return bool(self.tensor_flops)


# ---
# Memory of a process on a GPU outside PyTorch's allocator, by cause.


Library = Literal["kernels", "cublas", "cublas_backward", "cudnn_forward", "cudnn_backward", "sdpa"]

#: What adds to a fresh process's context when it is first used, in the order in which
#: ``trainfit calibrate`` measures: the kernels of many operators (what the first of them needs is
#: needed once, whoever is first), matmuls, matmuls of the thread that computes gradients (which
#: has a handle of its own), convolutions and recurrent networks and their gradients, and fused
#: attention.
LIBRARIES: Final[tuple[Library, ...]] = (
    "kernels",
    "cublas",
    "cublas_backward",
    "cudnn_forward",
    "cudnn_backward",
    "sdpa",
)

#: The name of the part that communicators of several processes add.
COMMUNICATION: Final = "nccl"

#: The name of the part that every process has.
CONTEXT: Final = "context"

#: Where a figure is from: this GPU, a publication, worked out from one, a rule, or the
#: simulated device (a rehearsal, which measured what the simulation was told).
Basis = Literal["measured", "published", "derived", "assumed", "simulated"]


@dataclasses.dataclass(frozen=True)
class Constant:
    """Device memory of one cause, in bytes, with the range in which it is taken to lie.

    ``name`` is :data:`CONTEXT`, one of :data:`LIBRARIES`, or :data:`COMMUNICATION`. ``source`` says
    in words where the figure is from.
    """

    name: str
    value_bytes: int
    low_bytes: int
    high_bytes: int
    basis: Basis
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes <= self.value_bytes <= self.high_bytes:
            raise ValueError(f"{self.name} is not between its own limits")


@dataclasses.dataclass(frozen=True)
class DeviceConstants:
    """Memory of a process on one GPU in addition to reserved memory.

    ``parts`` are the context and each library's addition. ``other_processes_bytes`` is what
    others hold of the GPU. ``profile`` names the calibration profile in use, "" without one;
    ``notes`` is what a result has to say of it, ``torch`` the version that it was made with.
    ``communication`` is what NCCL adds in a job of several processes (``None``: not a part).
    """

    parts: tuple[Constant, ...]
    other_processes_bytes: int = 0
    profile: str = ""
    notes: tuple[str, ...] = ()
    torch: str = ""
    communication: Constant | None = None

    def __post_init__(self) -> None:
        if [part.name for part in self.parts] != [CONTEXT, *LIBRARIES]:
            raise ValueError("expected the context and each library exactly once")
        if self.other_processes_bytes < 0:
            raise ValueError("the memory of other processes is negative")

    def used(self, libraries: Collection[str]) -> tuple[Constant, ...]:
        """The context, and what the ``libraries`` that a job uses add to it."""
        own = tuple(p for p in self.parts if p.name == CONTEXT or p.name in libraries)
        if self.communication is None or self.communication.name not in libraries:
            return own
        return (*own, self.communication)


def total(parts: Iterable[Constant]) -> tuple[int, int, int]:
    """Bytes of all parts together: expected, least, most.

    The limits are added up: the parts of one GPU err the same way, not independently.
    """
    listed = tuple(parts)
    return (
        sum(part.value_bytes for part in listed),
        sum(part.low_bytes for part in listed),
        sum(part.high_bytes for part in listed),
    )


# ---
# A calibration profile: memory and rates of one GPU with its driver and libraries.
#
# Written by ``trainfit calibrate``, read by ``plan`` and ``simulate``; those that trainfit
# ships have their publications in ``provenance``. ``None`` means not measured; 0 is a figure.


Unit = Literal["B", "B/s", "FLOP/s", "s"]
#: When the driver loads kernels: as they are used, or all at once (CUDA_MODULE_LOADING).
ModuleLoading = Literal["lazy", "eager"]


@dataclasses.dataclass(frozen=True)
class GpuFigure:
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
class GpuMemory:
    """Device memory, all in bytes.

    ``context`` is a fresh process after its first tensor; ``included`` are libraries whose
    memory is part of it (all kernels, where modules are loaded eagerly). ``libraries`` are
    additions when first used. ``others`` is what other processes held meanwhile, ``usable``
    the total of cudaMemGetInfo.
    """

    context: GpuFigure | None
    included: tuple[str, ...] = ()
    libraries: Mapping[str, GpuFigure] = dataclasses.field(default_factory=dict)
    usable: GpuFigure | None = None
    others: GpuFigure | None = None
    cublas_workspace: GpuFigure | None = None
    convolutions: tuple[ConvolutionWorkspace, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or ``launches`` of the same kind with their work together.

    ``kind`` and ``dtype`` are of :mod:`trainfit.results.runs.steps`. ``rows``, ``columns`` and
    ``depth`` are those of a matmul (m, n, k; also of the implicit one of a convolution),
    of which there are ``batches`` at once (of operators over lists, tensors); 0 in other kernels,
    but for "resampling", where ``rows`` threads take ``depth`` turns each, one after the other, for
    kernels that go over their elements one by one (so many ``rows``) and not in vectors, and where
    a block each goes over a channel of ``rows`` elements (batch normalization) or one of
    ``batches`` rows of ``columns`` (layer normalization). Of "pointwise_reordered" ``columns`` are
    the bytes that pass between multiprocessors and the L2 cache, of "pointwise" elements of
    ``depth`` instructions each, where these are many; of "recurrent" ``batches`` are the matmuls
    that the CPU launches one by one, of "sorting" its kernels.
    """

    kind: str
    dtype: str
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batches: int = 1
    launches: int = 1


@dataclasses.dataclass(frozen=True)
class MeasuredProgram:
    """A few operators of one class of kernels, measured as a whole.

    Attributes:
        name: what it computes, with sizes: of :mod:`trainfit.speed.calibration`.
        seconds: of one call, on the GPU.
        kernels: what a call launches, as the simulated device has it.
        modelled_s: what the model says of them; ``None`` where it says nothing.
        group: the class of kernels that most of that was of.
    """

    name: str
    seconds: GpuFigure
    kernels: tuple[Kernel, ...] = ()
    modelled_s: float | None = None
    group: str = ""


#: How copies from pageable memory are measured; by profiles that say other words, from pages that
#: were never written, which are all the same one: faster than any batch's.
OF_DATA: Final = "copies from pageable memory that holds data, CUDA events"


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a GPU: dense matmuls in FLOP/s by dtype, copies in bytes/s, the cost of launching
    a kernel in seconds, and programs of each class of kernels.

    ``model`` names the version of the model that the programs' kernels are of; those of another are
    simulated again before they are used (:func:`trainfit.plan.calibration.of_this_model`)."""

    matmul: Mapping[str, GpuFigure] = dataclasses.field(default_factory=dict)
    memory_bandwidth: GpuFigure | None = None
    launch: GpuFigure | None = None
    host_to_device_pinned: GpuFigure | None = None
    host_to_device_pageable: GpuFigure | None = None
    programs: tuple[MeasuredProgram, ...] = ()
    model: str = ""


@dataclasses.dataclass(frozen=True)
class Profile(ResultFile):
    """One GPU model under one driver and one set of libraries.

    ``gpus`` are names as the driver spells them, all of which the figures hold for. What is
    ``None`` of the software was not stated by the source.
    """

    FILE: ClassVar = Format.of("trainfit-profile", "trainfit calibrate")

    gpus: tuple[str, ...]
    module_loading: ModuleLoading
    provenance: str
    memory: GpuMemory
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
            ("s", (rates.launch, *(program.seconds for program in rates.programs))),
        ):
            for figure in figures:
                if figure is not None and figure.unit != unit:
                    raise ValueError(f"a figure in {figure.unit} should be in {unit}")

    @property
    def is_rehearsal(self) -> bool:
        """Was it measured on the simulated device?"""
        context = self.memory.context
        return context is not None and context.basis == "simulated"
