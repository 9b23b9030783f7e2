"""NVIDIA's devices by NVML, queried in a separate process, and on the PCI bus."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from trainfit.hardware.machine import parsing
from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact, PciDevice, absent, cannot_tell, known

T = TypeVar("T")

#: NVML answers within tenths of a second; it takes seconds where no persistence daemon keeps
#: the GPUs awake.
SECONDS = 6.0

#: nvml.h's nvmlReturn_t, where its symbol does not say enough.
_MEANING = {
    "NVML_ERROR_FUNCTION_NOT_FOUND": "this driver is too old for this call",
    "NVML_ERROR_NO_PERMISSION": "this user lacks permission for it",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no NVIDIA driver is loaded",
    "NVML_ERROR_LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 was not found",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "libnvidia-ml and the driver have different versions",
    "NVML_ERROR_GPU_IS_LOST": "the GPU has fallen off the bus",
    "NVML_ERROR_RESET_REQUIRED": "the GPU must be reset",
    "NVML_ERROR_UNKNOWN": "Unknown Error",
}


def ask_nvml(system: System) -> Fact[Mapping[str, Any]]:
    """What `probes/nvml_gpus.py` prints, with or without GPUs."""
    return system.probe("nvml_gpus", SECONDS)


def refused(source: str, error: str) -> Fact[Any]:
    """A value that NVML does not give: the GPU has no such thing, or it is unknown."""
    if error == "NVML_ERROR_NOT_SUPPORTED":
        return absent(source, "this GPU does not report it")
    return cannot_tell(source, reason_of(error))


def reason_of(error: str) -> str:
    """NVML's symbol, with its meaning where that is not plain."""
    meaning = _MEANING.get(error)
    return f"{error}: {meaning}" if meaning else error


def blindness(answer: Fact[Mapping[str, Any]]) -> str:
    """Why NVML lists no GPUs; "" if it does."""
    if answer.value is None:
        return answer.reason
    error = parsing.error_of(answer.value)
    if error is not None:
        return reason_of(error)
    listed = answer.value.get("gpus")
    if not isinstance(listed, list):
        return f"NVML's GPUs are {parsing.shown(listed)}, not a list"
    return "" if listed else "NVML lists no GPU"


def value_of(
    entry: Mapping[str, Any], key: str, call: str, read: Callable[[Any], T | None]
) -> Fact[T]:
    """The value of ``key``, asked for by ``call``: read, refused, or not what it should be."""
    source = f"NVML {call}"
    value = entry.get(key)
    error = parsing.error_of(value)
    if error is not None:
        return refused(source, error)
    if value is None:
        return cannot_tell(source, "NVML gave no answer")
    found = read(value)
    if found is None:
        return cannot_tell(source, f"it reports {parsing.shown(value)}, an invalid value")
    return known(found, source)


# ---
# NVIDIA's devices on the PCI bus, as the kernel lists them: seen also where NVML is blind.


FOLDER = "/sys/bus/pci/devices"

_NVIDIA = 0x10DE
#: Base class and subclass: PCI Code and ID Assignment Specification. A GPU's other functions
#: (audio 0x0403, USB 0x0c03, serial bus 0x0c80) are of other classes.
_DISPLAY = 0x03
_OTHER_BRIDGE = 0x0680
#: GT/s of one lane by PCI Express generation: PCI Express Base Specification.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_WIDEST_LINK = 32


def read_pci(system: System) -> Fact[tuple[PciDevice, ...]]:
    """The NVIDIA GPUs on the bus, by address; empty where the bus has none."""
    listed = system.names(FOLDER)
    if listed.value is None:
        return Fact(listed.state, None, listed.source, listed.reason)
    devices, unread = [], 0
    for address in listed.value:
        vendor = _code(system, address, "vendor")
        kind = _code(system, address, "class") if vendor == _NVIDIA else None
        if vendor is None or (vendor == _NVIDIA and kind is None):
            unread += 1
        elif vendor == _NVIDIA and kind is not None and kind >> 16 == _DISPLAY:
            devices.append(_device(system, address))
    if unread and not devices:
        return cannot_tell(FOLDER, f"vendor or class of {unread} devices cannot be read")
    return known(tuple(devices), FOLDER)


def has_switches(system: System) -> bool:
    """Are the GPUs joined by NVSwitch, so that a fabric manager must run?"""
    # The module nvidia makes the folder everywhere, with a file in it for each switch.
    if system.names("/proc/driver/nvidia-nvswitch/devices").value:
        return True
    return any(
        _code(system, address, "vendor") == _NVIDIA
        and (_code(system, address, "class") or 0) >> 8 == _OTHER_BRIDGE
        for address in system.names(FOLDER).value or ()
    )


