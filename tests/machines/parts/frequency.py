"""Clocks and idle states of processors: cpufreq, intel_pstate, cpuidle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parts import Files, Part, each, link

CPU = "/sys/devices/system/cpu"


def cpufreq(
    driver: str,
    governor: str,
    governors: str,
    min_khz: int,
    max_khz: Sequence[int],
    current_khz: Sequence[int],
    more: dict[str, Sequence[str]] | None = None,
) -> Part:
    """A policy for each CPU, as ``driver`` exposes it; ``more`` are files that only some have."""
    count = len(max_khz)
    every = [str(number) for number in range(count)]
    values: dict[str, Sequence[str]] = {
        "affected_cpus": every,
        "related_cpus": every,
        "cpuinfo_max_freq": [str(khz) for khz in max_khz],
        "cpuinfo_min_freq": [str(min_khz)] * count,
        "cpuinfo_transition_latency": ["0"] * count,
        "scaling_available_governors": [governors] * count,
        "scaling_cur_freq": [str(current_khz[n % len(current_khz)]) for n in range(count)],
        "scaling_driver": [driver] * count,
        "scaling_governor": [governor] * count,
        "scaling_max_freq": [str(khz) for khz in max_khz],
        "scaling_min_freq": [str(min_khz)] * count,
        "scaling_setspeed": ["<unsupported>"] * count,
    }
    files: Files = {}
    for name, each_cpu in {**values, **(more or {})}.items():
        files |= each(f"{CPU}/cpufreq/policy{{}}/{name}", each_cpu)
    links = [link(f"../cpufreq/policy{number}") for number in range(count)]
    return {"files": files | each(f"{CPU}/cpu{{}}/cpufreq", links)}


def intel_pstate(
    governor: str,
    preference: str,
    min_khz: int,
    base_khz: Sequence[int],
    max_khz: Sequence[int],
    current_khz: Sequence[int],
) -> Part:
    """intel_pstate, active, with hardware-managed P-states (HWP)."""
    count = len(max_khz)
    offered = "default performance balance_performance balance_power power"
    part = cpufreq(
        "intel_pstate", governor, "performance powersave", min_khz, max_khz, current_khz,
        {
            "base_frequency": [str(khz) for khz in base_khz],
            "energy_performance_preference": [preference] * count,
            "energy_performance_available_preferences": [offered] * count,
        },
    )  # fmt: skip
    least = round(100 * min_khz / max(max_khz))
    for name, value in {
        "status": "active", "no_turbo": "0", "hwp_dynamic_boost": "0", "max_perf_pct": "100",
        "min_perf_pct": str(least), "num_pstates": str((max(max_khz) - min_khz) // 100_000 + 1),
        "turbo_pct": "36", "energy_efficiency": "0",
    }.items():  # fmt: skip
        part["files"][f"{CPU}/intel_pstate/{name}"] = value
    return part


def acpi_cpufreq(
    governor: str, count: int, base_khz: int, boost_khz: int, current_khz: Sequence[int]
) -> Part:
    """acpi-cpufreq of a server: three P-states, and boost above them by its own switch.

    Since Linux 5.11 ``cpuinfo_max_freq`` is the boost clock (from CPPC), while
    ``scaling_max_freq`` stays at the highest P-state: no limit was set by anyone.
    """
    steps = f"{base_khz} {base_khz * 3 // 4 // 1000 * 1000} 1500000"
    part = cpufreq(
        "acpi-cpufreq", governor,
        "conservative ondemand userspace powersave performance schedutil",
        1_500_000, [base_khz] * count, current_khz,
        {
            "scaling_available_frequencies": [steps] * count,
            "bios_limit": [str(base_khz)] * count,
            "cpuinfo_max_freq": [str(boost_khz)] * count,
            "freqdomain_cpus": [str(number) for number in range(count)],
        },
    )  # fmt: skip
    part["files"][f"{CPU}/cpufreq/boost"] = "1"
    return part


@dataclasses.dataclass(frozen=True)
class Idle:
    """A C-state as cpuidle writes it; times in microseconds."""

    name: str
    text: str
    latency: int
    residency: int
    usage: int
    time: int


POLL = Idle("POLL", "CPUIDLE CORE POLL IDLE", 0, 0, 40_122, 311_870)
ALDER_LAKE = (  # drivers/idle/intel_idle.c, adl_cstates
    POLL,
    Idle("C1E", "MWAIT 0x01", 2, 4, 18_220_412, 9_210_331_204),
    Idle("C6", "MWAIT 0x20", 220, 600, 9_910_223, 20_447_920_114),
    Idle("C8", "MWAIT 0x40", 280, 800, 4_402_113, 18_930_221_873),
    Idle("C10", "MWAIT 0x60", 680, 2000, 3_120_447, 60_229_140_338),
)
COFFEE_LAKE = (  # skl_cstates
    POLL,
    Idle("C1", "MWAIT 0x00", 2, 2, 3_220_412, 811_331_204),
    Idle("C1E", "MWAIT 0x01", 10, 20, 5_910_223, 2_447_920_114),
    Idle("C3", "MWAIT 0x10", 70, 100, 402_113, 930_221_873),
    Idle("C6", "MWAIT 0x20", 85, 200, 4_120_447, 6_229_140_338),
    Idle("C7s", "MWAIT 0x33", 124, 800, 120_331, 420_338_120),
    Idle("C8", "MWAIT 0x40", 200, 800, 6_220_118, 51_229_140_338),
)
AMD_SERVER = (  # ACPI _CST
    POLL,
    Idle("C1", "ACPI FFH MWAIT 0x0", 1, 2, 22_118_440, 17_220_118_431),
    Idle("C2", "ACPI IOPORT 0x814", 800, 1600, 8_330_118, 90_331_207_118),
)
TEGRA = (
    Idle("WFI", "ARM WFI", 1, 1, 9_220_118, 3_220_118_400),
    Idle("c7", "c7", 5000, 30000, 120_331, 60_118_331_270),
)


def idle(states: Sequence[Idle], count: int, driver: str) -> Part:
    """C-states of every CPU."""
    files: Files = {
        f"{CPU}/cpuidle/current_driver": driver,
        f"{CPU}/cpuidle/current_governor": "menu",
        f"{CPU}/cpuidle/current_governor_ro": "menu",
        f"{CPU}/cpuidle/available_governors": "ladder menu teo",
    }
    for number, state in enumerate(states):
        for name, value in {
            "name": state.name, "desc": state.text, "latency": state.latency, "disable": 0,
            "residency": state.residency, "usage": state.usage, "time": state.time,
            "above": state.usage // 9, "below": state.usage // 31,
        }.items():  # fmt: skip
            where = f"{CPU}/cpu{{}}/cpuidle/state{number}/{name}"
            files |= each(where, [str(value)] * count)
    return {"files": files}


def no_idle() -> Part:
    """A virtual machine whose host keeps the idle states to itself."""
    return {
        "files": {
            f"{CPU}/cpuidle/current_driver": "none",
            f"{CPU}/cpuidle/current_governor": "menu",
            f"{CPU}/cpuidle/current_governor_ro": "menu",
        }
    }
