"""Machine readings around a block of calls: clocks, C-states, heat, other processes' load.

Read around blocks, never between calls: reading wakes CPUs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping

from trainfit.hardware.cpu.idle_usage import (
    busy_seconds,
    clock_here,
    idle_seconds,
    throttle_count,
)
from trainfit.hardware.host.system import System
from trainfit.pace.machine.device import Clocks
from trainfit.results.machine.pace import Readings


@dataclasses.dataclass(frozen=True)
class Counters:
    """At one moment: monotonic time; of the CPUs that may be used, seconds in each C-state,
    throttle events and CPU seconds worked; CPU seconds of this process with its children."""

    at_s: float
    idle_s: Mapping[str, float]
    throttled: int | None
    all_s: float
    own_s: float


class Observer:
    """Reads a system's counters."""

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._cpus = self._system.affinity().value or ()

    def counters(self) -> Counters:
        own = os.times()
        return Counters(
            time.monotonic(),
            idle_seconds(self._system, self._cpus),
            throttle_count(self._system, self._cpus),
            busy_seconds(self._cpus),
            own.user + own.system + own.children_user + own.children_system,
        )

    def readings(self, before: Counters, clocks: Clocks) -> Readings:
        """Since ``before``."""
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
        return Readings(
            cpu_hz=hertz,
            idle_shares=shares,
            throttled=throttled,
            gpu_hz=clocks.sm_hz,
            gpu_pstate=clocks.pstate,
            gpu_slowed=clocks.is_slowed,
            others_cores=max(0.0, others / seconds),
        )
