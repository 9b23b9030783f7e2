"""Asks NVML about the driver and every GPU; a script run by path in a fresh interpreter.

It imports nothing of trainfit, never fails, and prints one JSON object as its last line:
``{"driver": "550.54.14", "cuda": 12040, "gpus": [GPU, …]}``, or, where NVML cannot be used,
``{"error": "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "code": 18, "where": "nvmlInit"}`` (library
missing: NVML_ERROR_LIBRARY_NOT_FOUND, 12; package missing: "pynvml is not installed", code
null, where "import"). An error after ``nvmlInit`` leaves "driver" and "cuda" next to it.

A GPU is flat. Each value is NVML's own, or ``{"error": "NVML_ERROR_NOT_SUPPORTED"}``:
    index, name, uuid, capability [8, 9]
    memory_total, memory_used, memory_reserved (bytes; the driver's own reserve is distinguished
        from what is used by drivers from 510 on)
    utilisation_gpu, utilisation_memory (percent of the last sampling period)
    pci_address "00000000:01:00.0", pcie_generation, pcie_generation_max, pcie_width,
    pcie_width_max, numa_node (the nearest of the host's)
    sm_mhz, sm_max_mhz, memory_mhz, memory_max_mhz, application_sm_mhz
    performance_state (0 to 15), clock_reasons (bit mask)
    temperature_c, slowdown_c, power_mw, power_limit_mw, power_limit_default_mw
    persistence (0 or 1), compute_mode (0 to 3)
    ecc (0 or 1, currently), ecc_errors (volatile, uncorrected), mig (0 or 1, currently),
    mig_instances [uuid, …]
    processes [{"pid": 1234, "used": bytes or null, "graphics": false}]
A GPU whose handle cannot be had is ``{"index": 3, "error": "NVML_ERROR_GPU_IS_LOST"}``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

# nvml.h, for modules of Python that lack a name.
_CLOCK_GRAPHICS, _CLOCK_SM, _CLOCK_MEMORY = 0, 1, 2
_TEMPERATURE_OF_GPU, _THRESHOLD_SLOWDOWN = 0, 1
_UNCORRECTED, _VOLATILE = 1, 0
_SCOPE_OF_NODE, _NODE_WORDS, _WORD_BITS = 0, 16, 64
_NEWER_THAN_DRIVER = "NVMLLibraryMismatchError"
_NOT_AVAILABLE = (1 << 64) - 1


class Nvml:
    """The module `pynvml`, whose calls here give values or errors and never raise."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._names: dict[int, str] = {
            code: name
            for name, code in vars(module).items()
            if name.startswith("NVML_ERROR_") and isinstance(code, int)
        }

    def ask(self, call: str, *words: Any, take: Callable[[Any], Any] | None = None) -> Any:
        """What ``call`` returns, or of that what ``take`` takes; ``{"error": …}`` if neither."""
        try:
            answer = getattr(self._module, call)(*words)
            return _plain(take(answer) if take is not None else answer)
        except Exception as error:
            return {"error": self.name(error)}

    def name(self, error: Exception) -> str:
        """NVML's symbol for an error."""
        code = getattr(error, "value", None)
        if isinstance(code, int):
            return self._names.get(code, f"NVML error {code}")
        # Of an older pynvml than the call, and of a newer one than the driver, which has an
        # exception of its own for the lists of processes.
        if isinstance(error, AttributeError) or type(error).__name__ == _NEWER_THAN_DRIVER:
            return "NVML_ERROR_FUNCTION_NOT_FOUND"
        return f"{type(error).__name__}: {error}"[:300]

    def number(self, name: str) -> int | None:
        """A constant of the module."""
        value: int | None = getattr(self._module, name, None)
        return value


def read(module: Any) -> dict[str, Any]:
    """All that ``module`` (`pynvml`) knows."""
    nvml = Nvml(module)
    try:
        module.nvmlInit()
    except Exception as error:
        return _failure(nvml, error, "nvmlInit")
    answer = {
        "driver": nvml.ask("nvmlSystemGetDriverVersion"),
        "cuda": nvml.ask("nvmlSystemGetCudaDriverVersion"),
    }
    try:
        count = int(module.nvmlDeviceGetCount())
    except Exception as error:
        return answer | _failure(nvml, error, "nvmlDeviceGetCount")
    return answer | {"gpus": [_gpu(nvml, module, index) for index in range(count)]}


def _failure(nvml: Nvml, error: Exception, where: str) -> dict[str, Any]:
    return {"error": nvml.name(error), "code": getattr(error, "value", None), "where": where}


