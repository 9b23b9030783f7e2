"""The machine next to the calls: its clock, its ways to wait, its GPU, and readings of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from trainfit.findings.source_code import relative_place
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import (
    busy_seconds,
    clock_here,
    idle_seconds,
    thread_seconds,
    throttle_count,
)
from trainfit.pace.settings import held_awake
from trainfit.results.pace import HostReadings
from trainfit.simgpu.patching import CollectionTimes, PatchSet

# ---
# The GPU during the calls: kernel times, what keeps it awake, its clocks.
#
# PyTorch is only touched where the callable has imported it and uses CUDA already.


#: Of a keep-alive, seconds that the GPU works at a time, and that it then has nothing to do: it
#: does not go idle within, and a call's kernels do not wait for longer.
_WORKS_S, _PAUSES_S = 0.5e-3, 0.5e-3
#: The name of its thread.
_AWAKE: Final = "trainfit-gpu-awake"


@dataclasses.dataclass(frozen=True)
class Clocks:
    """The state of the GPU at one moment: SM clock, performance state (0 is the fastest), and
    whether something but idleness slows it (heat, power); ``None``: not told."""

    sm_hz: float | None = None
    pstate: int | None = None
    is_slowed: bool | None = None


@dataclasses.dataclass
class Kernels:
    """The kernels of some calls: how many were launched, and how long the GPU worked at them
    (s)."""

    count: int = 0
    busy_s: float = 0.0

    def of_one(self, calls: int) -> Kernels:
        """The kernels of one call, on average."""
        return Kernels(round(self.count / max(1, calls)), self.busy_s / max(1, calls))


class PacedDevice(Protocol):
    """What a measurement needs of a GPU."""

    @property
    def is_there(self) -> bool:
        """Do the calls use one?"""

    def mark(self) -> Any:
        """A moment on the GPU's clock."""

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two marks, both past; the GPU is waited for."""

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


class PacedCudaDevice:
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

    def _count(self, profile: Any, kernels: Kernels) -> None:
        self._torch.cuda.synchronize()
        profile.stop()
        for event in profile.events():
            if event.device_type == self._torch.autograd.DeviceType.CUDA:
                kernels.count += 1
                kernels.busy_s += event.time_range.elapsed_us() * 1e-6

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

        thread = threading.Thread(target=work, name=_AWAKE, daemon=True)
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


def device_in_use() -> PacedDevice:
    """PyTorch's, if the code that was called uses one; ask after a first call."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return PacedCudaDevice(torch)
    return NoDevice()


# ---
# Machine readings around a block of calls: clocks, C-states, heat, other processes' load.
#
# Read around blocks, never between calls: reading wakes CPUs.


@dataclasses.dataclass(frozen=True)
class HostCounters:
    """Counters at one moment: monotonic time; of the CPUs that may be used, seconds in each
    C-state, throttle events and CPU seconds worked; CPU seconds of this process with its children;
    seconds that its threads worked or waited for a core.
    """

    at_s: float
    idle_s: Mapping[str, float]
    throttled: int | None
    all_s: float
    own_s: float
    threads_s: Mapping[int, float]


class Observer:
    """Reads a system's counters."""

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._cpus = self._system.affinity().value or ()

    def counters(self) -> HostCounters:
        own = os.times()
        return HostCounters(
            time.monotonic(),
            idle_seconds(self._system, self._cpus),
            throttle_count(self._system, self._cpus),
            busy_seconds(self._cpus),
            own.user + own.system + own.children_user + own.children_system,
            thread_seconds(self._system),
        )

    def readings(self, before: HostCounters, clocks: Clocks) -> HostReadings:
        """The readings since ``before``."""
        hertz = clock_here(self._system)
        now = self.counters()
        seconds = max(1e-9, now.at_s - before.at_s)
        span = seconds * max(1, len(self._cpus))
        shares = {
            name: max(0.0, spent - before.idle_s.get(name, spent)) / span
            for name, spent in now.idle_s.items()
        }
        others = (now.all_s - before.all_s) - (now.own_s - before.own_s)
        throttled = None
        if now.throttled is not None and before.throttled is not None:
            throttled = max(0, now.throttled - before.throttled)
        return HostReadings(
            cpu_hz=hertz,
            idle_shares=shares,
            throttled=throttled,
            gpu_hz=clocks.sm_hz,
            gpu_pstate=clocks.pstate,
            gpu_slowed=clocks.is_slowed,
            others_cores=max(0.0, others / seconds),
            threads_cores=_other_threads(before.threads_s, now.threads_s, seconds),
        )


#: What Python does not know is one name: a pool's threads are many.
UNNAMED: Final = "without a name in Python"
#: Cores from which a thread is told of.
_TOLD: Final = 0.01


