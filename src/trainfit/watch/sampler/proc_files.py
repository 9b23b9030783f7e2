"""Files of /proc and cgroups: kept open, and parsed from the bytes that the kernel writes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Container
from pathlib import Path
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
    """The fields of a line as proc(5) has it. The name may hold blanks and brackets itself."""
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
    """The ticks in the first line of /proc/stat. A guest's time is part of the user's; stolen time
    is spent by others than this machine."""
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
    """The numbers of /proc/loadavg: threads that run or wait for a core, and the number (PID) that
    was given out last."""
    fields = content.split()
    if len(fields) < 5:
        return None
    running, last = _whole(fields[3].partition(b"/")[0]), _whole(fields[4])
    return None if running is None or last is None else (running, last)


def schedstat_ns(content: bytes) -> tuple[int, int] | None:
    """The numbers of /proc/PID/schedstat: nanoseconds on a CPU, and ready to run but without one
    (Documentation/scheduler/sched-stats.rst). A kernel without these statistics writes zeros."""
    fields = content.split()
    if len(fields) < 3 or fields == [b"0", b"0", b"0"]:
        return None
    ran, waited = _whole(fields[0]), _whole(fields[1])
    return None if ran is None or waited is None else (ran, waited)


def switches(content: bytes) -> tuple[int, int] | None:
    """Voluntary and involuntary context switches of the thread in /proc/PID/task/TID/status."""
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
    """Seconds of a PSI file (Documentation/accounting/psi.rst) in which some task waited."""
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
    """The throttling of cpu.stat: version 1 counts nanoseconds, version 2 microseconds."""
    periods, throttled = keyed(content, b"nr_periods "), keyed(content, b"nr_throttled ")
    nano, micro = keyed(content, b"throttled_time "), keyed(content, b"throttled_usec ")
    if periods is None or throttled is None or (nano is None and micro is None):
        return None
    seconds = (micro or 0) / 1e6 if nano is None else nano / 1e9
    return Throttling(periods, throttled, seconds)


def disk_bytes(content: bytes, disks: Container[bytes]) -> tuple[int, int] | None:
    """Bytes that these disks read and wrote, by /proc/diskstats."""
    return _summed(content, disks, 2, (5, 9), _SECTOR)


def network_bytes(content: bytes, interfaces: Container[bytes]) -> tuple[int, int] | None:
    """Bytes that these interfaces received and sent, by /proc/net/dev."""
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


# ---
# Files of /proc and cgroups that are kept open, as reading an open one takes half the time.
#
# An open file of /proc/PID belongs to that process for good: after its end it cannot be read, also
# where its number is given to another.


_PIECE: Final = 1 << 16
#: A file that the kernel writes line by line comes in pieces of about a page (seq_file.rst); a
#: shorter piece is its last.
_LAST_PIECE: Final = 3072
#: No file of counters is longer.
_MOST: Final = 1 << 22
#: Descriptors to have at most, and those that are left for everything else.
_MOST_OPEN: Final = 4096
_LEFT: Final = 64


class KeptFiles:
    """How many files may be kept open; all others are opened for each reading."""

    def __init__(self, root: Path = Path("/"), most: int | None = None) -> None:
        self._root = str(root).rstrip("/")
        self.left = most if most is not None else _descriptors()

    def file(self, path: str) -> KeptFile:
        """The file at an absolute path below the root; it need not be there."""
        return KeptFile(self, self._root + path)

    def content(self, path: str) -> bytes | None:
        """The content of a file that is read once; ``None``: it cannot be."""
        kept = KeptFile(self, self._root + path)
        content = kept.read()
        kept.close()
        return content

    def names(self, path: str) -> list[str]:
        """The names in a folder; none where it cannot be read."""
        try:
            return os.listdir(self._root + path)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._root + path)


class KeptFile:
    """A file that is read again and again, from its beginning."""

    __slots__ = ("_descriptor", "_files", "_path")

    def __init__(self, files: KeptFiles, path: str) -> None:
        self._files, self._path = files, path
        self._descriptor = -1

    def read(self) -> bytes | None:
        """The whole content; ``None`` where it cannot be read (any more)."""
        try:
            if self._descriptor >= 0:
                return _content(self._descriptor)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            return None
        try:
            content = _content(descriptor)
        except OSError:
            os.close(descriptor)
            return None
        if self._files.left > 0:
            self._files.left -= 1
            self._descriptor = descriptor
        else:
            os.close(descriptor)
        return content

    def close(self) -> None:
        """Let it go; a later reading opens it again."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
            self._files.left += 1


def _content(descriptor: int) -> bytes:
    content = piece = os.pread(descriptor, _PIECE, 0)
    while len(piece) >= _LAST_PIECE and len(content) < _MOST:
        piece = os.pread(descriptor, _PIECE, len(content))
        content += piece
    return content


def _descriptors() -> int:
    """How many this process may have open; its limit is raised where that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = _MOST_OPEN + _LEFT
    if soft != unlimited and soft < target:
        with contextlib.suppress(OSError, ValueError):
            raised = target if hard == unlimited else min(target, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return _MOST_OPEN if soft == unlimited else max(0, min(_MOST_OPEN, soft - _LEFT))


#: Processes whose maps are read, at most: some 0.1 to 1 ms each.
_MOST_MAPPERS: Final = 400


def is_mapped_by_others(file: str, ours: Container[int], root: Path = Path("/")) -> bool:
    """Has a process that is none of ``ours`` mapped ``file`` into its memory, as far as this user
    may know?"""
    name, others = os.fsencode(file), 0
    for entry in os.scandir(root / "proc"):
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        others += 1
        if others > _MOST_MAPPERS:
            return False
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if name in (root / "proc" / entry.name / "maps").read_bytes():
                return True
    return False
