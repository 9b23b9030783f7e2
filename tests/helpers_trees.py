"""Small machines for tests of the hardware readers, written from the kernel's formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from trainfit.hardware.machine.limits import read_limits, read_memory, read_threads
from trainfit.hardware.machine.processor import read_cpu
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.storage import read_storage
from trainfit.hardware.machine.surroundings import read_surroundings
from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact

CPU = "/sys/devices/system/cpu"
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
ROOT_MOUNT = "26 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw"


def machine(
    files: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    **calls: Any,
) -> RecordedSystem:
    """A recorded machine of these files and calls."""
    calls = {
        "affinity": "0-3",
        "uname": {"release": "6.8.0-45-generic", "machine": "x86_64"},
    } | calls
    document = {"files": files, "environment": dict(environment or {}), "calls": calls}
    return RecordedSystem(document)


def readings(system: System, data: str | None = "/data") -> list[Any]:
    """Everything that the readers under test say of a machine."""
    return [
        read_cpu(system),
        read_memory(system),
        read_storage(system, data),
        read_limits(system),
        read_threads(system),
        read_surroundings(system),
    ]


def facts(reading: Any) -> dict[str, Fact[Any]]:
    values = {f.name: getattr(reading, f.name) for f in dataclasses.fields(reading)}
    return {name: value for name, value in values.items() if isinstance(value, Fact)}


def cpuinfo(count: int, name: str, flags: str = "fpu aperfmperf", **lines: str) -> str:
    """/proc/cpuinfo of an x86 processor."""
    blocks = []
    for cpu in range(count):
        entries = {"processor": cpu, "vendor_id": "GenuineIntel", "model name": name}
        entries |= {"cpu MHz": f"{1700 + cpu}.000", "flags": flags} | lines
        blocks.append("".join(f"{key}\t: {value}\n" for key, value in entries.items()))
    return "\n".join(blocks)


def siblings(pairs: int, singles: int = 0, pair_next: bool = True) -> list[str]:
    """thread_siblings_list of each CPU: first pairs of SMT siblings, then single CPUs."""
    if pair_next:
        lists = [f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" for cpu in range(2 * pairs)]
    else:  # the siblings of core n are n and n + pairs, as on servers
        lists = [f"{cpu % pairs},{cpu % pairs + pairs}" for cpu in range(2 * pairs)]
    return lists + [str(2 * pairs + cpu) for cpu in range(singles)]


def alder_lake(pairs: int = 8, singles: int = 8) -> dict[str, Any]:
    """A Core i9-12900K: 8 performance cores with SMT, two favoured, and 8 efficiency cores."""
    count, last = 2 * pairs + singles, 2 * pairs + singles - 1
    fastest = [5100000] * 2 * pairs + [3900000] * singles
    fastest[pairs : pairs + 4] = [5200000] * len(fastest[pairs : pairs + 4])
    kinds = [str(khz) for khz in fastest]
    each, policy = f"{CPU}/cpu{{0-{last}}}", f"{CPU}/cpufreq/policy{{0-{last}}}"
    partition = "pci0000:00/0000:00:06.0/nvme/nvme0/nvme0n1/nvme0n1p2"
    return {
        "/proc/cpuinfo": cpuinfo(count, "12th Gen Intel(R) Core(TM) i9-12900K"),
        f"{CPU}/online": f"0-{last}\n",
        f"{each}/topology/core_cpus_list": siblings(pairs, singles),
        f"{each}/topology/physical_package_id": "0\n",
        f"{policy}/affected_cpus": [f"{cpu}\n" for cpu in range(count)],
        f"{policy}/scaling_driver": "intel_pstate\n",
        f"{policy}/scaling_governor": "powersave\n",
        f"{policy}/scaling_available_governors": "performance powersave\n",
        f"{policy}/energy_performance_preference": "balance_performance\n",
        f"{policy}/scaling_cur_freq": "1700000\n",
        f"{policy}/scaling_max_freq": kinds,
        f"{policy}/cpuinfo_max_freq": kinds,
        f"{CPU}/intel_pstate/status": "active\n",
        f"{CPU}/intel_pstate/no_turbo": "0\n",
        f"{CPU}/cpu0/cpuidle/state{{0-2}}/name": ["POLL\n", "C1E\n", "C10\n"],
        f"{CPU}/cpu0/cpuidle/state{{0-2}}/latency": ["0\n", "2\n", "230\n"],
        f"{CPU}/cpu0/cpuidle/state{{0-2}}/residency": ["0\n", "4\n", "700\n"],
        f"{CPU}/cpu0/cpuidle/state{{0-2}}/disable": ["0\n", "0\n", "1\n"],
        "/sys/devices/cpu_core/cpus": f"0-{2 * pairs - 1}\n",
        "/sys/devices/cpu_atom/cpus": f"{2 * pairs}-{last}\n",
        "/sys/devices/system/node/node0/cpulist": f"0-{last}\n",
        "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       65536000 kB\n",
        "/proc/meminfo": (
            "MemTotal:       65536000 kB\nMemFree:        1000 kB\nMemAvailable:   60000000 kB\n"
            "SwapTotal:       2097148 kB\nSwapFree:        2000000 kB\n"
        ),
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "/proc/self/mountinfo": f"{ROOT_MOUNT}\n{V2_MOUNT}\n",
        "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/memory.max": "max\n",
        "/sys/dev/block/259:2": {"link": f"../../devices/{partition}"},
        "/sys/class/block/nvme0n1p2": {"link": f"../../devices/{partition}"},
        f"/sys/devices/{partition}/partition": "2\n",
        "/sys/class/block/nvme0n1": {"link": f"../../devices/{partition.rpartition('/')[0]}"},
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\n',
        "/sys/class/dmi/id/sys_vendor": "ASUS\n",
        "/sys/class/dmi/id/product_name": "System Product Name\n",
    }


def alder_lake_machine(**changes: Any) -> RecordedSystem:
    calls = {
        "affinity": "0-23",
        "limits": {"NOFILE": [1024, 1048576], "MEMLOCK": [None, None], "NPROC": [255000, 255000]},
        "spaces": {"/": [10**12, 4 * 10**11], "/dev/shm": [32 << 30, 31 << 30]},
        "folder": "/home/user",
        "sizes": {"/data": {"/data/a.bin": 100, "/data/b.bin": 2 << 30}},
        "read_rates": {"/data/b.bin": [3e9, 9e9]},
    }
    return machine(alder_lake(), **(calls | changes))
