"""Sockets, cores, kinds of cores and NUMA nodes, from /proc/cpuinfo and sysfs.

Sources: Linux's Documentation/admin-guide/cputopology.rst, Documentation/ABI/testing/
sysfs-devices-system-cpu, Documentation/ABI/stable/sysfs-devices-node; for hybrid Intel
perf-intel-hybrid of tools/perf/Documentation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import psutil

from trainfit.hardware.machine.parsing import (
    cpu_list,
    cpus_at,
    keyed_kilobytes,
    natural,
    natural_at,
    word_at,
)
from trainfit.hardware.machine.system import System
from trainfit.results.machine import CoreKind, Fact, NumaNode, absent, cannot_tell, known

CPUINFO = "/proc/cpuinfo"
CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
_TASKS = "/proc/self/task"

#: Cores whose greatest frequency or capacity is this much apart are of two kinds. Favoured cores
#: are a few per cent faster than their kind (Core i9-12900K: 5.2 and 5.1 GHz, its efficiency
#: cores 3.9 GHz; ark.intel.com), and so are AMD's preferred ones, in small steps.
_KINDS_APART = 1.15


@dataclasses.dataclass(frozen=True)
class CpuInfo:
    """/proc/cpuinfo: the lines of each processor by its number."""

    processors: Mapping[int, Mapping[str, str]]

    @property
    def first(self) -> Mapping[str, str]:
        return next(iter(self.processors.values()), {})

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(self.first.get("flags", "").split())


def read_cpuinfo(system: System) -> Fact[CpuInfo]:
    """Every processor that /proc/cpuinfo lists."""
    return system.text(CPUINFO).map(_cpuinfo, "a list of processors")


def _cpuinfo(text: str) -> CpuInfo | None:
    processors: dict[int, Mapping[str, str]] = {}
    for block in re.split(r"\n[ \t]*\n", text):
        lines = (line.partition(":") for line in block.split("\n"))
        entries = {key.strip(): value.strip() for key, colon, value in lines if colon}
        number = entries.get("processor", "")
        if number.isascii() and number.isdigit() and len(number) < 6:
            processors[int(number)] = entries
    return CpuInfo(processors) if processors else None


def is_virtual(cpuinfo: Fact[CpuInfo]) -> bool:
    """Does the processor say that a hypervisor runs it (x86 only)?"""
    return cpuinfo.value is not None and "hypervisor" in cpuinfo.value.flags


# --- CPUs, cores, sockets ---------------------------------------------------------------------


def online_cpus(system: System, cpuinfo: Fact[CpuInfo]) -> Fact[tuple[int, ...]]:
    """The logical CPUs that are switched on."""
    online = cpus_at(system, f"{CPUS}/online")
    if online.value:
        return online
    if cpuinfo.value is not None:  # it lists no others
        return known(tuple(sorted(cpuinfo.value.processors)), CPUINFO)
    return cannot_tell(online.source, online.reason or "it lists no CPU")


def cores(
    system: System, online: Sequence[int], cpuinfo: Fact[CpuInfo]
) -> Fact[tuple[tuple[int, ...], ...]]:
    """The physical cores, each as the logical CPUs (SMT siblings) on it."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
        siblings = [cpus_at(system, f"{CPUS}/cpu{cpu}/topology/{name}").value for cpu in online]
        if found := _partition(online, siblings):
            return known(found, f"{CPUS}/cpu*/topology/{name}")
    entries = cpuinfo.value.processors if cpuinfo.value is not None else {}
    keys = [_core_of(entries.get(cpu, {})) for cpu in online]
    if keys and None not in keys:
        groups: dict[object, list[int]] = {}
        for cpu, key in zip(online, keys, strict=True):
            groups.setdefault(key, []).append(cpu)
        return known(tuple(map(tuple, groups.values())), f"{CPUINFO} (core id)")
    return cannot_tell(f"{CPUS}/cpu*/topology", "neither it nor /proc/cpuinfo lists the cores")


def _core_of(entry: Mapping[str, str]) -> tuple[int, int] | None:
    try:
        return natural(entry["physical id"]), natural(entry["core id"])
    except (KeyError, ValueError):
        return None


def _partition(
    online: Sequence[int], siblings: Sequence[tuple[int, ...] | None]
) -> tuple[tuple[int, ...], ...]:
    """The distinct sets of siblings; empty if they do not hold every CPU exactly once."""
    numbers = set(online)
    distinct = {tuple(cpu for cpu in sibling or () if cpu in numbers) for sibling in siblings} - {
        ()
    }
    listed = [cpu for each in distinct for cpu in each]
    return tuple(sorted(distinct)) if sorted(listed) == sorted(numbers) else ()


