"""The GPU of this machine, by the driver's management library (NVML)."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainfit.hardware.gpu import GpuSpec, find_gpu, variants
from trainfit.hardware.gpu_table import MIB

# Two variants of a card differ by at least a third of their memory; a catalogue figure differs
# from a measured one by some per cent (driver, system, ECC).
_SAME_CARD = 0.1


def local_gpu(root: Path = Path("/"), nvml: Any = None) -> GpuSpec | None:
    """The machine's first GPU with its measured memory; None without a GPU or without NVML.

    Args:
        root: where /proc is looked for (tests give a folder of their own).
        nvml: stands in for the module `pynvml`.

    Raises:
        GpuNameError: there is a GPU, but neither its name nor its capability is known.
    """
    nvml = nvml if nvml is not None else _load_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return _first_gpu(nvml, root)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _load_nvml() -> Any:
    if importlib.util.find_spec("pynvml") is None:
        return None
    return importlib.import_module("pynvml")


def _first_gpu(nvml: Any, root: Path) -> GpuSpec | None:
    if nvml.nvmlDeviceGetCount() == 0:
        return None
    device = nvml.nvmlDeviceGetHandleByIndex(0)
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
    found = re.search(r"^MemTotal:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        return None
    return _Memory(int(found[1]) * 1024, "MemTotal of /proc/meminfo (shared with the CPU)")


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
