"""The GPU of this machine, by the driver's management library (NVML), as far as it is visible."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainfit.hardware.gpu_lookup import find_gpu, variants
from trainfit.results.gpus import GpuSpec
from trainfit.results.machine import Gpu, Machine
from trainfit.results.text import MIB

T = TypeVar("T")

# Two variants of a card differ by at least a third of their memory; a catalogue figure differs
# from a measured one by some per cent (driver, system, ECC).
_SAME_CARD = 0.1


@dataclass(frozen=True)
class Usage:
    """The machine's first GPU at this moment, by NVML.

    ``used_bytes`` is what processes hold of it, without the driver's own reserve where the
    driver tells the two apart.
    """

    driver: str | None
    used_bytes: int | None


def local_usage(nvml: Any = None) -> Usage | None:
    """The driver, and what is held of the first GPU now; None without a GPU or without NVML.

    ``nvml`` stands in for the module `pynvml`.
    """
    return _asked(nvml, _first_usage)


def _first_usage(nvml: Any) -> Usage | None:
    if nvml.nvmlDeviceGetCount() == 0:
        return None
    device = nvml.nvmlDeviceGetHandleByIndex(_nvml_index(os.environ))
    driver = _driver(nvml)
    return Usage(driver, _used(nvml, device, driver))


def process_bytes(pid: int, nvml: Any = None) -> int | None:
    """What NVML says that process ``pid`` holds of the first GPU; None where it does not.

    Containers have process numbers of their own, under which NVML knows nothing.
    """

    def held(nvml: Any) -> int | None:
        device = nvml.nvmlDeviceGetHandleByIndex(_nvml_index(os.environ))
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None

    return _asked(nvml, held)


def _asked(nvml: Any, ask: Callable[[Any], T | None]) -> T | None:
    """What ``ask`` makes of NVML while it is open; None without it, or where it refuses.

    ``nvml`` stands in for the module `pynvml`, if it is given.
    """
    nvml = nvml if nvml is not None else _load_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return ask(nvml)
    # pynvml says by an error that is no NVMLError that a driver (before 510) is too old.
    except (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)):
        return None
    finally:
        nvml.nvmlShutdown()


def _nvml_index(environment: Mapping[str, str]) -> int:
    """NVML's number of the GPU that PyTorch calls cuda:0: NVML ignores CUDA_VISIBLE_DEVICES.

    Names by UUID are left to mean the first. CUDA orders by speed unless it is told to
    follow the bus, as NVML does: with several unlike GPUs that are not chosen, they differ.
    """
    first = environment.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _driver(nvml: Any) -> str | None:
    try:
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


#: From this driver on the first version of NVML's query counts the driver's own reserve (some
#: hundred MiB) as used, and only the second tells the two apart.
_RESERVE_IS_USED = 510


def _used(nvml: Any, device: Any, driver: str | None) -> int | None:
    if hasattr(nvml, "nvmlMemory_v2"):
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used)
        except nvml.NVMLError:
            pass  # an older driver: ask as it was asked before
    branch = (driver or "").partition(".")[0]
    if not branch.isdigit() or int(branch) >= _RESERVE_IS_USED:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(device).used)
    except nvml.NVMLError:
        return None


def local_gpu(root: Path = Path("/"), nvml: Any = None) -> GpuSpec | None:
    """The machine's first GPU with its measured memory; None without a GPU or without NVML.

    Args:
        root: where /proc is looked for (tests give a folder of their own).
        nvml: stands in for the module `pynvml`.

    Raises:
        GpuNameError: there is a GPU, but neither its name nor its capability is known.
    """
    return _asked(nvml, lambda opened: _first_gpu(opened, root))


def _load_nvml() -> Any:
    if importlib.util.find_spec("pynvml") is None:
        return None
    return importlib.import_module("pynvml")


def _first_gpu(nvml: Any, root: Path) -> GpuSpec | None:
    if nvml.nvmlDeviceGetCount() == 0:
        return None
    device = nvml.nvmlDeviceGetHandleByIndex(_nvml_index(os.environ))
    name = nvml.nvmlDeviceGetName(device)
    name = name.decode() if isinstance(name, bytes) else name
    memory = _measured_memory(nvml, device, root)
    if memory is None:
        return None
    spec = _nearest_variant(name, memory.total) or _unlisted_gpu(nvml, device, name, memory.total)
    return replace(
        spec,
        name=name,
        memory_bytes=memory.total,
        memory_is_assumed=memory.with_reserve,
        sources={**spec.sources, "name": "NVML of this machine", "memory_bytes": memory.source},
    )


@dataclass(frozen=True)
class _Memory:
    """A measured total in bytes; `with_reserve` where it counts the driver's own share too."""

    total: int
    source: str
    with_reserve: bool = False


