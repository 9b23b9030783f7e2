"""What a machine is: facts in base units (bytes, Hz, W, °C, cores), each known or absent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, Literal, TypeVar

# ---
# A fact about a machine: known, absent, or not to be told, and where it was read.


T = TypeVar("T")
U = TypeVar("U")

State = Literal["known", "absent", "cannot_tell"]


@dataclasses.dataclass(frozen=True)
class Fact(Generic[T]):
    """One fact, with ``source``, the file, call or variable that it was read from.

    ``absent`` means that the machine was asked and has no such thing (no swap, no cpufreq in a
    virtual machine); ``cannot_tell`` that it could not be asked. ``reason`` says why in both
    cases. ``value`` is ``None`` unless the fact is known.
    """

    state: State
    value: T | None
    source: str
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.state == "known") != (self.value is not None):
            raise ValueError(f"a fact of {self.source} is {self.state} with value {self.value!r}")

    @property
    def is_known(self) -> bool:
        return self.state == "known"

    @property
    def is_absent(self) -> bool:
        return self.state == "absent"

    def map(self, function: Callable[[T], U | None], wanted: str) -> Fact[U]:
        """What ``function`` makes of a known value; others stay what they are.

        Where it raises ``ValueError`` or gives ``None``, the text was not ``wanted`` and the
        fact cannot be told.
        """
        if self.value is None:
            return Fact(self.state, None, self.source, self.reason)
        try:
            result = function(self.value)
        except (ValueError, ArithmeticError, LookupError):
            result = None
        if result is None:
            shown = repr(self.value)
            shown = shown if len(shown) <= 60 else shown[:60] + "…"
            return cannot_tell(self.source, f"it says {shown}, not {wanted}")
        return known(result, self.source)


def known(value: T, source: str) -> Fact[T]:
    """A fact that was read."""
    return Fact("known", value, source)


def absent(source: str, reason: str) -> Fact[T]:
    """The machine has no such thing."""
    return Fact("absent", None, source, reason)


def cannot_tell(source: str, reason: str) -> Fact[T]:
    """The machine could not be asked, or its answer could not be read."""
    return Fact("cannot_tell", None, source, reason)


# ---
# What a machine is: facts in base units (bytes, Hz, W, °C, cores), each with its source.
#
# `hardware` reads them, `doctor` judges them. A fact that is absent or cannot be told has a
# reason; see :class:`trainfit.results.machine.Fact`.


# --- Processor --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CoreKind:
    """Cores of one kind; a processor that is not hybrid has one kind, ``"uniform"``."""

    kind: Literal["uniform", "performance", "efficiency"]
    logical_cpus: tuple[int, ...]
    physical_cores: int
    max_hz: float | None


@dataclasses.dataclass(frozen=True)
class FrequencyPolicy:
    """What cpufreq says of the CPUs that share one clock; ``None`` is not exposed.

    ``energy_preference`` is EPP's word or number. ``limit_hz`` is the most that the policy
    allows, ``hardware_hz`` the most that the core can do.
    """

    cpus: tuple[int, ...]
    driver: str | None = None
    governor: str | None = None
    available_governors: tuple[str, ...] = ()
    energy_preference: str | None = None
    current_hz: float | None = None
    limit_hz: float | None = None
    hardware_hz: float | None = None


@dataclasses.dataclass(frozen=True)
class IdleState:
    """A C-state of CPU 0: its exit latency, and whether it is switched off."""

    name: str
    latency_s: float
    disabled: bool
    residency_s: float | None = None


@dataclasses.dataclass(frozen=True)
class NumaNode:
    """A NUMA node and its CPUs; ``memory_bytes`` is ``None`` where it is not exposed."""

    node: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Cpu:
    """The processor, and how much of it a job of this process gets.

    ``affinity`` are the CPUs that this process may run on, ``quota_cores`` the cgroup's CPU
    quota in cores (absent: no limit), ``usable_cores`` what remains of both for a job.
    ``turbo`` is whether clocks above the base are allowed.
    """

    model: Fact[str]
    sockets: Fact[int]
    physical_cores: Fact[int]
    logical_cpus: Fact[int]
    core_kinds: Fact[tuple[CoreKind, ...]]
    affinity: Fact[tuple[int, ...]]
    quota_cores: Fact[float]
    usable_cores: Fact[float]
    numa_nodes: Fact[tuple[NumaNode, ...]]
    policies: Fact[tuple[FrequencyPolicy, ...]]
    scaling_mode: Fact[str]
    """Of intel_pstate and amd_pstate: "active", "passive", "guided", "off"."""
    turbo: Fact[bool]
    current_hz: Fact[tuple[float, ...]]
    """Of each logical CPU at this moment, from /proc/cpuinfo."""
    idle_states: Fact[tuple[IdleState, ...]]
    siblings: Fact[tuple[tuple[int, ...], ...]] = dataclasses.field(
        default_factory=lambda: cannot_tell("topology", "it was not read")
    )
    """The logical CPUs of each physical core."""


# --- Memory, storage, limits ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """RAM, all in bytes. ``limit_bytes`` is the cgroup's (absent: no limit)."""

    total_bytes: Fact[int]
    available_bytes: Fact[int]
    swap_total_bytes: Fact[int]
    swap_used_bytes: Fact[int]
    limit_bytes: Fact[int]
    limit_used_bytes: Fact[int]
    shm_total_bytes: Fact[int]
    shm_free_bytes: Fact[int]


