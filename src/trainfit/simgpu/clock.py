"""The simulated device's time.

Work is asynchronous on a GPU: each operator occupies the device for the time its traffic
takes at the GPU's memory bandwidth, and for no less than a kernel's launch. This is a lower
bound of a step (arithmetic is not counted), good for code that needs a clock that advances;
it is no prediction of speed.
"""

from __future__ import annotations

import numpy as np

from trainfit.simgpu.recorder import Recorder

#: Seconds that a kernel takes at least; an order of magnitude, not a measurement.
LAUNCH_SECONDS = 5e-6
#: Bytes moved for each byte of result: two operands read, one result written.
TRAFFIC = 3


class Clock:
    """Device time in seconds since the start, worked out from the recording when asked."""

    def __init__(self, recorder: Recorder, bandwidth_bytes_per_s: float) -> None:
        self._recorder = recorder
        self._bandwidth = bandwidth_bytes_per_s
        self._seconds = 0.0
        self._ops = 0
        self._allocs = 0

    def now(self) -> float:
        """Time at which everything submitted so far is done, in seconds."""
        ops, nbytes, owners = self._recorder.since(self._ops, self._allocs)
        if ops:
            traffic = np.bincount(np.maximum(owners - self._ops, 0), weights=nbytes, minlength=ops)
            seconds = np.maximum(traffic * TRAFFIC / self._bandwidth, LAUNCH_SECONDS)
            self._seconds += float(seconds.sum())
        self._ops += ops
        self._allocs += len(nbytes)
        return self._seconds
