"""The simulated device's time.

Work is asynchronous on a GPU: an event's time is that at which all that was submitted before it
is done. How long kernels take is for a model above this package to say (:func:`use`); without one
each operator occupies the device for the time that its traffic takes at the GPU's memory bandwidth,
and for no less than a kernel's launch: a lower bound, for code that needs a clock that advances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.simgpu.recording.recorder import Recorder

#: Seconds that a kernel takes at least; an order of magnitude, not a measurement.
LAUNCH_SECONDS = 5e-6
#: Bytes moved for each byte of result: two operands read, one result written.
TRAFFIC = 3


class Clock(Protocol):
    """Time in seconds since the start, worked out from the recording when asked."""

    def now(self, stream: int | None = None) -> float:
        """When the device (or a stream of it) is done with everything submitted so far."""

    def host(self) -> float:
        """When the CPU has submitted everything; where it had to wait for the device, later."""

    def pause(self, seconds: float) -> None:
        """The CPU did something else before it goes on to submit."""


class TrafficClock:
    """The lower bound by traffic alone, on a computer that waits for each operator."""

    def __init__(self, recorder: Recorder, gpu: GpuSpec) -> None:
        self._recorder = recorder
        self._bandwidth = gpu.bandwidth_bytes_per_s
        self._seconds = 0.0
        self._ops = 0
        self._allocs = 0

    def now(self, stream: int | None = None) -> float:
        """See :class:`Clock`."""
        ops, nbytes, owners = self._recorder.since(self._ops, self._allocs)
        if ops:
            traffic = np.bincount(np.maximum(owners - self._ops, 0), weights=nbytes, minlength=ops)
            seconds = np.maximum(traffic * TRAFFIC / self._bandwidth, LAUNCH_SECONDS)
            self._seconds += float(seconds.sum())
        self._ops += ops
        self._allocs += len(nbytes)
        return self._seconds

    def host(self) -> float:
        """See :class:`Clock`."""
        return self.now()

    def pause(self, seconds: float) -> None:
        """See :class:`Clock`."""
        self._seconds += seconds


_make: Callable[[Recorder, GpuSpec], Clock] = TrafficClock


def use(maker: Callable[[Recorder, GpuSpec], Clock]) -> None:
    """Let simulations of this process keep time with another clock from now on."""
    global _make
    _make = maker


def clock_of(recorder: Recorder, gpu: GpuSpec) -> Clock:
    """The clock of a new simulation."""
    return _make(recorder, gpu)