DiskKind = Literal["nvme", "ssd", "hdd", "network", "memory", "virtual", "overlay"]


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage below ``path``.

    ``read_bytes_per_s`` was measured past the page cache, on ``path``'s own files.
    """

    path: str
    filesystem: Fact[str]
    mount_point: Fact[str]
    device: Fact[str]
    kind: Fact[DiskKind]
    total_bytes: Fact[int]
    free_bytes: Fact[int]
    read_bytes_per_s: Fact[float]
    cached_bytes_per_s: Fact[float]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of this process, that its children inherit (absent: unlimited)."""

    open_files: Fact[int]
    open_files_hard: Fact[int]
    locked_memory_bytes: Fact[int]
    processes: Fact[int]
    address_space_bytes: Fact[int] = Fact(
        "cannot_tell", None, "getrlimit(RLIMIT_AS)", "not read by this version of trainfit"
    )


# --- Surroundings -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What stands between the process and the hardware.

    ``container`` is a word such as "docker", "podman", "kubernetes"; ``virtual_machine``
    the hypervisor's; ``wsl`` 1 or 2; ``scheduler`` such as "slurm", with what it granted.
    """

    operating_system: Fact[str]
    kernel: Fact[str]
    container: Fact[str]
    virtual_machine: Fact[str]
    wsl: Fact[int]
    scheduler: Fact[str]
    scheduler_grant: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ThreadSettings:
    """Thread settings of the libraries, as the environment has them (absent: not set)."""

    variables: Mapping[str, str]
    """Of OMP, MKL, OpenBLAS, NumExpr, OpenCV and others: those that are set."""
    opencv_default: Fact[int]
    torch_default: Fact[int]


# --- GPUs -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU. ``name`` is empty where it cannot be seen from here."""

    pid: int
    name: str
    used_bytes: int | None
    graphics: bool = False
    own: bool = False
    """Is it this process or one of its children?"""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it at this moment.

    Utilisations are shares of time from 0 to 1: ``utilisation`` of time in which a kernel
    ran, ``memory_utilisation`` of time in which memory was read or written.
    """

    index: int
    name: Fact[str]
    uuid: Fact[str]
    capability: Fact[tuple[int, int]]
    memory_bytes: Fact[int]
    used_bytes: Fact[int]
    reserved_bytes: Fact[int]
    utilisation: Fact[float]
    memory_utilisation: Fact[float]
    pci_address: Fact[str]
    pcie_generation: Fact[int]
    pcie_generation_max: Fact[int]
    pcie_width: Fact[int]
    pcie_width_max: Fact[int]
    numa_node: Fact[int]
    sm_hz: Fact[float]
    sm_max_hz: Fact[float]
    memory_hz: Fact[float]
    memory_max_hz: Fact[float]
    application_sm_hz: Fact[float]
    performance_state: Fact[int]
    clock_reasons: Fact[tuple[str, ...]]
    """NVML's names without prefix: "gpu_idle", "sw_power_cap", "hw_thermal_slowdown" …"""
    temperature_c: Fact[float]
    slowdown_c: Fact[float]
    power_w: Fact[float]
    power_limit_w: Fact[float]
    power_limit_default_w: Fact[float]
    persistence: Fact[bool]
    compute_mode: Fact[str]
    ecc: Fact[bool]
    ecc_errors: Fact[int]
    """Uncorrected errors since the driver was loaded."""
    mig: Fact[bool]
    mig_instances: Fact[tuple[str, ...]]
    """UUIDs of the MIG devices."""
    processes: Fact[tuple[GpuProcess, ...]]


