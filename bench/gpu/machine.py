"""What the measuring machine is, and how much of its GPU's memory is used. Sizes in bytes.

Nothing here raises: what cannot be asked is ``None``.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

LIBRARIES = ("torchvision", "timm", "transformers", "lerobot", "numpy", "triton")

#: Variables that change what is measured.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_V8_API_DEBUG", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)  # fmt: skip


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns, or ``None`` where it cannot."""
    try:
        return function(*args)
    except Exception:
        return None


def describe(simulated: bool) -> dict[str, Any]:
    """The machine as a truth file says it; makes the CUDA context if there is none."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": str(properties.name),
        "capability": [int(properties.major), int(properties.minor)],
        "memory_bytes": int(properties.total_memory),
        "sm_count": int(properties.multi_processor_count),
        "driver": None if simulated else ManagementLibrary.shared().driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": attempt(torch.backends.cudnn.version),
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    return attempt(metadata.version, package)


class ManagementLibrary:
    """The driver's management library, through pynvml or the command nvidia-smi."""

    _shared: ManagementLibrary | None = None

    def __init__(self) -> None:
        self._nvml = attempt(importlib.import_module, "pynvml")
        self._device: Any = None
        if self._nvml is not None:
            self._device = attempt(self._open)

    @classmethod
    def shared(cls) -> ManagementLibrary:
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def _open(self) -> Any:
        self._nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible.startswith("GPU-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(visible)
        return self._nvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)

    def driver(self) -> str | None:
        """The driver's version, such as "580.159.04"."""
        if self._device is not None:
            found = attempt(self._nvml.nvmlSystemGetDriverVersion)
            if found is not None:
                return found.decode() if isinstance(found, bytes) else str(found)
        lines = _nvidia_smi("--query-gpu=driver_version")
        return lines[0] if lines else None

    def device_used(self) -> int | None:
        """What all processes use of the GPU; needs no CUDA context."""
        if self._device is not None:
            info = attempt(self._nvml.nvmlDeviceGetMemoryInfo, self._device)
            return None if info is None else int(info.used)
        lines = _nvidia_smi("--query-gpu=memory.used")
        return int(lines[0]) << 20 if lines and lines[0].isdigit() else None

    def process_used(self) -> int | None:
        """What this process uses, as nvidia-smi shows it.

        In a container the driver may know it by another number: then it is the only one.
        """
        found = self._processes()
        if os.getpid() in found:
            return found[os.getpid()]
        return next(iter(found.values())) if len(found) == 1 else None

    def _processes(self) -> dict[int, int]:
        if self._device is not None:
            running = attempt(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._device)
            return {
                int(each.pid): int(each.usedGpuMemory)
                for each in running or ()
                if each.usedGpuMemory is not None
            }
        processes = {}
        for line in _nvidia_smi("--query-compute-apps=pid,used_memory") or ():
            pid, _, used = line.partition(",")
            if pid.strip().isdigit() and used.strip().isdigit():
                processes[int(pid)] = int(used) << 20
        return processes


def _nvidia_smi(query: str) -> list[str] | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = attempt(_run, command)
    return None if done is None else [line.strip() for line in done.splitlines() if line.strip()]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


class MemoryStages:
    """The GPU's memory at named stages of a process."""

    def __init__(self, simulated: bool) -> None:
        self._nvml = None if simulated else ManagementLibrary.shared()
        self.stages: list[dict[str, Any]] = []

    def note(self, stage: str, context: bool = True) -> None:
        """Remember the current state; ``context`` says whether there is a CUDA context."""
        free, total = torch.cuda.mem_get_info() if context else (None, None)
        nvml = self._nvml
        self.stages.append(
            {
                "stage": stage,
                "free_bytes": free,
                "total_bytes": total,
                "device_used_bytes": None if nvml is None else attempt(nvml.device_used),
                "process_used_bytes": None if nvml is None else attempt(nvml.process_used),
                "allocated_bytes": torch.cuda.memory_allocated() if context else 0,
                "reserved_bytes": torch.cuda.memory_reserved() if context else 0,
            }
        )