def place(address: str) -> str | None:
    """The kernel's spelling of a PCI address: "0000:01:00.0" of NVML's "00000000:01:00.0"."""
    match = re.fullmatch(
        r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower()
    )
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def informed(system: System) -> Iterator[tuple[str, str | None, str | None]]:
    """Address, model and UUID of each GPU below /proc/driver/nvidia/gpus."""
    folder = "/proc/driver/nvidia/gpus"
    for address in system.names(folder).value or ():
        content = system.text(f"{folder}/{address}/information").value or ""
        yield address, _field(content, "Model"), _field(content, "GPU UUID")


def _field(content: str, name: str) -> str | None:
    match = re.search(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", content, re.MULTILINE)
    # The driver writes what it does not know as "Unknown" and "GPU-????????-…".
    return match[1] if match and "?" not in match[1] and match[1] != "Unknown" else None


def _device(system: System, address: str) -> PciDevice:
    folder = f"{FOLDER}/{address}"
    driver = system.link(f"{folder}/driver").value
    node = system.number(f"{folder}/numa_node").value
    return PciDevice(
        address=address,
        device_id=system.text(f"{folder}/device").value or "",
        device_class=system.text(f"{folder}/class").value or "",
        kernel_driver=driver.rstrip("/").rpartition("/")[2] or None if driver else None,
        numa_node=node if node is not None and node >= 0 else None,
        link_generation=_generation(system.text(f"{folder}/current_link_speed").value),
        link_generation_max=_generation(system.text(f"{folder}/max_link_speed").value),
        link_width=_width(system.number(f"{folder}/current_link_width").value),
        link_width_max=_width(system.number(f"{folder}/max_link_width").value),
    )


def _code(system: System, address: str, name: str) -> int | None:
    """A number that the kernel writes as "0x10de"."""
    content = system.text(f"{FOLDER}/{address}/{name}").value or ""
    return int(content, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", content) else None


def _generation(speed: str | None) -> int | None:
    """The PCIe generation of a speed such as "16.0 GT/s PCIe"; ``None`` of "Unknown", which a link
    that is down says."""
    match = re.match(r"(\d{1,3}(?:\.\d{1,2})?) GT/s", speed or "")
    return _GENERATIONS.get(float(match[1])) if match else None


def _width(lanes: int | None) -> int | None:
    # 0 is a link that is down, 255 one that cannot be read.
    return lanes if lanes is not None and 0 < lanes <= _WIDEST_LINK else None


# ---
# A GPU's counters by NVML: those that are cheap ten times a second, and the rest once a second.
#
# A call that fails leaves its columns unmeasured; one that the GPU or the driver does not have is
# not made again. Sources: nvml.h and docs.nvidia.com/deploy/nvml-api.


#: nvmlReturn_t: what the GPU, the driver or pynvml does not have; and what says that the GPU or the
#: driver is gone.
_NOT_SUPPORTED: Final = frozenset((3, 13, 26))
_GONE: Final = frozenset((1, 9, 15, 16, 18, 999))
#: nvmlClockType_t and others; names that older versions of pynvml lack.
_SM_CLOCK: Final = 1
_MEMORY_CLOCK: Final = 2
_GPU_SENSOR: Final = 0
_FROM_GPU: Final = 0
_TO_GPU: Final = 1
#: nvmlGpmMetricId_t, in percent but for PCIe (MiB/s).
_GPM: Final = {
    "sm_active": 2,
    "tensor_active": 5,
    "dram_active": 10,
    "pcie_from_gpu_bytes_per_s": 20,
    "pcie_to_gpu_bytes_per_s": 21,
}
#: Seconds between GPM's samples, above 0.1 (nvmlGpmMetricsGet: the counters' own refresh rate).
_GPM_EVERY_S: Final = 0.15
_SLOW_EVERY_S: Final = 1.0
#: A call that takes longer several times in a row is made once a second; once alone, this process
#: may have had to wait for a core.
_DEAR_S: Final = 5e-3
_IN_A_ROW: Final = 3
_NOT_AVAILABLE: Final = (1 << 64) - 1

Values = dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Query:
    """A call of NVML for ``columns``; ``take`` gives their values from its answer."""

    call: str
    words: tuple[Any, ...]
    columns: tuple[str, ...]
    take: Callable[[Any], Sequence[float]]


def _scaled(unit: float) -> Callable[[Any], Sequence[float]]:
    return lambda value: (value * unit,)


_FAST: Final = (
    _Query(
        "nvmlDeviceGetUtilizationRates",
        (),
        ("utilization", "memory_utilization"),
        lambda rates: (rates.gpu / 100, rates.memory / 100),
    ),
    _Query("nvmlDeviceGetClockInfo", (_SM_CLOCK,), ("sm_hz",), _scaled(1e6)),
    _Query("nvmlDeviceGetClockInfo", (_MEMORY_CLOCK,), ("memory_hz",), _scaled(1e6)),
    _Query("nvmlDeviceGetTemperature", (_GPU_SENSOR,), ("temperature_c",), _scaled(1.0)),
    _Query("nvmlDeviceGetPowerUsage", (), ("power_w",), _scaled(1e-3)),
)
#: What hardly changes: rows in between repeat it.
_SETTINGS: Final = (
    _Query("nvmlDeviceGetMaxClockInfo", (_SM_CLOCK,), ("max_sm_hz",), _scaled(1e6)),
    _Query("nvmlDeviceGetEnforcedPowerLimit", (), ("power_limit_w",), _scaled(1e-3)),
)
#: Each blocks for 20 ms ("over a 20ms interval") and says KB/s.
_PCIE: Final = (
    _Query("nvmlDeviceGetPcieThroughput", (_TO_GPU,), ("pcie_to_gpu_bytes_per_s",), _scaled(1e3)),
    _Query(
        "nvmlDeviceGetPcieThroughput", (_FROM_GPU,), ("pcie_from_gpu_bytes_per_s",), _scaled(1e3)
    ),
)


class NvmlDevice:
    """A GPU.

    Args:
        module: `pynvml`, or what stands in for it.
        number: NVML's number of the GPU.
        timer: seconds, by which calls are timed.
    """

    def __init__(
        self, module: Any, number: int, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._module, self._timer = module, timer
        self.number = number
        self._handle: Any = None
        self._refused: set[tuple[str, Any]] = set()
        self._dear: dict[str, int] = {}
        self._dear_at: dict[str, float] = {}
        self._errors = 0
        self._settings: Values = {}
        self._slow_at = self._gpm_at = float("-inf")
        self._gpm: list[Any] | None = None
        self._has_gpm = True
        self.uuid = self.name = ""
        self.is_gone = not self.open()
        """After a sample in which nothing could be read."""

    def open(self) -> bool:
        """Get the handle, also after NVML was started again; ``False``: there is none."""
        self._gpm = None
        if self.uuid:  # NVML numbers the GPUs that are left anew
            handle = self._ask("nvmlDeviceGetHandleByUUID", self.uuid)
        else:
            handle = self._ask("nvmlDeviceGetHandleByIndex", self.number)
        if handle is None:
            return False
        self._handle = handle
        self.uuid = self.uuid or _text(self._of("nvmlDeviceGetUUID"))
        self.name = self.name or _text(self._of("nvmlDeviceGetName"))
        return True

    def sample(self, now: float, pids: frozenset[int] | None, may_wait: bool) -> Values:
        """Values by column of the table; those that are missing were not measured.

        Args:
            now: seconds of ``time.monotonic()``.
            pids: of the run, as NVML knows them; ``None``: it knows them by other numbers.
            may_wait: whether calls that block may be made now.
        """
        self._errors = 0
        found: Values = {}
        for query in _FAST:
            self._put(found, query, now)
            if self._errors and not found:  # the rest would fail as well
                self.is_gone = True
                return {}
        self.is_gone = not found and self._errors > 0
        self._put_memory(found)
        self._put_reasons(found)
        self._put_gpm(found, now)
        if now - self._slow_at >= _SLOW_EVERY_S and may_wait:
            self._slow_at = now
            for query in _SETTINGS:
                self._put(self._settings, query, now)
            self._put_processes(found, pids)
            if "pcie_to_gpu_bytes_per_s" not in found and not self._uses_gpm:
                for query in _PCIE:
                    self._put(found, query, now)
        return self._settings | found

    @property
    def waited_at(self) -> float:
        """When slow calls were made last, in seconds of ``time.monotonic()``."""
        return self._slow_at

    # --- Calls ------------------------------------------------------------------------------------
    def _ask(self, call: str, *words: Any) -> Any:
        """What it returns; ``None`` where it fails."""
        key = call, tuple(word for word in words[1:] if isinstance(word, int))
        if key in self._refused:
            return None
        try:
            return getattr(self._module, call)(*words)
        except Exception as error:
            # pynvml says by an error of its own that a driver is too old for a call.
            code = getattr(error, "value", None)
            is_missing = isinstance(error, AttributeError) or "Mismatch" in type(error).__name__
            if code in _NOT_SUPPORTED or (is_missing and code not in _GONE):
                self._refused.add(key)
            elif code in _GONE:
                self._errors += 1
            return None

    def _of(self, call: str, *words: Any) -> Any:
        return self._ask(call, self._handle, *words)

    def _put(self, values: Values, query: _Query, now: float) -> None:
        name = f"{query.call}{query.words}"
        if self._may_call(name, now):
            answer = self._timed(name, now, lambda: self._of(query.call, *query.words))
            if answer is not None:
                values.update(zip(query.columns, query.take(answer), strict=True))

    def _may_call(self, name: str, now: float) -> bool:
        is_dear = self._dear.get(name, 0) >= _IN_A_ROW
        return not is_dear or now - self._dear_at[name] >= _SLOW_EVERY_S

    def _timed(self, name: str, now: float, call: Callable[[], Any]) -> Any:
        began = self._timer()
        answer = call()
        is_dear = self._timer() - began > _DEAR_S
        self._dear[name] = self._dear.get(name, 0) + 1 if is_dear else 0
        self._dear_at[name] = now
        return answer

    def _put_memory(self, values: Values) -> None:
        """Add memory by the second version of the query, which tells the driver's reserve from what
        is used, where the driver has it."""
        version = getattr(self._module, "nvmlMemory_v2", None)
        answer = None
        if version is not None:
            answer = self._of("nvmlDeviceGetMemoryInfo", version)
        if answer is None:
            answer = self._of("nvmlDeviceGetMemoryInfo")
        if answer is not None:
            values["used_bytes"] = int(answer.used)

    def _put_reasons(self, values: Values) -> None:
        answer = self._of("nvmlDeviceGetCurrentClocksEventReasons")
        if answer is None:  # its name before driver 535
            answer = self._of("nvmlDeviceGetCurrentClocksThrottleReasons")
        if answer is not None:
            values["clock_reasons"] = int(answer)

    def _put_processes(self, values: Values, pids: frozenset[int] | None) -> None:
        """Memory of the run's processes and of others."""
        answer = self._of("nvmlDeviceGetComputeRunningProcesses")
        if answer is None or pids is None:
            return
        graphics = self._of("nvmlDeviceGetGraphicsRunningProcesses") or ()
        held: dict[int, int | None] = {}
        for process in (*answer, *graphics):
            used = getattr(process, "usedGpuMemory", None)
            held[int(process.pid)] = None if used in (None, _NOT_AVAILABLE) else int(used)
        _put_sum(values, "ours_bytes", {pid: used for pid, used in held.items() if pid in pids})
        others = {pid: used for pid, used in held.items() if pid not in pids}
        _put_sum(values, "others_bytes", others)

    # --- GPM (Hopper and newer) -------------------------------------------------------------------
    @property
    def _uses_gpm(self) -> bool:
        return self._has_gpm and self._gpm is not None

    def _put_gpm(self, values: Values, now: float) -> None:
        """Shares of the time since the sample before, by two of the driver's sample buffers."""
        if not self._has_gpm or now - self._gpm_at < _GPM_EVERY_S:
            return
        if self._gpm is None and not self._start_gpm():
            return
        assert self._gpm is not None
        if not self._may_call("GPM", now):
            return
        before, after = self._gpm
        is_read = self._timed("GPM", now, lambda: self._of("nvmlGpmSampleGet", after)) is not None
        if is_read and self._gpm_at > float("-inf"):
            self._put_metrics(values, before, after)
        self._gpm_at = now if is_read else float("-inf")
        self._gpm = [after, before]

    def _start_gpm(self) -> bool:
        support = self._of("nvmlGpmQueryDeviceSupport")
        self._has_gpm = bool(support is not None and support.isSupportedDevice)
        buffers = [self._ask("nvmlGpmSampleAlloc") for _ in range(2)] if self._has_gpm else []
        if len(buffers) < 2 or None in buffers:
            self._has_gpm = False
            return False
        self._gpm, self._gpm_at = buffers, float("-inf")
        return True

    def _put_metrics(self, values: Values, before: Any, after: Any) -> None:
        request = self._module.c_nvmlGpmMetricsGet_t()
        request.version = self._module.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_GPM)
        request.sample1, request.sample2 = before, after
        for place, metric in enumerate(_GPM.values()):
            request.metrics[place].metricId = metric
        answer = self._ask("nvmlGpmMetricsGet", request)
        if answer is None:
            return
        for place, column in enumerate(_GPM):
            metric = answer.metrics[place]
            if metric.nvmlReturn == 0:
                unit = float(1 << 20) if column.startswith("pcie") else 1e-2
                values[column] = float(metric.value) * unit


def _put_sum(values: Values, column: str, held: Mapping[int, int | None]) -> None:
    """The sum, unless one of them is not told."""
    known = [used for used in held.values() if used is not None]
    if len(known) == len(held):
        values[column] = sum(known)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""
