"""A stand-in for the module `pynvml`: simulated GPUs whose states follow a course that a test sets.

What is averaged by NVML is averaged here as well: utilisation over a sixth of a second, GPM's
metrics between two samples. A process of its own (the sampler) gets the same machine from a file:
see :func:`load`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from trainfit.results.files.decoding import decode

#: nvmlReturn_t.
UNINITIALIZED: Final = 1
NOT_SUPPORTED: Final = 3
NOT_FOUND: Final = 6
GPU_IS_LOST: Final = 15
#: nvmlClocksEventReasons.
IDLE: Final = 0x1
POWER_CAP: Final = 0x4
THERMAL: Final = 0x20
#: "Between 1 second and 1/6 second, depending on the product" (nvmlUtilization_t).
_AVERAGED_S: Final = 1 / 6
#: NVML's block for PCIe throughput.
_PCIE_BLOCKS_S: Final = 0.02
#: nvmlGpmMetricId_t, with the state's field and the unit of the answer.
_METRICS: Final = {
    2: ("sm_active", 1e-2),
    5: ("tensor_active", 1e-2),
    10: ("dram_active", 1e-2),
    20: ("pcie_from_gpu_bytes_per_s", float(1 << 20)),
    21: ("pcie_to_gpu_bytes_per_s", float(1 << 20)),
}


class NVMLError(Exception):
    """As pynvml's: ``value`` is the nvmlReturn_t."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclasses.dataclass(frozen=True)
class GpuState:
    """A GPU from a moment on. Shares are of 1.

    ``processes`` is memory in bytes by PID; ``fails`` are nvmlReturn_t by the call's name, ``"*"``
    for all of them.
    """

    from_s: float = 0.0
    utilization: float = 0.0
    memory_utilization: float = 0.0
    used_bytes: int = 0
    processes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sm_hz: float = 1.98e9
    memory_hz: float = 2.619e9
    clock_reasons: int = 0
    temperature_c: int = 50
    power_w: float = 300.0
    pcie_to_gpu_bytes_per_s: float = 0.0
    pcie_from_gpu_bytes_per_s: float = 0.0
    sm_active: float = 0.0
    tensor_active: float = 0.0
    dram_active: float = 0.0
    fails: Mapping[str, int] = dataclasses.field(default_factory=dict)


BUSY: Final = GpuState(utilization=1.0, memory_utilization=0.4, sm_active=0.9, tensor_active=0.5)


@dataclasses.dataclass(frozen=True)
class SimulatedGpu:
    """A GPU with the ``course`` of its states, in order; with ``repeat_s`` it begins again."""

    course: tuple[GpuState, ...] = (BUSY,)
    repeat_s: float | None = None
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    memory_bytes: int = 80 << 30
    max_sm_hz: float = 1.98e9
    power_limit_w: float = 700.0
    has_gpm: bool = True

    def at(self, seconds: float) -> GpuState:
        """Its state so many seconds after the beginning."""
        if self.repeat_s is not None:
            seconds %= self.repeat_s
        found = self.course[0]
        for state in self.course:
            if state.from_s <= seconds:
                found = state
        return found

    def mean(self, field: str, first_s: float, last_s: float, parts: int = 100) -> float:
        """Of a field between two moments."""
        step = (last_s - first_s) / parts
        values = (getattr(self.at(first_s + (n + 0.5) * step), field) for n in range(parts))
        return float(sum(values)) / parts


