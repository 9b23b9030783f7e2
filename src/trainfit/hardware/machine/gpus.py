"""The machine's GPUs: by NVML, and by /proc and the PCI bus where NVML is blind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from trainfit.hardware.machine import parsing
from trainfit.hardware.machine.nvml import (
    FOLDER,
    ask_nvml,
    blindness,
    informed,
    place,
    read_pci,
    reason_of,
    refused,
    value_of,
)
from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact, Gpu, GpuProcess, PciDevice, absent, cannot_tell, known

_MEGA: Final = 1e6
_MOST_GENERATION, _WIDEST_LINK = 8, 32
_LAST_STATE = 15  # NVML_PSTATE_UNKNOWN is 32
#: PID_MAX_LIMIT of linux/threads.h.
_MOST_PID = 1 << 22
#: nvmlClocksEventReason* of nvml.h, bit 0 first.
_CLOCK_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
    "board_limit",
    "reliability",
)
#: nvmlComputeMode_t of nvml.h.
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")

#: Device files of GPUs that are on no PCI bus that is seen: WSL's, a Jetson's, a sandbox's.
_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvmap")


def read_gpus(system: System) -> Fact[tuple[Gpu, ...]]:
    """Every GPU of NVIDIA, each value with its source.

    Where NVML is blind, those that the driver's files or the PCI bus name, with what these
    know; absent where there is no trace of a GPU.
    """
    answer = ask_nvml(system)
    reason = blindness(answer)
    if reason or answer.value is None:
        return _without_nvml(system, reason)
    entries = [
        entry if isinstance(entry, dict) else {"error": "NVML's answer is not an object"}
        for entry in answer.value["gpus"]
    ]
    processes = _Processes(system, entries)
    gpus = [_gpu(system, number, entry, processes) for number, entry in enumerate(entries)]
    return known(tuple(_named_lost(system, gpus)), "NVML")


# --- By NVML --------------------------------------------------------------------------------------


def _gpu(system: System, index: int, entry: Mapping[str, Any], processes: _Processes) -> Gpu:
    number = parsing.whole(entry.get("index"))
    index = index if number is None else number
    error = parsing.error_of(entry)
    if error is not None:
        return _unknown(index, f"NVML nvmlDeviceGetHandleByIndex({index})", reason_of(error))
    facts = {
        field: value_of(entry, key, call, read) for field, (key, call, read) in _VALUES.items()
    }
    facts["numa_node"] = _numa_node(system, facts["pci_address"], facts["numa_node"])
    facts["processes"] = processes.of(entry)
    return Gpu(index=index, **facts)


def _unknown(index: int, source: str, reason: str) -> Gpu:
    fields = [field.name for field in dataclasses.fields(Gpu) if field.name != "index"]
    facts: dict[str, Any] = {field: cannot_tell(source, reason) for field in fields}
    return Gpu(index=index, **facts)


def _hertz(value: Any) -> float | None:
    found = parsing.number(value)
    return found * _MEGA if found is not None else None


def _watt(value: Any) -> float | None:
    found = parsing.number(value)
    return found / 1e3 if found is not None else None


def _share(value: Any) -> float | None:
    found = parsing.number(value)
    return found / 100 if found is not None and found <= 100 else None


def _up_to(limit: int, least: int = 0) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        found = parsing.whole(value)
        return found if found is not None and least <= found <= limit else None

    return read


def _clock_reasons(mask: Any) -> tuple[str, ...] | None:
    bits = parsing.whole(mask)
    if bits is None:
        return None
    places = [bit for bit in range(bits.bit_length()) if bits >> bit & 1]
    named = len(_CLOCK_REASONS)
    return tuple(_CLOCK_REASONS[bit] if bit < named else f"bit_{bit}" for bit in places)


def _compute_mode(value: Any) -> str | None:
    found = _up_to(len(_COMPUTE_MODES) - 1)(value)
    return _COMPUTE_MODES[found] if found is not None else None


def _positive(value: Any) -> int | None:
    return parsing.whole(value) or None


def _uuids(value: Any) -> tuple[str, ...] | None:
    return parsing.each(value, parsing.word)


_Read = tuple[str, str, Callable[[Any], Any]]
_generation, _width = _up_to(_MOST_GENERATION, 1), _up_to(_WIDEST_LINK, 1)

#: Of each field of `Gpu`: the probe's key, NVML's call, and how the value is read.
_VALUES: Final[Mapping[str, _Read]] = {
    "name": ("name", "nvmlDeviceGetName", parsing.word),
    "uuid": ("uuid", "nvmlDeviceGetUUID", parsing.word),
    "capability": ("capability", "nvmlDeviceGetCudaComputeCapability", parsing.pair),
    "memory_bytes": ("memory_total", "nvmlDeviceGetMemoryInfo", _positive),
    "used_bytes": ("memory_used", "nvmlDeviceGetMemoryInfo", parsing.whole),
    "reserved_bytes": ("memory_reserved", "nvmlDeviceGetMemoryInfo_v2", parsing.whole),
    "utilisation": ("utilisation_gpu", "nvmlDeviceGetUtilizationRates", _share),
    "memory_utilisation": ("utilisation_memory", "nvmlDeviceGetUtilizationRates", _share),
    "pci_address": ("pci_address", "nvmlDeviceGetPciInfo", parsing.word),
    "pcie_generation": ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", _generation),
    "pcie_generation_max": (
        "pcie_generation_max",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        _generation,
    ),
    "pcie_width": ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", _width),
    "pcie_width_max": ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", _width),
    "numa_node": ("numa_node", "nvmlDeviceGetMemoryAffinity", parsing.whole),
    "sm_hz": ("sm_mhz", "nvmlDeviceGetClockInfo(SM)", _hertz),
    "sm_max_hz": ("sm_max_mhz", "nvmlDeviceGetMaxClockInfo(SM)", _hertz),
    "memory_hz": ("memory_mhz", "nvmlDeviceGetClockInfo(MEM)", _hertz),
    "memory_max_hz": ("memory_max_mhz", "nvmlDeviceGetMaxClockInfo(MEM)", _hertz),
    "application_sm_hz": (
        "application_sm_mhz",
        "nvmlDeviceGetApplicationsClock(GRAPHICS)",
        _hertz,
    ),
    "performance_state": (
        "performance_state",
        "nvmlDeviceGetPerformanceState",
        _up_to(_LAST_STATE),
    ),
    "clock_reasons": ("clock_reasons", "nvmlDeviceGetCurrentClocksEventReasons", _clock_reasons),
    "temperature_c": ("temperature_c", "nvmlDeviceGetTemperature", parsing.number),
    "slowdown_c": ("slowdown_c", "nvmlDeviceGetTemperatureThreshold(SLOWDOWN)", parsing.number),
    "power_w": ("power_mw", "nvmlDeviceGetPowerUsage", _watt),
    "power_limit_w": ("power_limit_mw", "nvmlDeviceGetEnforcedPowerLimit", _watt),
    "power_limit_default_w": (
        "power_limit_default_mw",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        _watt,
    ),
    "persistence": ("persistence", "nvmlDeviceGetPersistenceMode", parsing.flag),
    "compute_mode": ("compute_mode", "nvmlDeviceGetComputeMode", _compute_mode),
    "ecc": ("ecc", "nvmlDeviceGetEccMode", parsing.flag),
    "ecc_errors": ("ecc_errors", "nvmlDeviceGetTotalEccErrors(volatile)", parsing.whole),
    "mig": ("mig", "nvmlDeviceGetMigMode", parsing.flag),
    "mig_instances": ("mig_instances", "nvmlDeviceGetMigDeviceHandleByIndex", _uuids),
}


class _Processes:
    """Who uses the GPUs. A container sees numbers of its own, and no names of others'."""

    def __init__(self, system: System, entries: Iterable[Mapping[str, Any]]) -> None:
        listed = [process for entry in entries for process in self._listed(entry)]
        self._names = system.process_names(sorted({process.pid for process in listed}))
        self._own = system.own_pids() if listed else frozenset()

    def of(self, entry: Mapping[str, Any]) -> Fact[tuple[GpuProcess, ...]]:
        source = "NVML nvmlDeviceGetComputeRunningProcesses"
        error = parsing.error_of(entry.get("processes"))
        if error is not None:
            return refused(source, error)
        if not isinstance(entry.get("processes"), list):
            return cannot_tell(source, "NVML gave no answer")
        found: dict[int, GpuProcess] = {}
        for process in self._listed(entry):
            # Who computes and draws is listed twice, with all that it holds each time.
            if process.pid not in found or not process.graphics:
                found[process.pid] = process
        return known(tuple(map(self._named, found.values())), source)

    def _named(self, process: GpuProcess) -> GpuProcess:
        name = parsing.text(self._names.get(process.pid)) or ""
        return dataclasses.replace(process, name=name, own=process.pid in self._own)

    @staticmethod
    def _listed(entry: Mapping[str, Any]) -> tuple[GpuProcess, ...]:
        return parsing.each(entry.get("processes"), _process) or ()