def _measured_memory(nvml: Any, device: Any, root: Path) -> _Memory | None:
    """What a process can use, as near as this machine's NVML can say.

    The driver's own reserve is part of NVML's total and not of cudaMemGetInfo's, which is the
    one that counts; only the second version of NVML's query, of newer drivers, knows it.
    """
    if hasattr(nvml, "nvmlMemory_v2"):
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
            return _Memory(int(info.total - info.reserved), "NVML: total less the driver's reserve")
        except nvml.NVMLError:
            pass  # an older driver: ask as it was asked before
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(device)
    except nvml.NVMLError:
        return _shared_memory(root)
    source = "NVML: total, too high by the driver's reserve (some hundred MiB)"
    return _Memory(int(info.total), source, with_reserve=True)


def _shared_memory(root: Path) -> _Memory | None:
    """A Jetson's, whose NVML knows no memory of its own: all that Linux manages."""
    if not (root / "proc/device-tree/model").exists():
        return None
    match = re.search(r"^MemTotal:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if match is None:
        return None
    return _Memory(int(match[1]) * 1024, "MemTotal of /proc/meminfo (shared with the CPU)")


def _nearest_variant(name: str, total: int) -> GpuSpec | None:
    """The variant of a card called `name` whose memory is nearest to the measured one."""

    def distance(spec: GpuSpec) -> float:
        return abs(spec.memory_bytes - total) / total

    named = variants(name)
    # The first of the close ones, as curated cards come first and are the better known.
    close = [spec for spec in named if distance(spec) < _SAME_CARD]
    return close[0] if close else min(named, key=distance, default=None)


def _unlisted_gpu(nvml: Any, device: Any, name: str, total: int) -> GpuSpec:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    spec = find_gpu(f"custom:{max(1, total // MIB)}MiB:{major}.{minor}")
    return replace(spec, key=name, sources={**spec.sources, "key": "NVML of this machine"})


# ---
# The GPUs that CUDA_VISIBLE_DEVICES exposes, by CUDA's rules.
#
# CUDA reads a list of indices, or of UUIDs (of which a beginning is enough), and takes those
# before the first that it does not know: docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA
# Environment Variables".


def visible(value: str, count: int, uuids: Sequence[str]) -> tuple[list[str], str | None]:
    """The entries of ``value`` that CUDA takes, and the first that it does not (or ``None``).

    Args:
        value: CUDA_VISIBLE_DEVICES.
        count: GPUs that the machine has.
        uuids: of GPUs and of MIG devices, as far as known.
    """
    taken: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not _exists(entry, count, uuids):
            return taken, entry
        if entry in taken:  # CUDA and PyTorch take none at all of a list with a repetition
            return [], entry
        taken.append(entry)
    return taken, None


def gpus_of_job(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs of a job that starts here: those that are seen and that a mask leaves to it.

    The others are none of its business: a scheduler has given them to others.
    """
    return left(machine.cuda.visible_devices.value, machine.gpus.value or ())


def left(value: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a mask leaves to the job; all of them where unknown.

    Indices count the fastest GPU first (CUDA_DEVICE_ORDER), so that they name one only among
    GPUs of one model; under MIG they count instances.
    """
    everyone = tuple(gpus)
    uuids = [uuid for gpu in gpus for uuid in _uuids(gpu)]
    taken, _ = visible(value, len(gpus), uuids) if value is not None else ([], None)
    alike = len({gpu.name.value for gpu in gpus}) == 1 and all(gpu.name.is_known for gpu in gpus)
    chosen = set()
    for entry in taken:
        if entry.isdigit():
            if not alike or any(gpu.mig.value for gpu in gpus):
                return everyone
            chosen.add(int(entry))
        else:
            wanted = _plain(entry)
            found = [n for n, gpu in enumerate(gpus) if any(map(_begins(wanted), _uuids(gpu)))]
            if not found:
                return everyone
            chosen.update(found)
    return tuple(gpu for n, gpu in enumerate(gpus) if n in chosen) or everyone


def _uuids(gpu: Gpu) -> tuple[str, ...]:
    own = (gpu.uuid.value,) if gpu.uuid.value is not None else ()
    return own + (gpu.mig_instances.value or ())


def _begins(beginning: str) -> Callable[[str], bool]:
    return lambda uuid: uuid.startswith(beginning)


def _plain(entry: str) -> str:
    """A UUID that NVML knows: drivers before 470 wrote MIG-GPU-UUID/instance/instance."""
    if entry.startswith("MIG-GPU-"):
        return entry.partition("/")[0].removeprefix("MIG-")
    return entry


def _exists(entry: str, count: int, uuids: Sequence[str]) -> bool:
    if entry.isascii() and entry.isdigit():
        return int(entry) < count
    # Without any UUID known, one that looks right is believed.
    entry = _plain(entry)
    looks_right = entry.startswith(("GPU-", "MIG-"))
    known = [uuid for uuid in uuids if uuid.startswith(entry[:4])]
    return looks_right and (not known or any(uuid.startswith(entry) for uuid in known))