@dataclasses.dataclass(frozen=True)
class SimulatedMachine:
    """GPUs whose courses began at ``began`` (seconds of ``time.monotonic()``)."""

    gpus: tuple[SimulatedGpu, ...]
    began: float

    def save(self, path: Path) -> None:
        """For :func:`load` in another process of this machine."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def load(path: Path, clock: Callable[[], float] = time.monotonic) -> SimulatedNvml:
    """The stand-in for the machine in a file; raises ``OSError`` and ``ValueError``."""
    machine = decode(SimulatedMachine, json.loads(path.read_text(encoding="utf-8")))
    return SimulatedNvml(machine, clock)


def starved(busy_s: float, idle_s: float, state: GpuState = BUSY) -> SimulatedGpu:
    """Works and waits in turns. While it waits its clock falls, which is no throttling."""
    idle = GpuState(from_s=busy_s, clock_reasons=IDLE, sm_hz=0.35e9, power_w=90.0, temperature_c=40)
    return SimulatedGpu((state, idle), repeat_s=busy_s + idle_s)


def throttled(from_s: float, state: GpuState = BUSY) -> SimulatedGpu:
    """Too hot from a moment on: the driver lowers its clock."""
    hot = dataclasses.replace(
        state, from_s=from_s, clock_reasons=THERMAL, sm_hz=1.2e9, temperature_c=88
    )
    return SimulatedGpu((state, hot))


def lost(from_s: float, until_s: float | None = None, state: GpuState = BUSY) -> SimulatedGpu:
    """Fallen off the bus from a moment on, until it is back (``None``: for good)."""
    gone = dataclasses.replace(state, from_s=from_s, fails={"*": GPU_IS_LOST})
    back = () if until_s is None else (dataclasses.replace(state, from_s=until_s),)
    return SimulatedGpu((state, gone, *back))


class SimulatedNvml:
    """In place of the module `pynvml`, as far as trainfit calls it while a training runs.

    Args:
        machine: its GPUs.
        clock: seconds, as ``machine.began`` is.
        wait: called with the seconds that a blocking call takes.
    """

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    nvmlMemory_v2 = 2

    def __init__(
        self,
        machine: SimulatedMachine,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._machine, self._clock, self._wait = machine, clock, wait
        self._is_open = False
        self.calls: dict[str, int] = {}
        """How often each call was made."""

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    # --- The library ------------------------------------------------------------------------------
    def nvmlInit(self) -> None:
        self._count("nvmlInit")
        self._is_open = True

    def nvmlShutdown(self) -> None:
        self._is_open = False

    def nvmlDeviceGetCount(self) -> int:
        self._check_open("nvmlDeviceGetCount")
        return len(self._machine.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimulatedGpu:
        if not 0 <= index < len(self._machine.gpus):
            self._check_open("nvmlDeviceGetHandleByIndex")
            raise NVMLError(NOT_FOUND)
        gpu = self._machine.gpus[index]
        self._state(gpu, "nvmlDeviceGetHandleByIndex")
        return gpu

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimulatedGpu:
        for gpu in self._machine.gpus:
            if gpu.uuid == uuid:
                self._state(gpu, "nvmlDeviceGetHandleByUUID")
                return gpu
        self._check_open("nvmlDeviceGetHandleByUUID")
        raise NVMLError(NOT_FOUND)

    # --- A GPU ------------------------------------------------------------------------------------
    def nvmlDeviceGetName(self, handle: SimulatedGpu) -> str:
        self._state(handle, "nvmlDeviceGetName")
        return handle.name

    def nvmlDeviceGetUUID(self, handle: SimulatedGpu) -> str:
        self._state(handle, "nvmlDeviceGetUUID")
        return handle.uuid

    def nvmlDeviceGetUtilizationRates(self, handle: SimulatedGpu) -> SimpleNamespace:
        self._state(handle, "nvmlDeviceGetUtilizationRates")
        now = self._now
        gpu, memory = (
            handle.mean(field, max(0.0, now - _AVERAGED_S), now)
            for field in ("utilization", "memory_utilization")
        )
        return SimpleNamespace(gpu=round(100 * gpu), memory=round(100 * memory))

    def nvmlDeviceGetMemoryInfo(
        self, handle: SimulatedGpu, version: int | None = None
    ) -> SimpleNamespace:
        state = self._state(handle, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(
            total=handle.memory_bytes,
            used=state.used_bytes,
            free=handle.memory_bytes - state.used_bytes,
            reserved=0,
        )

    def nvmlDeviceGetClockInfo(self, handle: SimulatedGpu, type: int) -> int:
        state = self._state(handle, "nvmlDeviceGetClockInfo")
        return round((state.memory_hz if type == self.NVML_CLOCK_MEM else state.sm_hz) / 1e6)

    def nvmlDeviceGetMaxClockInfo(self, handle: SimulatedGpu, type: int) -> int:
        self._state(handle, "nvmlDeviceGetMaxClockInfo")
        if type != self.NVML_CLOCK_SM:
            raise NVMLError(NOT_SUPPORTED)
        return round(handle.max_sm_hz / 1e6)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: SimulatedGpu) -> int:
        return self._state(handle, "nvmlDeviceGetCurrentClocksEventReasons").clock_reasons

    def nvmlDeviceGetTemperature(self, handle: SimulatedGpu, sensor: int) -> int:
        return self._state(handle, "nvmlDeviceGetTemperature").temperature_c

    def nvmlDeviceGetPowerUsage(self, handle: SimulatedGpu) -> int:
        return round(self._state(handle, "nvmlDeviceGetPowerUsage").power_w * 1e3)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: SimulatedGpu) -> int:
        self._state(handle, "nvmlDeviceGetEnforcedPowerLimit")
        return round(handle.power_limit_w * 1e3)

    def nvmlDeviceGetPcieThroughput(self, device: SimulatedGpu, counter: int) -> int:
        self._state(device, "nvmlDeviceGetPcieThroughput")
        now = self._now
        self._wait(_PCIE_BLOCKS_S)
        field = "pcie_to_gpu_bytes_per_s" if counter else "pcie_from_gpu_bytes_per_s"
        return round(device.mean(field, now, now + _PCIE_BLOCKS_S) / 1e3)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: SimulatedGpu) -> list[SimpleNamespace]:
        state = self._state(handle, "nvmlDeviceGetComputeRunningProcesses")
        return [
            SimpleNamespace(pid=int(pid), usedGpuMemory=used)
            for pid, used in state.processes.items()
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: SimulatedGpu) -> list[SimpleNamespace]:
        self._state(handle, "nvmlDeviceGetGraphicsRunningProcesses")
        return []

    # --- GPM --------------------------------------------------------------------------------------
    def nvmlGpmQueryDeviceSupport(self, device: SimulatedGpu) -> SimpleNamespace:
        self._state(device, "nvmlGpmQueryDeviceSupport")
        return SimpleNamespace(version=1, isSupportedDevice=int(device.has_gpm))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        return SimpleNamespace(gpu=None, at=0.0)

    def nvmlGpmSampleGet(self, device: SimulatedGpu, gpmSample: SimpleNamespace) -> SimpleNamespace:
        self._state(device, "nvmlGpmSampleGet")
        gpmSample.gpu, gpmSample.at = device, self._now
        return gpmSample

    def nvmlGpmMetricsGet(self, metricsGet: SimpleNamespace) -> SimpleNamespace:
        first, last = metricsGet.sample1, metricsGet.sample2
        self._state(last.gpu, "nvmlGpmMetricsGet")
        for metric in metricsGet.metrics[: metricsGet.numMetrics]:
            if metric.metricId not in _METRICS:
                metric.nvmlReturn = NOT_SUPPORTED
                continue
            field, unit = _METRICS[metric.metricId]
            metric.value = last.gpu.mean(field, first.at, last.at) / unit
        return metricsGet

    # --- Within -----------------------------------------------------------------------------------
    @property
    def _now(self) -> float:
        """Seconds since the courses began."""
        return self._clock() - self._machine.began

    def _count(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1

    def _check_open(self, call: str) -> None:
        self._count(call)
        if not self._is_open:
            raise NVMLError(UNINITIALIZED)

    def _state(self, gpu: SimulatedGpu, call: str) -> GpuState:
        """The GPU's, unless the call fails now."""
        self._check_open(call)
        state = gpu.at(self._now)
        code = state.fails.get(call, state.fails.get("*"))
        if code is not None:
            raise NVMLError(code)
        return state


def several(gpus: Sequence[SimulatedGpu], began: float) -> SimulatedMachine:
    """A machine with these GPUs, each with a UUID of its own."""
    named = (
        dataclasses.replace(gpu, uuid=f"GPU-{place:08x}-0000-0000-0000-000000000000")
        for place, gpu in enumerate(gpus)
    )
    return SimulatedMachine(tuple(named), began)