def _process(value: Any) -> GpuProcess | None:
    pid = _up_to(_MOST_PID, 1)(value.get("pid")) if isinstance(value, dict) else None
    if pid is None:
        return None
    used, graphics = parsing.whole(value.get("used")), parsing.flag(value.get("graphics"))
    return GpuProcess(pid, "", used, graphics=bool(graphics))


def _numa_node(system: System, address: Fact[str], by_nvml: Fact[int]) -> Fact[int]:
    """The node whose memory and cores are nearest: the bus's, else NVML's."""
    found = place(address.value) if address.value is not None else None
    if found is None:
        return by_nvml
    node = system.number(f"{FOLDER}/{found}/numa_node")
    if node.value is None:
        return by_nvml
    if node.value < 0:
        return absent(node.source, "the firmware reports no NUMA node")
    return node


# --- Where NVML is blind --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _ListedGpu:
    """A GPU that files name."""

    address: str
    name: str | None = None
    uuid: str | None = None
    device: PciDevice | None = None


def _seen(system: System) -> tuple[_ListedGpu, ...]:
    """GPUs in the order of their addresses, as NVML numbers them."""
    buses = {device.address: device for device in read_pci(system).value or ()}
    seen = {address: _ListedGpu(address, device=device) for address, device in buses.items()}
    for address, name, uuid in informed(system):
        at = place(address) or address
        seen[at] = _ListedGpu(at, name, uuid, buses.get(at))
    return tuple(seen[address] for address in sorted(seen))