def _gpu(nvml: Nvml, module: Any, index: int) -> dict[str, Any]:
    try:
        device = module.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        return {"index": index, "error": nvml.name(error)}

    def ask(call: str, *words: Any, take: Callable[[Any], Any] | None = None) -> Any:
        return nvml.ask(call, device, *words, take=take)

    use = "nvmlDeviceGetUtilizationRates"
    return {
        "index": index,
        "name": ask("nvmlDeviceGetName"),
        "uuid": ask("nvmlDeviceGetUUID"),
        "capability": ask("nvmlDeviceGetCudaComputeCapability", take=list),
        **_memory(nvml, device),
        "utilisation_gpu": ask(use, take=lambda rates: rates.gpu),
        "utilisation_memory": ask(use, take=lambda rates: rates.memory),
        "pci_address": ask("nvmlDeviceGetPciInfo", take=lambda info: info.busId),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "numa_node": ask("nvmlDeviceGetMemoryAffinity", _NODE_WORDS, _SCOPE_OF_NODE, take=_node),
        "sm_mhz": ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
        "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        "memory_mhz": ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
        "memory_max_mhz": ask("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY),
        "application_sm_mhz": ask("nvmlDeviceGetApplicationsClock", _CLOCK_GRAPHICS),
        "performance_state": ask("nvmlDeviceGetPerformanceState"),
        "clock_reasons": _clock_reasons(nvml, device),
        "temperature_c": ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
        "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN),
        "power_mw": ask("nvmlDeviceGetPowerUsage"),
        "power_limit_mw": ask("nvmlDeviceGetEnforcedPowerLimit"),
        "power_limit_default_mw": ask("nvmlDeviceGetPowerManagementDefaultLimit"),
        "persistence": ask("nvmlDeviceGetPersistenceMode"),
        "compute_mode": ask("nvmlDeviceGetComputeMode"),
        "ecc": ask("nvmlDeviceGetEccMode", take=lambda modes: modes[0]),
        "ecc_errors": ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        **_mig(nvml, device),
        "processes": _processes(nvml, device),
    }


def _memory(nvml: Nvml, device: Any) -> dict[str, Any]:
    """Memory by the query's second version where the driver has it: only that tells the reserve."""

    def taken(info: Any) -> list[int]:
        return [int(info.total), int(info.used)]

    version = nvml.number("nvmlMemory_v2")
    answer: Any = {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"}
    if version is not None:
        answer = nvml.ask(
            "nvmlDeviceGetMemoryInfo",
            device,
            version,
            take=lambda info: [*taken(info), int(info.reserved)],
        )
    if isinstance(answer, dict):
        refused = answer
        first = nvml.ask("nvmlDeviceGetMemoryInfo", device, take=taken)
        answer = [first, first, refused] if isinstance(first, dict) else [*first, refused]
    return dict(zip(("memory_total", "memory_used", "memory_reserved"), answer, strict=True))


def _node(words: Any) -> int | None:
    """The lowest node of a mask of words."""
    for place, word in enumerate(words):
        if word:
            return place * _WORD_BITS + (int(word) & -int(word)).bit_length() - 1
    return None


def _clock_reasons(nvml: Nvml, device: Any) -> Any:
    answer = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", device)
    if answer == {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"}:  # its name before driver 535
        return nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", device)
    return answer


def _mig(nvml: Nvml, device: Any) -> dict[str, Any]:
    now = nvml.ask("nvmlDeviceGetMigMode", device, take=lambda modes: modes[0])
    if now != 1:
        return {"mig": now, "mig_instances": now if isinstance(now, dict) else []}
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", device)
    if isinstance(most, dict):
        return {"mig": now, "mig_instances": most}
    uuids = []
    for index in range(most):
        uuid = nvml.ask(
            "nvmlDeviceGetMigDeviceHandleByIndex",
            device,
            index,
            take=lambda instance: nvml.ask("nvmlDeviceGetUUID", instance),
        )
        if isinstance(uuid, str):  # others are places without an instance
            uuids.append(uuid)
    return {"mig": now, "mig_instances": uuids}


def _processes(nvml: Nvml, device: Any) -> Any:
    compute = _running(nvml, device, "Compute", False)
    graphics = _running(nvml, device, "Graphics", True)
    if isinstance(compute, dict):
        return compute
    return compute + (graphics if isinstance(graphics, list) else [])


def _running(nvml: Nvml, device: Any, kind: str, graphics: bool) -> Any:
    def taken(processes: Any) -> list[dict[str, Any]]:
        return [
            {"pid": int(process.pid), "used": _held(process), "graphics": graphics}
            for process in processes
        ]

    call = f"nvmlDeviceGet{kind}RunningProcesses"
    answer = nvml.ask(call, device, take=taken)
    if answer == {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"}:  # drivers before 510
        return nvml.ask(f"{call}_v2", device, take=taken)
    return answer


def _held(process: Any) -> int | None:
    used = getattr(process, "usedGpuMemory", None)
    return None if used is None or used == _NOT_AVAILABLE else int(used)


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def probe() -> dict[str, Any]:
    """What NVML answers, or why it cannot be asked."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return {"error": "pynvml is not installed", "code": None, "where": "import"}
    except Exception as error:
        return {"error": f"pynvml: {error}"[:300], "code": None, "where": "import"}
    try:
        return read(pynvml)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300], "code": None, "where": "read"}


if __name__ == "__main__":
    # Whatever libraries print goes to stderr, and nothing of theirs runs after the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(probe(), default=str) + "\n")
    answer.flush()
    sys.stderr.flush()
    os._exit(0)
