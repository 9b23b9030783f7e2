"""Counters of CPU activity: work, time in each C-state, throttling, clocks.

Sources: Documentation/admin-guide/pm/cpuidle.rst (``time`` is in microseconds), and
arch/x86/kernel/cpu/mce/therm_throt.c.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import psutil

from trainfit.hardware.machine.parsing import natural_at, word_at
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import CPUS


def busy_seconds(cpus: Sequence[int]) -> float:
    """CPU seconds that these CPUs have worked, for whomever. Guests' time is part of user's."""
    rows = psutil.cpu_times(percpu=True)
    return float(
        sum(
            row.user + row.system + row.nice
            for row in (rows[cpu] for cpu in cpus if cpu < len(rows))
        )
    )


def idle_seconds(system: System, cpus: Sequence[int]) -> dict[str, float]:
    """Seconds that these CPUs have spent in each idle state, by its name; empty: not told."""
    spent: dict[str, float] = {}
    for cpu in cpus:
        folder = f"{CPUS}/cpu{cpu}/cpuidle"
        for name in system.names(folder).value or ():
            if re.fullmatch(r"state[0-9]{1,3}", name):
                word = word_at(system, f"{folder}/{name}/name")
                micro = natural_at(system, f"{folder}/{name}/time").value
                if word is not None and micro is not None:
                    spent[word] = spent.get(word, 0.0) + micro / 1e6
    return spent


def throttle_count(system: System, cpus: Sequence[int]) -> int | None:
    """How often these CPUs' cores were slowed for heat since the system started."""
    counts = [
        natural_at(system, f"{CPUS}/cpu{cpu}/thermal_throttle/core_throttle_count").value
        for cpu in cpus
    ]
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


def clock_here(system: System) -> float | None:
    """The clock of the CPU that this process ran on last, in Hz; the others may be idle."""
    fields = (system.text("/proc/self/stat").value or "").rpartition(")")[2].split()
    # proc(5): field 39 is the CPU; what follows the name begins with field 3.
    if len(fields) < 37 or not fields[36].isdigit():
        return None
    khz = natural_at(system, f"{CPUS}/cpu{fields[36]}/cpufreq/scaling_cur_freq").value
    return khz * 1e3 if khz else None