def sockets(system: System, online: Sequence[int], cpuinfo: Fact[CpuInfo]) -> Fact[int]:
    """The packages that the CPUs are in."""
    source = f"{CPUS}/cpu*/topology/physical_package_id"
    ids = [
        natural_at(system, f"{CPUS}/cpu{cpu}/topology/physical_package_id").value for cpu in online
    ]
    if not ids or None in ids:  # -1 too: the firmware does not say
        entries = cpuinfo.value.processors if cpuinfo.value is not None else {}
        texts = [entries.get(cpu, {}).get("physical id") for cpu in online]
        if not texts or None in texts:
            return cannot_tell(source, "neither it nor /proc/cpuinfo lists each CPU's package")
        return known(len(set(texts)), f"{CPUINFO} (physical id)")
    if len(set(ids)) > 1 and _clusters_are_packages(system):
        return cannot_tell(source, "before Linux 6.0 it numbers clusters of cores on this board")
    return known(len(set(ids)), source)


def _clusters_are_packages(system: System) -> bool:
    """Linux before 6.0 took a device tree's clusters for packages."""
    release = re.match(r"([0-9]{1,4})\.", str(system.system_name().get("release", "")))
    board = system.exists("/proc/device-tree/model")
    return board and (release is None or int(release[1]) < 6)


# --- Kinds of cores ---------------------------------------------------------------------------


def core_kinds(
    system: System,
    online: Sequence[int],
    physical: Fact[tuple[tuple[int, ...], ...]],
    cpuinfo: Fact[CpuInfo],
) -> Fact[tuple[CoreKind, ...]]:
    """Performance and efficiency cores where there are both, else one kind, "uniform"."""
    if physical.value is None:
        return cannot_tell(physical.source, physical.reason)
    frequencies = {cpu: _max_khz(system, cpu) for cpu in online}
    groups = _groups(system, online, frequencies, cpuinfo)
    if groups.value is None:
        return cannot_tell(groups.source, groups.reason)
    performance, efficiency = groups.value
    names = ("performance", "efficiency") if efficiency else ("uniform", "efficiency")
    kinds = []
    for name, cpus in zip(names, (performance, efficiency), strict=True):
        if not cpus:
            continue
        count = sum(1 for core in physical.value if core[0] in cpus)
        fastest = max((khz for cpu in cpus if (khz := frequencies[cpu])), default=None)
        hertz = None if fastest is None else fastest * 1e3
        kinds.append(CoreKind(name, tuple(sorted(cpus)), count, hertz))  # type: ignore[arg-type]
    return known(tuple(kinds), groups.source)


_Groups = tuple[frozenset[int], frozenset[int]]


def _groups(
    system: System,
    online: Sequence[int],
    frequencies: Mapping[int, int | None],
    cpuinfo: Fact[CpuInfo],
) -> Fact[_Groups]:
    """The CPUs on performance cores (or of the only kind), and those on efficiency cores."""
    everyone = frozenset(online)
    if (hybrid := _intel_hybrid(system, everyone)) is not None:
        return hybrid
    uniform: _Groups = (everyone, frozenset())
    alike: list[str] = []
    for source, value in _signals(system, frequencies, cpuinfo):
        values = {cpu: number for cpu in online if (number := value(cpu))}
        if len(values) == len(everyone):
            split = _split(values)
            if split[1]:
                return known(split, source)
            alike.append(source)
    if alike:
        return known(uniform, alike[0])
    if len(everyone) == 1:
        return known(uniform, f"{CPUS}/online")
    if system.exists("/sys/devices/cpu"):
        # The kernel names its counters cpu_core and cpu_atom where cores differ, else cpu.
        return known(uniform, "/sys/devices/cpu")
    where = "a hypervisor hides them" if is_virtual(cpuinfo) else "nothing here distinguishes them"
    return cannot_tell(
        CPUS, f"{where}: no cpu_core, no cpu_capacity, no cpuinfo_max_freq of each CPU"
    )


def _intel_hybrid(system: System, everyone: frozenset[int]) -> Fact[_Groups] | None:
    """Groups of cores by the counters of Intel's hybrid processors (Linux 5.13); ``None`` on
    others."""
    performance = cpus_at(system, "/sys/devices/cpu_core/cpus")
    efficient: set[int] = set()
    for name in ("cpu_atom", "cpu_lowpower"):
        efficient.update(cpus_at(system, f"/sys/devices/{name}/cpus").value or ())
    if performance.value is None:
        return None
    slow = frozenset(efficient) & everyone
    fast = frozenset(performance.value) & everyone
    if fast & slow or fast | slow != everyone or not fast:
        return None
    return known((fast, slow), performance.source)


