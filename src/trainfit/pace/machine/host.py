"""Interface between a measurement and the machine: its clock, its ways to wait, its readings.

:class:`Host` is this machine; ``tests/helpers_paced_machine.py`` has one whose clock, governor,
idle states and GPU are simulated. Nothing else here asks a clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final, Protocol

from trainfit.pace.machine.device import Device, NoDevice, device_in_use
from trainfit.pace.machine.latency import held_awake
from trainfit.pace.machine.readings import Observer
from trainfit.results.machine.pace import Readings

#: Of the fixed loop, seconds at full speed: long enough for the clock (0.2 µs a look), short
#: enough to be negligible next to a call.
PROBE_S: Final = 10e-6
#: Modular powers of 512-bit numbers: registers and a few cache lines, so that what the call left
#: in the caches does not matter, and as much work every time.
_BASE, _MODULUS = 3**300 + 2, (1 << 511) - 187


class Host(Protocol):
    """What a measurement needs of a machine; times in seconds on one monotonic clock."""

    @property
    def device(self) -> Device:
        """Its GPU, as far as calls use it."""

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

    def observed(self) -> contextlib.AbstractContextManager[BlockReadings]:
        """What the machine says of the time within, once that is over."""


class BlockReadings:
    """Filled in when a block is over."""

    def __init__(self) -> None:
        self.readings = Readings()


class RealHost:
    """This machine, its files below ``root``."""

    def __init__(self, device: Device | None = None, observer: Observer | None = None) -> None:
        self.device: Device = device or NoDevice()
        self._observer = observer or Observer()
        self._exponent = _calibrated()

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

    @contextlib.contextmanager
    def observed(self) -> Iterator[BlockReadings]:
        found = BlockReadings()
        before = self._observer.counters()
        try:
            yield found
        finally:
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