def _without_nvml(system: System, reason: str) -> Fact[tuple[Gpu, ...]]:
    seen = _seen(system)
    if seen:
        gpus = [_by_files(index, gpu, reason) for index, gpu in enumerate(seen)]
        return known(tuple(gpus), f"{FOLDER} and /proc/driver/nvidia/gpus")
    if node := next(filter(system.exists, _NODES), None):
        return cannot_tell(node, f"it exists, but its GPU cannot be queried: {reason}")
    buses = read_pci(system)
    if buses.state == "cannot_tell":
        return cannot_tell(FOLDER, f"{buses.reason}; NVML: {reason}")
    return absent(FOLDER, "no NVIDIA GPU is on the PCI bus, and no driver file exists")


def _by_files(index: int, listed: _ListedGpu, reason: str) -> Gpu:
    folder = f"{FOLDER}/{listed.address}"
    information = f"/proc/driver/nvidia/gpus/{listed.address}/information"
    device = listed.device
    values: list[tuple[str, Any, str]] = [
        ("name", listed.name, information),
        ("uuid", listed.uuid, information),
        ("pci_address", listed.address, folder),
    ]
    if device is not None:
        values += [
            ("pcie_generation", device.link_generation, f"{folder}/current_link_speed"),
            ("pcie_generation_max", device.link_generation_max, f"{folder}/max_link_speed"),
            ("pcie_width", device.link_width, f"{folder}/current_link_width"),
            ("pcie_width_max", device.link_width_max, f"{folder}/max_link_width"),
            ("numa_node", device.numa_node, f"{folder}/numa_node"),
        ]
    facts: dict[str, Any] = {
        field: known(value, source) for field, value, source in values if value is not None
    }
    return dataclasses.replace(_unknown(index, "NVML", reason), **facts)


def _named_lost(system: System, gpus: Sequence[Gpu]) -> Iterable[Gpu]:
    """GPUs whose handle cannot be had, with the files' name and address of those left over."""
    lost = [gpu for gpu in gpus if not (gpu.pci_address.is_known or gpu.name.is_known)]
    if not lost:
        return gpus
    others = {place(gpu.pci_address.value or "") for gpu in gpus} - {None}
    left = [gpu for gpu in _seen(system) if gpu.address not in others]
    if len(left) != len(lost):  # which is which is unknown
        return gpus
    # Both are in the order of the bus.
    of = dict(zip((gpu.index for gpu in lost), left, strict=True))
    return [
        _by_files(gpu.index, of[gpu.index], gpu.name.reason) if gpu.index in of else gpu
        for gpu in gpus
    ]