def _name_of(thread: threading.Thread) -> str:
    """ "camera, Camera.run at robot.py:41"; its name alone where its function is not Python's."""
    function = getattr(thread, "_target", None) or type(thread).run
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)  # a method's is its function's
    if code is None or code is threading.Thread.run.__code__:
        return thread.name
    place = relative_place(f"{code.co_filename}:{code.co_firstlineno}")
    return f"{thread.name}, {code.co_qualname} at {place}"


def _other_threads(
    before: Mapping[int, float], now: Mapping[int, float], seconds: float
) -> dict[str, float]:
    """Cores that each other thread of this process wanted in ``seconds``, by its name in Python
    with the function that it runs; of several of one name, the busiest."""
    names = {each.native_id: _name_of(each) for each in threading.enumerate()}
    threads: dict[str, float] = {}
    for thread, spent in now.items():
        cores = (spent - before.get(thread, spent)) / seconds
        name = names.get(thread, UNNAMED)
        if thread == threading.get_native_id() or name == _AWAKE or cores < _TOLD:
            continue
        threads[name] = max(cores, threads.get(name, 0.0))
    return threads


#: Of the fixed loop, seconds at full speed: long enough for the clock (0.2 µs a look), short
#: enough to be negligible next to a call.
PROBE_S: Final = 10e-6
#: Modular powers of 512-bit numbers: registers and a few cache lines, so that what the call left
#: in the caches does not matter, and as much work every time.
_BASE, _MODULUS = 3**300 + 2, (1 << 511) - 187


class PacedHost(Protocol):
    """What a measurement needs of a machine; times in seconds on one monotonic clock."""

    @property
    def device(self) -> PacedDevice:
        """The host's GPU, as far as calls use it."""

    def look_for_device(self) -> None:
        """A first call was made: does it use a GPU?"""

    def now(self) -> float: ...

    def cpu_now(self) -> float:
        """CPU time of the calling thread."""

    def sleep_until(self, at: float) -> None:
        """Give the core away until then."""

    def spin_until(self, at: float) -> None:
        """Keep the core busy until then."""

    def probe(self) -> float:
        """CPU time of the fixed loop."""

    def why_no_latency_hold(self) -> str:
        """Why deep idle states cannot be forbidden here; "" if they can."""

    def no_idle_states(self) -> contextlib.AbstractContextManager[None]:
        """Deep idle states are forbidden within."""

    def collections_s(self) -> float:
        """Seconds of this process's garbage collections since the last such look, while the time is
        observed."""

    def observed(self) -> contextlib.AbstractContextManager[BlockReadings]:
        """What the machine says of the time within, once that is over."""


class BlockReadings:
    """Filled in when a block is over."""

    def __init__(self) -> None:
        self.readings = HostReadings()


class RealHost:
    """This machine, its files below ``root``."""

    def __init__(self, device: PacedDevice | None = None, observer: Observer | None = None) -> None:
        self.device: PacedDevice = device or NoDevice()
        self._observer = observer or Observer()
        self._exponent = _calibrated()
        self._collections = CollectionTimes()

    def look_for_device(self) -> None:
        if not self.device.is_there:
            self.device = device_in_use()

    def now(self) -> float:
        return time.monotonic()

    def cpu_now(self) -> float:
        return time.thread_time()

    def sleep_until(self, at: float) -> None:
        left = at - time.monotonic()
        if left > 0:
            time.sleep(left)

    def spin_until(self, at: float) -> None:
        while time.monotonic() < at:
            pass

    def probe(self) -> float:
        began = time.thread_time_ns()
        pow(_BASE, self._exponent, _MODULUS)
        return (time.thread_time_ns() - began) * 1e-9

    def why_no_latency_hold(self) -> str:
        return held_awake().why_not()

    def no_idle_states(self) -> contextlib.AbstractContextManager[None]:
        return held_awake()

    def collections_s(self) -> float:
        return self._collections.take()

    @contextlib.contextmanager
    def observed(self) -> Iterator[BlockReadings]:
        found = BlockReadings()
        before = self._observer.counters()
        patches = PatchSet()
        try:
            collections = self._collections
            patches.see_collections(time.perf_counter, collections.starts, collections.stops)
            yield found
        finally:
            patches.restore()
            found.readings = self._observer.readings(before, self.device.clocks())


def _calibrated() -> int:
    """The exponent with which the loop takes :data:`PROBE_S` on this machine, about."""
    bits = 16
    while True:
        exponent = (1 << bits) - 1
        took = min(_timed(exponent) for _ in range(20))
        if took >= PROBE_S / 2 or bits >= 1 << 14:
            return (1 << max(1, round(bits * PROBE_S / max(took, 1e-9)))) - 1
        bits *= 2


def _timed(exponent: int) -> float:
    began = time.perf_counter()
    pow(_BASE, exponent, _MODULUS)
    return time.perf_counter() - began
