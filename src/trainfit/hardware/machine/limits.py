"""Limits of this process, and the thread settings that its libraries will follow."""

from __future__ import annotations

from typing import Final

from trainfit.hardware.cpu.processor import read_affinity
from trainfit.hardware.cpu.topology import cores, online_cpus, read_cpuinfo
from trainfit.hardware.host.parsing import asked, cpus_at, natural
from trainfit.hardware.host.system import System
from trainfit.hardware.host.thread_variables import THREAD_VARIABLES, is_one_thread_to_mkl
from trainfit.results.files.facts import Fact, absent, cannot_tell, known
from trainfit.results.machine.machine import Limits, Threads

#: Descriptors that Python, CUDA and the data set itself hold in a process that trains.
OWN_FILES: Final = 128

_CGROUPS = "/sys/fs/cgroup"


# --- Limits -----------------------------------------------------------------------------------


def read_limits(system: System) -> Limits:
    """Every limit, the soft one if not said otherwise; none of them raises."""
    return Limits(
        open_files=_limit(system, "NOFILE", 0),
        open_files_hard=_limit(system, "NOFILE", 1),
        locked_memory_bytes=_limit(system, "MEMLOCK", 0),
        processes=_limit(system, "NPROC", 0),
    )


def _limit(system: System, name: str, which: int) -> Fact[int]:
    pair = asked(f"getrlimit(RLIMIT_{name})", lambda: system.limit(name))
    if pair.value is None:
        return Fact(pair.state, None, pair.source, pair.reason)
    value = pair.value[which]
    if value is None:
        return absent(pair.source, "unlimited")
    return pair.map(lambda _: value if value >= 0 else None, "a limit")


# --- Threads ----------------------------------------------------------------------------------


def read_threads(system: System) -> Threads:
    """The thread variables that are set, and what PyTorch and OpenCV make of them."""
    environment = system.environment
    return Threads(
        variables={
            name: str(environment[name]) for name in THREAD_VARIABLES if name in environment
        },
        opencv_default=_opencv_threads(system),
        torch_default=_torch_threads(system),
    )


def _variable(system: System, name: str) -> int | None:
    """The number in a variable; ``None`` for what its library ignores (not set, 0, no number)."""
    try:
        # OMP_NUM_THREADS may hold a number for each level of nesting: "4,2".
        return natural(str(system.environment.get(name, "")).split(",")[0]) or None
    except ValueError:
        return None


def _torch_threads(system: System) -> Fact[int]:
    """``torch.get_num_threads()`` in a fresh process, as PyTorch's sources have it.

    x86 (ATen/ParallelOpenMP.cpp): ``mkl_get_max_threads()``: MKL_NUM_THREADS, else
    OMP_NUM_THREADS, but unless MKL_DYNAMIC is FALSE no more than the physical cores in the
    affinity, which is also its number where neither is set. Other processors
    (ATen/ParallelCommon.cpp): MKL_NUM_THREADS, else OMP_NUM_THREADS, else all physical cores.
    """
    machine = str(system.system_name().get("machine", ""))
    if machine not in ("x86_64", "AMD64", "aarch64"):
        return cannot_tell("uname", f"PyTorch's rule for {machine or 'this machine'} is not known")
    is_x86 = machine != "aarch64"
    wanted, source = _variable(system, "MKL_NUM_THREADS"), "MKL_NUM_THREADS"
    if is_x86 and is_one_thread_to_mkl(str(system.environment.get(source, ""))):
        return known(1, f"{source}, not a number to MKL")
    if wanted is None:
        wanted, source = _variable(system, "OMP_NUM_THREADS"), "OMP_NUM_THREADS"
    fixed = str(system.environment.get("MKL_DYNAMIC", "")).strip().upper() == "FALSE"
    if wanted is not None and (fixed or not is_x86):
        return known(wanted, source)
    physical = _physical_cores(system, in_affinity=is_x86)
    if physical.value is None or wanted is None:
        return physical
    return known(min(wanted, physical.value), f"{source}, {physical.source}")


def _physical_cores(system: System, in_affinity: bool) -> Fact[int]:
    cpuinfo = read_cpuinfo(system)
    online = online_cpus(system, cpuinfo)
    physical = cores(system, online.value or (), cpuinfo)
    if physical.value is None or not in_affinity:
        return physical.map(len, "cores")
    affinity = read_affinity(system)
    if affinity.value is None:
        return cannot_tell(affinity.source, affinity.reason)
    allowed = set(affinity.value)
    count = sum(1 for core in physical.value if allowed.intersection(core))
    source = f"physical cores of {physical.source} in {affinity.source}"
    return known(count, source) if count else cannot_tell(source, "no core is in the affinity")


def _opencv_threads(system: System) -> Fact[int]:
    """``cv2.getNumThreads()`` of OpenCV 4.5.2 and newer: modules/core/src/parallel.cpp.

    OPENCV_FOR_THREADS_NUM, else the least of: CPUs online, in the affinity, in version 1's
    cpuset, and the quota in whole cores, at least 1, of the cgroup's mount points.
    """
    if wanted := _variable(system, "OPENCV_FOR_THREADS_NUM"):
        return known(wanted, "OPENCV_FOR_THREADS_NUM")
    affinity, online = read_affinity(system), online_cpus(system, read_cpuinfo(system))
    if affinity.value is None:
        return cannot_tell(affinity.source, affinity.reason)
    counts = {affinity.source: len(affinity.value), online.source: len(online.value or ())}
    cpuset = cpus_at(system, f"{_CGROUPS}/cpuset/cpuset.cpus")
    counts[cpuset.source] = len(cpuset.value or ())
    for source, read in (
        (f"{_CGROUPS}/cpu.max", _quota_of_version_2),
        (f"{_CGROUPS}/cpu/cpu.cfs_quota_us", _quota_of_version_1),
    ):
        counts[source] = read(system, source) or 0
    least = min((count, source) for source, count in counts.items() if count)
    return known(*least)


def _quota_of_version_2(system: System, path: str) -> int | None:
    return system.text(path).map(_whole_cores, "a quota").value


def _quota_of_version_1(system: System, path: str) -> int | None:
    period = system.text(path.replace("quota", "period")).value
    return system.text(path).map(lambda quota: _whole_cores(f"{quota} {period}"), "a quota").value


def _whole_cores(text: str) -> int:
    quota, period = (natural(number) for number in text.split())
    return max(1, quota // period) if quota else 0