def _signals(
    system: System, frequencies: Mapping[int, int | None], cpuinfo: Fact[CpuInfo]
) -> list[tuple[str, Callable[[int], int | None]]]:
    """What grows with the speed of a core, the most telling first."""

    def file(name: str) -> Callable[[int], int | None]:
        return lambda cpu: natural_at(system, f"{CPUS}/cpu{cpu}/{name}").value

    signals = [
        (f"{CPUS}/cpu*/cpu_capacity", file("cpu_capacity")),
        (f"{CPUS}/cpu*/cpufreq/cpuinfo_max_freq", lambda cpu: frequencies[cpu]),
    ]
    vendor = cpuinfo.value.first.get("vendor_id", "") if cpuinfo.value is not None else ""
    if vendor not in ("AuthenticAMD", "HygonGenuine"):
        # There it ranks cores of one kind (amd-pstate.rst, "Preferred Core").
        name = "acpi_cppc/highest_perf"
        signals.append((f"{CPUS}/cpu*/{name}", file(name)))
    return signals


def _split(values: Mapping[int, int]) -> _Groups:
    """The CPUs above and below the widest gap, if it is one between kinds."""
    steps = sorted(set(values.values()))
    gaps = [(high / low, high) for low, high in pairwise(steps)]
    widest, above = max(gaps, default=(1.0, 0))
    if widest < _KINDS_APART:
        return frozenset(values), frozenset()
    fast = frozenset(cpu for cpu, value in values.items() if value >= above)
    return fast, frozenset(values) - fast


def _max_khz(system: System, cpu: int) -> int | None:
    for place in (f"{CPUS}/cpu{cpu}/cpufreq", f"{CPUS}/cpufreq/policy{cpu}"):
        if khz := natural_at(system, f"{place}/cpuinfo_max_freq").value:
            return khz
    return None


# --- NUMA -------------------------------------------------------------------------------------


def numa_nodes(system: System) -> Fact[tuple[NumaNode, ...]]:
    """The NUMA nodes; one without CPUs is memory only."""
    names = system.names(NODES)
    if names.value is None:
        if names.is_absent and system.exists(CPUS):
            return absent(NODES, "this kernel lists no NUMA nodes")
        return cannot_tell(NODES, names.reason)
    nodes = []
    for name in names.value:
        if not re.fullmatch(r"node[0-9]{1,5}", name):
            continue
        cpus = system.text(f"{NODES}/{name}/cpulist").map(cpu_list, "a list of CPUs")
        if cpus.value is None:
            return cannot_tell(cpus.source, cpus.reason)
        memory = system.text(f"{NODES}/{name}/meminfo").map(_node_memory, "a node's memory")
        nodes.append(NumaNode(int(name.removeprefix("node")), cpus.value, memory.value))
    if not nodes:
        return cannot_tell(NODES, "it contains no node")
    return known(tuple(sorted(nodes, key=lambda node: node.node)), f"{NODES}/node*/cpulist")


def _node_memory(text: str) -> int:
    return keyed_kilobytes(text, "MemTotal")


# ---
# Counters of CPU activity: work, time in each C-state, throttling, clocks.
#
# Sources: Documentation/admin-guide/pm/cpuidle.rst (``time`` is in microseconds), and
# arch/x86/kernel/cpu/mce/therm_throt.c.


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
    values = [count for count in counts if count is not None]
    return sum(values) if values else None


def thread_seconds(system: System) -> dict[int, float]:
    """Seconds that each thread of this process was on a core or waited for one, by the kernel's
    number of it; empty: not told.

    Source: Documentation/scheduler/sched-stats.rst (schedstat of a task, in nanoseconds).
    """
    spent: dict[int, float] = {}
    for name in system.names(_TASKS).value or ():
        words = (system.text(f"{_TASKS}/{name}/schedstat").value or "").split()
        if name.isdigit() and len(words) >= 2 and words[0].isdigit() and words[1].isdigit():
            spent[int(name)] = (int(words[0]) + int(words[1])) / 1e9
    return spent


def clock_here(system: System) -> float | None:
    """The clock of the CPU that this process ran on last, in Hz; the others may be idle."""
    fields = (system.text("/proc/self/stat").value or "").rpartition(")")[2].split()
    # proc(5): field 39 is the CPU; what follows the name begins with field 3.
    if len(fields) < 37 or not fields[36].isdigit():
        return None
    khz = natural_at(system, f"{CPUS}/cpu{fields[36]}/cpufreq/scaling_cur_freq").value
    return khz * 1e3 if khz else None
