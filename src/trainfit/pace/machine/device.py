"""The GPU during the calls: kernel times, what keeps it awake, its clocks.

PyTorch is only touched where the callable has imported it and uses CUDA already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol

#: Of a keep-alive, seconds that the GPU works at a time, and that it then has nothing to do: it
#: does not go idle within, and a call's kernels do not wait for longer.
_WORKS_S, _PAUSES_S = 0.5e-3, 0.5e-3


@dataclasses.dataclass(frozen=True)
class Clocks:
    """At one moment: SM clock, performance state (0 is the fastest), and whether something but
    idleness slows the GPU (heat, power); ``None``: not told."""

    sm_hz: float | None = None
    pstate: int | None = None
    is_slowed: bool | None = None


@dataclasses.dataclass
class Kernels:
    """Those of some calls: how many were launched, and how long the GPU worked at them (s)."""

    count: int = 0
    busy_s: float = 0.0

    def of_one(self, calls: int) -> Kernels:
        """The same of one call, on average."""
        return Kernels(round(self.count / max(1, calls)), self.busy_s / max(1, calls))


class Device(Protocol):
    """What a measurement needs of a GPU."""

    @property
    def is_there(self) -> bool:
        """Do the calls use one?"""

    def mark(self) -> Any:
        """A moment on the GPU's clock."""

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks, both past; the GPU is waited for."""

    def why_not_awake(self) -> str:
        """Why the GPU cannot be kept busy; "" if it can."""

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the GPU busy within the block, whether there are calls or not."""

    def launch(self) -> None:
        """Launch a tiny kernel in addition to the calls' own; never raises."""

    def profiled(self) -> contextlib.AbstractContextManager[Kernels]:
        """The kernels that are launched within, by their own times: unlike the time between two
        marks, these do not grow where the GPU waits for the CPU. Slows the CPU's side. None are
        counted where they are unknown."""

    def clocks(self) -> Clocks: ...


class NoDevice:
    """Calls that use no GPU."""

    is_there = False

    def mark(self) -> Any:
        return None

    def seconds(self, first: Any, last: Any) -> float:
        return 0.0

    def why_not_awake(self) -> str:
        return "calls use no GPU"

    def awake(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def launch(self) -> None:
        pass

    def profiled(self) -> contextlib.AbstractContextManager[Kernels]:
        return contextlib.nullcontext(Kernels())

    def clocks(self) -> Clocks:
        return Clocks()


class CudaDevice:
    """The current CUDA device of PyTorch in this process."""

    is_there = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._nvml = _Nvml(torch)
        self._beside: tuple[Any, Any] | None = None

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def why_not_awake(self) -> str:
        return ""

    def launch(self) -> None:
        with contextlib.suppress(Exception):
            if self._beside is None:
                one = self._torch.zeros(1, device="cuda")
                self._beside = self._torch.cuda.Stream(), one
            stream, one = self._beside
            with self._torch.cuda.stream(stream):
                one.zero_()

    @contextlib.contextmanager
    def profiled(self) -> Iterator[Kernels]:
        torch, found = self._torch, Kernels()
        profile = None
        with contextlib.suppress(Exception):  # a build without Kineto, or CUPTI in use by another
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            profile = torch.profiler.profile(activities=kinds, acc_events=True)
            profile.start()
        try:
            yield found
        finally:
            with contextlib.suppress(Exception):
                self._count(profile, found)

    def _count(self, profile: Any, found: Kernels) -> None:
        self._torch.cuda.synchronize()
        profile.stop()
        for event in profile.events():
            if event.device_type == self._torch.autograd.DeviceType.CUDA:
                found.count += 1
                found.busy_s += event.time_range.elapsed_us() * 1e-6

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """A thread lets one multiprocessor turn in circles on a stream of its own."""
        from trainfit.torch_private.cuda import sleep

        cuda, ended = self._torch.cuda, threading.Event()
        stream = cuda.Stream(priority=0)
        cycles = int(_WORKS_S * (self.clocks().sm_hz or 1.5e9))

        def work() -> None:
            with contextlib.suppress(Exception), cuda.stream(stream):
                while not ended.wait(_WORKS_S + _PAUSES_S):
                    sleep(cycles)

        thread = threading.Thread(target=work, name="trainfit-gpu-awake", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            stream.synchronize()

    def clocks(self) -> Clocks:
        return self._nvml.clocks()


class _Nvml:
    """NVML in this process, for the GPU that PyTorch uses; never raises."""

    def __init__(self, torch: Any) -> None:
        self._handle: Any = None
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            name = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}")
            self._nvml: Any = pynvml

    def clocks(self) -> Clocks:
        if self._handle is None:
            return Clocks()
        nvml, handle = self._nvml, self._handle
        sm = _asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        reasons = _asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        slowed = None if reasons is None else bool(int(reasons) & _SLOWED)
        return Clocks(
            None if sm is None else 1e6 * sm,
            _asked(nvml.nvmlDeviceGetPerformanceState, handle),
            slowed,
        )


#: nvml.h: SwPowerCap, HwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown.
_SLOWED: Final = 0x04 | 0x08 | 0x20 | 0x40 | 0x80


def _asked(call: Any, *arguments: Any) -> Any:
    with contextlib.suppress(Exception):
        return call(*arguments)
    return None


def device_in_use() -> Device:
    """PyTorch's, if the code that was called uses one; ask after a first call."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return CudaDevice(torch)
    return NoDevice()
