"""Limits of this process, its memory, and the thread settings that its libraries will follow.

Memory is RAM, swap, what the cgroups leave of it, and /dev/shm.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from trainfit.hardware.machine.cgroup import CgroupLevel, own_levels, tightest
from trainfit.hardware.machine.parsing import asked, cpus_at, keyed_kilobytes, natural, natural_at
from trainfit.hardware.machine.processor import read_affinity
from trainfit.hardware.machine.system import Space, System
from trainfit.hardware.machine.topology import cores, online_cpus, read_cpuinfo
from trainfit.results.machine import (
    Fact,
    Limits,
    Memory,
    ThreadSettings,
    absent,
    cannot_tell,
    known,
)

# ---
# How libraries interpret thread variables that are not plain numbers.
#
# Some ignore such a value, some read the beginning of it, MKL takes one thread, and NumExpr does
# not start. Sources: GCC's ``libgomp/env.c`` (a list of positive integers, else "Invalid value" and
# as without it), OpenBLAS' ``driver/others/openblas_env.c`` (``atoi``, nothing below 1;
# OMP_NUM_THREADS likewise where its own says nothing), NumExpr's ``utils.py`` (``int``), and runs
# of PyTorch's builds with MKL 2024.2 under each value: anything but digits gives
# ``torch.get_num_threads() == 1``, 0 and nothing are as if it were not set.


#: The variables that set threads (or where they run).
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "MKL_DYNAMIC",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "OPENCV_FOR_THREADS_NUM",
    "TORCH_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)

_OMP: Final = "OMP_NUM_THREADS"
_OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
_MKL: Final = "MKL_NUM_THREADS"
_NUMEXPR: Final = ("NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS")
#: Variables whose values are judged.
JUDGED: Final = (_OMP, _MKL, _OPENBLAS, *_NUMEXPR)
#: More digits than these overflow somewhere.
_DIGITS: Final = 9
#: Characters of a value that are shown.
_SHOWN: Final = 40


def misread(environment: Mapping[str, str]) -> dict[str, str]:
    """What comes of each variable that holds no plain number of threads, in words that follow its
    name and value; those that say what they mean are left out."""
    told = {_OMP: _of_openmp, _MKL: _of_mkl, _OPENBLAS: _of_openblas}
    told |= dict.fromkeys(_NUMEXPR, _of_numexpr)
    found = {}
    for name in JUDGED:
        if name in environment and (said := told[name](environment[name], environment)):
            found[name] = said
    return found


def misread_lines(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each variable that is misread, with what to do."""
    return tuple(
        f"{name}={environment[name][:_SHOWN]!r} {what}; set a positive integer, or unset it"
        for name, what in misread(environment).items()
    )


def _of_openmp(value: str, environment: Mapping[str, str]) -> str:
    if all(map(_is_count, value.split(","))):
        return ""
    text = "is ignored (OpenMP expects a positive integer): the default thread count applies"
    if (number := _leading(value)) and not _leading(environment.get(_OPENBLAS, "")):
        text += f"; OpenBLAS reads it as {number}"
    return text


def _of_mkl(value: str, _: Mapping[str, str]) -> str:
    if not is_one_thread_to_mkl(value):
        zero = value and not value.strip("0")
        return "is ignored: MKL uses its default thread count" if zero else ""
    return "is not a number to MKL, which then uses one thread, as does PyTorch on x86"


def is_one_thread_to_mkl(value: str) -> bool:
    """Does MKL take one thread for this MKL_NUM_THREADS, as it is not made of digits alone?"""
    return bool(value) and re.fullmatch("[0-9]+", value) is None


def _of_openblas(value: str, _: Mapping[str, str]) -> str:
    number = _leading(value)
    if not number:
        return f"is ignored: OpenBLAS follows {_OMP} instead, or uses one thread per CPU"
    return "" if _is_count(value) else f"is read as {number} by OpenBLAS"


def _of_numexpr(value: str, _: Mapping[str, str]) -> str:
    if not value or _is_count(value):
        return ""
    return "makes `import numexpr` fail (it expects a positive integer)"


def _is_count(text: str) -> bool:
    """One positive integer, as libraries that look closely want it."""
    word = text.strip().removeprefix("+")
    is_number = word.isascii() and word.isdigit() and len(word) <= _DIGITS
    return is_number and bool(word.strip("0"))


def _leading(text: str) -> int:
    """What C's ``atoi`` reads, if it is positive; else 0."""
    match = re.match(r"\s*\+?([0-9]{1,9})", text)
    return int(match[1]) if match else 0


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
        address_space_bytes=_limit(system, "AS", 0),
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


