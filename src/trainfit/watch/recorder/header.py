"""What the header of a run says of this process: looked up once, away from the training."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

import torch

from trainfit.hardware.machine import cgroup
from trainfit.hardware.machine.system import System
from trainfit.results.runs.watched import WatchedGpu
from trainfit.results.text import dtype_name
from trainfit.scripts.library_threads import pools
from trainfit.version import __version__
from trainfit.watch.recorder.rank_variables import world

#: Variables of the environment that a header keeps: by name, or by what it begins with.
_VARIABLES: Final = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TOKENIZERS_PARALLELISM"),
        *(
            "MALLOC_ARENA_MAX",
            "LD_PRELOAD",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "NVIDIA_TF32_OVERRIDE",
        ),
    )
)
_BEGINNINGS: Final = (
    *("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_", "GOMP_", "NCCL_", "TORCH_NCCL_", "BLIS_"),
)
_LONGEST: Final = 200


def of_process() -> dict[str, Any]:
    """Versions, machine and environment; nothing here is slow or can block."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "trainfit": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu": _cpu(),
        "usable_cores": float(len(os.sched_getaffinity(0))),
        "quota_cores": cgroup.cpu_quota(System()).value,
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "variables": variables(os.environ),
    }


def _cpu() -> str:
    """The model name of the first processor only: the kernel asks each of them for what it
    writes."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(2048)
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", first, re.MULTILINE)
    return "" if match is None else match[1].strip()


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that set threads, the allocator or GPUs."""
    return {
        name: value[:_LONGEST]
        for name, value in sorted(environment.items())
        if name in _VARIABLES or name.startswith(_BEGINNINGS)
    }


def threads() -> dict[str, int]:
    """Threads of this process by library, one included for PyTorch."""
    return {"torch": torch.get_num_threads(), **pools()}


def of_gpus() -> dict[str, Any]:
    """The GPUs that PyTorch sees; only once the script has initialised CUDA."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        gpus.append(
            WatchedGpu(
                properties.name,
                uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}",
                int(properties.total_memory),
                (properties.major, properties.minor),
            )
        )
    return {"gpus": tuple(gpus), "gpu": torch.cuda.current_device()}


def of_model(module: torch.nn.Module) -> dict[str, Any]:
    """Facts of the module that is trained: parameters, precision, and how it is spread over
    GPUs."""
    parameters = list(module.parameters())
    elements: dict[torch.dtype, int] = {}
    for parameter in parameters:
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    most = max(elements, key=lambda dtype: elements[dtype], default=None)
    return {
        "parameters": sum(elements.values()),
        "trained_parameters": sum(each.numel() for each in parameters if each.requires_grad),
        "precision": _precision(most, parameters),
        "default_dtype": dtype_name(torch.get_default_dtype()),
        "distributed": _distributed(module),
    }


def _precision(dtype: torch.dtype | None, parameters: list[Any]) -> str:
    if dtype in (torch.float64, torch.float16, torch.bfloat16):
        return dtype_name(dtype)
    if dtype is not torch.float32:
        return "unknown"
    on_gpu = bool(parameters) and parameters[0].is_cuda
    return "tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "float32"


def _distributed(module: torch.nn.Module) -> str:
    names = {kind.__name__ for kind in type(module).__mro__}
    if "DistributedDataParallel" in names:
        return "ddp"
    if "FullyShardedDataParallel" in names or "FSDPModule" in names:
        return "fsdp"
    if "DataParallel" in names:
        return "data_parallel"
    return "other" if world()[1] > 1 else ""