@dataclasses.dataclass(frozen=True)
class PciDevice:
    """An NVIDIA device on the PCI bus; ``kernel_driver`` is who drives it (or ``None``)."""

    address: str
    device_id: str
    device_class: str
    kernel_driver: str | None
    numa_node: int | None = None
    link_generation: int | None = None
    link_generation_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclasses.dataclass(frozen=True)
class DeviceNode:
    """A file of a driver below /dev, and whether this user may open it."""

    path: str
    accessible: bool


@dataclasses.dataclass(frozen=True)
class CudaDriver:
    """What libcuda answers in a fresh process: ``cuInit``'s code and what follows it.

    ``code`` is the CUresult (0 success); ``version`` the CUDA version that the driver
    supports, as (major, minor).
    """

    library: str
    code: int
    error: str
    version: tuple[int, int] | None
    devices: int | None


@dataclasses.dataclass(frozen=True)
class TorchBuild:
    """The installed PyTorch, as its files say without importing it (``None``: not built in)."""

    version: str
    cuda: tuple[int, int] | None
    hip: str | None
    location: str


@dataclasses.dataclass(frozen=True)
class TorchProbe:
    """What a fresh Python with PyTorch answers.

    ``error`` is what ``torch.cuda.init()`` raised; ``kernel_error`` what the first real kernel
    raised ("" when it ran; ``None`` when there was no device to try).
    """

    available: bool
    devices: int
    error: str
    architectures: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    kernel_error: str | None
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CudaStack:
    """What lies between PyTorch and the GPUs, from the bus upwards.

    ``library_versions`` are those in the file names of libcuda and libnvidia-ml.
    ``nvml`` is the driver's version as NVML says it; its reason is NVML's error.
    ``nvidia_smi`` is the first line that `nvidia-smi -L` prints; its reason is the failure.
    ``bad_fork`` is known only to a process that asks about itself.
    """

    pci_devices: Fact[tuple[PciDevice, ...]]
    kernel_driver: Fact[str]
    kernel_modules: Fact[tuple[str, ...]]
    device_nodes: Fact[tuple[DeviceNode, ...]]
    library_versions: Mapping[str, str]
    library_places: Mapping[str, str]
    nvml: Fact[str]
    nvml_cuda: Fact[tuple[int, int]]
    nvidia_smi: Fact[str]
    cuda: Fact[CudaDriver]
    fabric_manager: Fact[str]
    """"running", "stopped", …; absent where the GPUs need none."""
    visible_devices: Fact[str]
    """CUDA_VISIBLE_DEVICES (absent: not set)."""
    torch: Fact[TorchBuild]
    torch_probe: Fact[TorchProbe]
    torchvision: Fact[TorchBuild]
    bad_fork: Fact[bool]


@dataclasses.dataclass(frozen=True)
class Machine:
    """All facts of one machine at one moment."""

    cpu: Cpu
    memory: Memory
    storage: Storage
    limits: Limits
    surroundings: Surroundings
    threads: ThreadSettings
    cuda: CudaStack
    gpus: Fact[tuple[Gpu, ...]]
    python: str
