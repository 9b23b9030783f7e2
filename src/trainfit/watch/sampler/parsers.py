"""The counters of /proc and cgroups, from the bytes that the kernel writes.

Nothing here raises: a text that is not what proc(5) says gives ``None``. These run hundreds of
times a second, which is why they split bytes where the readers of `hardware/host` search texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Final

#: The kernel's counters have 64 bits: 20 digits at most.
_DIGITS: Final = 20
#: Unit of /proc/diskstats (Documentation/admin-guide/iostats.rst), whatever the disk's own is.
_SECTOR: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStat:
    """/proc/PID/stat of a process or a thread; times in clock ticks, memory in pages."""

    name: bytes
    state: bytes
    parent: int
    cpu_ticks: int
    threads: int
    started_ticks: int
    rss_pages: int
    cpu: int
    """The CPU that it ran on last; -1: a kernel that does not say."""


def process_stat(content: bytes) -> ProcessStat | None:
    """Of a line as proc(5) has it. The name may hold blanks and brackets itself."""
    opened, closed = content.find(b"("), content.rfind(b")")
    fields = content[closed + 1 :].split()
    if not 0 <= opened < closed or len(fields) < 22:
        return None
    # Fields begin with proc(5)'s number 3.
    numbers = [_whole(fields[place]) for place in (1, 11, 12, 17, 19, 21)]
    parent, user, system, threads, started, rss = numbers
    if parent is None or user is None or system is None or started is None:
        return None
    cpu = _whole(fields[36]) if len(fields) > 36 else None
    return ProcessStat(
        content[opened + 1 : closed],
        fields[0],
        parent,
        user + system,
        threads or 0,
        started,
        rss or 0,
        -1 if cpu is None else cpu,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTicks:
    """Clock ticks of all CPUs together since the system started."""

    busy: int
    iowait: int


def cpu_ticks(content: bytes) -> CpuTicks | None:
    """Of /proc/stat: its first line. A guest's time is part of the user's; stolen time is spent
    by others than this machine."""
    fields = content.partition(b"\n")[0].split()
    numbers = [_whole(field) for field in fields[1:8]]
    if fields[:1] != [b"cpu"] or len(numbers) < 7:
        return None
    user, nice, system, _, iowait, interrupts, soft = numbers
    if None in (user, nice, system, iowait, interrupts, soft):
        return None
    busy = sum(each or 0 for each in (user, nice, system, interrupts, soft))
    return CpuTicks(busy, iowait or 0)


def run_queue(content: bytes) -> tuple[int, int] | None:
    """Of /proc/loadavg: threads that run or wait for a core, and the number (PID) that was given
    out last."""
    fields = content.split()
    if len(fields) < 5:
        return None
    running, last = _whole(fields[3].partition(b"/")[0]), _whole(fields[4])
    return None if running is None or last is None else (running, last)


def schedstat_ns(content: bytes) -> int | None:
    """Of /proc/PID/schedstat: nanoseconds on a CPU (Documentation/scheduler/sched-stats.rst). A
    kernel without these statistics writes zeros."""
    fields = content.split()
    if len(fields) < 3 or fields == [b"0", b"0", b"0"]:
        return None
    return _whole(fields[0])


def switches(content: bytes) -> tuple[int, int] | None:
    """Of /proc/PID/task/TID/status: voluntary and involuntary context switches of the thread."""
    voluntary = keyed(content, b"voluntary_ctxt_switches:")
    involuntary = keyed(content, b"nonvoluntary_ctxt_switches:")
    return None if voluntary is None or involuntary is None else (voluntary, involuntary)


def keyed(content: bytes, key: bytes) -> int | None:
    """The number after ``key`` at the beginning of a line."""
    place = 0 if content.startswith(key) else content.find(b"\n" + key) + 1
    if not place and not content.startswith(key):
        return None
    words = content[place + len(key) :].partition(b"\n")[0].split(None, 1)
    return _whole(words[0]) if words else None


def pressure_s(content: bytes) -> float | None:
    """Of a PSI file (Documentation/accounting/psi.rst): seconds in which some task waited."""
    for line in content.split(b"\n"):
        if line.startswith(b"some "):
            micro = _whole(line.rpartition(b"total=")[2].strip())
            return None if micro is None else micro / 1e6
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Throttling:
    """A cgroup's CPU quota: periods so far, those in which it ran out, and CPU seconds that its
    processes had to wait."""

    periods: int
    throttled: int
    throttled_s: float


def throttling(content: bytes) -> Throttling | None:
    """Of cpu.stat: version 1 counts nanoseconds, version 2 microseconds."""
    periods, throttled = keyed(content, b"nr_periods "), keyed(content, b"nr_throttled ")
    nano, micro = keyed(content, b"throttled_time "), keyed(content, b"throttled_usec ")
    if periods is None or throttled is None or (nano is None and micro is None):
        return None
    seconds = (micro or 0) / 1e6 if nano is None else nano / 1e9
    return Throttling(periods, throttled, seconds)


def disk_bytes(content: bytes, disks: Container[bytes]) -> tuple[int, int] | None:
    """Of /proc/diskstats: bytes that these disks read and wrote."""
    return _summed(content, disks, 2, (5, 9), _SECTOR)


def network_bytes(content: bytes, interfaces: Container[bytes]) -> tuple[int, int] | None:
    """Of /proc/net/dev: bytes that these interfaces received and sent."""
    # Large counters follow the colon without a blank.
    return _summed(content.replace(b":", b": "), interfaces, 0, (1, 9), 1)


def _summed(
    content: bytes, wanted: Container[bytes], name: int, columns: tuple[int, int], unit: int
) -> tuple[int, int] | None:
    """Sums of two columns over the lines of the names that are wanted; ``None`` if none is."""
    first = second = 0
    found = False
    for line in content.split(b"\n"):
        fields = line.split()
        if len(fields) > max(*columns, name) and fields[name].rstrip(b":") in wanted:
            one, other = _whole(fields[columns[0]]), _whole(fields[columns[1]])
            if one is not None and other is not None:
                first, second, found = first + one, second + other, True
    return (first * unit, second * unit) if found else None


def _whole(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= _DIGITS else None