def read_threads(system: System) -> ThreadSettings:
    """The thread variables that are set, and what PyTorch and OpenCV make of them."""
    environment = system.environment
    return ThreadSettings(
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


MEMINFO = "/proc/meminfo"
SHM = "/dev/shm"

#: Version 1 writes "no limit" as the greatest number of whole pages below 2⁶³ bytes.
_NO_LIMIT = 1 << 62


def read_memory(system: System) -> Memory:
    """Every fact of the memory; none of them raises."""
    swap_total = _meminfo(system, "SwapTotal")
    limit, limit_used = _cgroup_limit(system)
    space: Fact[Space] = asked(SHM, lambda: system.space(SHM))
    return Memory(
        total_bytes=_meminfo(system, "MemTotal"),
        available_bytes=_meminfo(system, "MemAvailable"),
        swap_total_bytes=_swap(swap_total, swap_total),
        swap_used_bytes=_swap(swap_total, _swap_used(system, swap_total)),
        limit_bytes=limit,
        limit_used_bytes=limit_used,
        shm_total_bytes=space.map(lambda found: found.total, "a size"),
        shm_free_bytes=space.map(lambda found: found.free, "a size"),
    )


def _meminfo(system: System, key: str) -> Fact[int]:
    text = system.text(MEMINFO)
    if text.value is None:
        return cannot_tell(MEMINFO, text.reason)
    try:
        return known(keyed_kilobytes(text.value, key), f"{MEMINFO} ({key})")
    except ValueError as error:
        return cannot_tell(f"{MEMINFO} ({key})", str(error))


def _swap_used(system: System, total: Fact[int]) -> Fact[int]:
    free = _meminfo(system, "SwapFree")
    if total.value is None or free.value is None:
        return free
    if free.value > total.value:
        return cannot_tell(free.source, "free exceeds total")
    return known(total.value - free.value, f"{MEMINFO} (SwapTotal, SwapFree)")


def _swap(total: Fact[int], fact: Fact[int]) -> Fact[int]:
    return absent(total.source, "no swap is configured") if total.value == 0 else fact


# --- The cgroups' limit -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedLimit:
    """Memory in bytes that a cgroup grants to all that run in it."""

    limit_bytes: int
    level: CgroupLevel

    def used_bytes(self, system: System) -> int | None:
        """What counts towards it now; ``None``: not told."""
        return _used(system, self.level).value


def shared_limit(system: System, process: str) -> SharedLimit | None:
    """The least memory limit of a process' cgroups; ``None``: none, or it cannot be told."""
    value = tightest(system, "memory", lambda level: _limit_of(system, level), process).value
    return None if value is None else SharedLimit(int(value[0]), value[1])


def _cgroup_limit(system: System) -> tuple[Fact[int], Fact[int]]:
    """The least memory limit of the own cgroup and those above, and what counts towards it."""
    found = tightest(system, "memory", lambda level: _limit_of(system, level))
    hidden = _hidden_limit(system)
    if found.value is None:
        if hidden.value is None:
            nothing: Fact[int] = Fact(found.state, None, found.source, found.reason)
            return nothing, nothing
        return hidden, _of_another(hidden)
    limit, level = found.value
    if hidden.value is not None and hidden.value < limit:
        return hidden, _of_another(hidden)
    return known(int(limit), found.source), _used(system, level)


def _of_another(limit: Fact[int]) -> Fact[int]:
    return cannot_tell(limit.source, "the limit is of a cgroup that is not visible from here")


def _limit_of(system: System, level: CgroupLevel) -> Fact[float]:
    text = system.text(level.file("memory.limit_in_bytes", "memory.max"))
    if text.value == "max":
        return absent(text.source, "no limit")
    limit = text.map(natural, "a number of bytes")
    if limit.value is not None and limit.value >= _NO_LIMIT:
        return absent(text.source, "no limit")
    return limit.map(float, "a number of bytes")


def _hidden_limit(system: System) -> Fact[int]:
    """Version 1 knows in each cgroup the least limit of all above it, visible or not."""
    levels = own_levels(system, "memory")
    for level in levels.value.levels if levels.value is not None else ():
        if level.version != 1:
            continue
        stat = system.text(level.file("memory.stat", ""))
        limit = stat.map(lambda text: _entry(text, "hierarchical_memory_limit"), "a limit")
        if limit.value is not None and 0 < limit.value < _NO_LIMIT:
            return known(limit.value, f"{stat.source} (hierarchical_memory_limit)")
        break
    return absent("memory.stat", "no limit in parent cgroups")


def _used(system: System, level: CgroupLevel) -> Fact[int]:
    """What the cgroup holds, less file cache that the kernel drops when memory runs short.

    That part is ``inactive_file``, as Kubernetes' working set and `docker stats` have it.
    """
    usage = natural_at(system, level.file("memory.usage_in_bytes", "memory.current"))
    stat = system.text(level.file("memory.stat", "memory.stat"))
    key = level.file("total_inactive_file", "inactive_file").rpartition("/")[2]
    cache = stat.map(lambda text: _entry(text, key), f"statistics with {key}")
    for fact in (usage, cache):
        if fact.value is None:
            return cannot_tell(fact.source, fact.reason)
    assert usage.value is not None and cache.value is not None
    return known(max(usage.value - cache.value, 0), f"{usage.source} less {key}")


def _entry(text: str, key: str) -> int | None:
    match = re.search(rf"(?m)^{key} ([0-9]{{1,20}})$", text)
    return None if match is None else natural(match[1])
