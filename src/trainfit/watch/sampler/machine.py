"""The machine as a whole: cores, memory, disks, network, pressure, the run's cgroup, clocks, and
its GPUs.

The run's GPUs: which they are, their rows, and NVML that goes away and comes back.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.hardware.local_gpu import visible
from trainfit.hardware.machine.cgroup import own_levels, shared_quota
from trainfit.hardware.machine.limits import MEMINFO, SHM, shared_limit
from trainfit.hardware.machine.nvml import NvmlDevice
from trainfit.hardware.machine.parsing import keyed_kilobytes
from trainfit.hardware.machine.storage import BLOCK
from trainfit.hardware.machine.system import System
from trainfit.hardware.machine.topology import CPUS
from trainfit.results.runs.tables import (
    FOLDERS,
    GPUS,
    MACHINE,
    SHARED_MEMORY,
    TEMPORARY,
    Table,
    empty_rows,
)
from trainfit.results.runs.watched import plain_uuid
from trainfit.watch.sampler import proc_files
from trainfit.watch.sampler.proc_files import KeptFile, KeptFiles
from trainfit.watch.sampler.threads import tick_s

#: Devices that pass on to others, which are counted themselves, and those that are no storage.
_NO_DISKS: Final = re.compile(r"loop|ram|zram|dm-|md|sr|fd")
#: CPUs whose clock is read: on kernels before 5.19 one that was idle makes its reader wait 10 ms
#: (arch/x86/kernel/cpu/aperfmperf.c).
_MOST_CLOCKS: Final = 4
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

Counts = dict[str, float | None]


class MachineCounters:
    """Rows of the machine's table.

    RAM is what limits the run: the cgroup's where its limit leaves less than the machine has.

    Args:
        pid: the run's process, whose cgroups are looked at.
        root: where absolute paths lie.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._files, self._system = KeptFiles(root), System(root)
        self._root = root
        self._tick_s = tick_s()
        names = ("stat", "loadavg", "meminfo", "vmstat", "diskstats", "net/dev")
        self._proc = {name: self._files.file(f"/proc/{name}") for name in names}
        self._disks, self._interfaces = self._find_disks(), self._find_interfaces()
        self._limit = shared_limit(self._system, str(pid))
        self._throttling = self._find_throttling(pid)
        self._pressure = {name: self._find_pressure(pid, name) for name in ("memory", "io")}
        self._clocks: dict[int, KeptFile] = {}
        self._before: Counts = {}
        self._sampled_at = self._all_at = math.nan
        self._limited: tuple[int, int] | None = None

    def sample(
        self,
        now: float,
        cores_ours: float,
        cpus: Sequence[int],
        whole: bool = True,
        slow: bool = True,
    ) -> Table:
        """One row; unless it shall be ``whole`` only with cores, run queue and throttling, and what
        changes slowly or is dear to read only where ``slow`` says so.

        Counters are of the time since the last sample that had them.

        Args:
            now: seconds of ``time.monotonic()``.
            cores_ours: that the run's processes kept busy since the sample before.
            cpus: the CPUs that the run's processes ran on last.
        """
        row = empty_rows(MACHINE)
        row["time_s"], row["cores_ours"] = now, cores_ours
        if slow:
            _put(row, "cpu_hz", self._clock_hz(cpus))
        queue = proc_files.run_queue(self._read("loadavg"))
        # This process runs while it reads that.
        _put(row, "runnable", None if queue is None else max(0, queue[0] - 1))
        self._put_counters(row, self._quick_counts(), now - self._sampled_at)
        if now > self._sampled_at:
            row["interval_s"] = now - self._sampled_at
        self._sampled_at = now
        if whole:
            self._put_memory(row, slow)
        if slow:
            self._put_shm(row)
            self._put_counters(row, self._other_counts(), now - self._all_at)
            self._all_at = now
        return row

    def _read(self, name: str) -> bytes:
        return self._proc[name].read() or b""

    # --- Gauges -----------------------------------------------------------------------------------
    def _put_memory(self, row: Table, is_slow: bool) -> None:
        text = self._read(MEMINFO.removeprefix("/proc/")).decode(errors="replace")
        with contextlib.suppress(ValueError):
            total, available = (keyed_kilobytes(text, key) for key in ("MemTotal", "MemAvailable"))
            if is_slow and self._limit is not None:
                used = self._limit.used_bytes(self._system)
                limit = self._limit.limit_bytes
                self._limited = None if used is None else (used, max(0, limit - used))
            used_here = total - available
            if self._limited is not None and self._limited[1] < available:
                used_here, available = self._limited
            row["ram_used_bytes"], row["ram_available_bytes"] = used_here, available

    def _put_shm(self, row: Table) -> None:
        with contextlib.suppress(OSError):
            space = os.statvfs(self._root / SHM.lstrip("/"))
            row["shm_used_bytes"] = (space.f_blocks - space.f_bfree) * space.f_frsize
            row["shm_free_bytes"] = space.f_bavail * space.f_frsize

    def _clock_hz(self, cpus: Sequence[int]) -> float | None:
        """Mean of the CPUs' clocks; ``None`` where the kernel does not tell it (many virtual
        machines)."""
        found = []
        for cpu in cpus[:_MOST_CLOCKS]:
            if cpu not in self._clocks:
                path = f"{CPUS}/cpu{cpu}/cpufreq/scaling_cur_freq"
                self._clocks[cpu] = self._files.file(path)
            content = (self._clocks[cpu].read() or b"").strip()
            if content.isdigit() and int(content):
                found.append(int(content) * 1e3)
        return sum(found) / len(found) if found else None

    # --- Counters ---------------------------------------------------------------------------------
    def _put_counters(self, row: Table, counts: Counts, interval: float) -> None:
        for name, now in counts.items():
            then, self._before[name] = self._before.get(name), now
            if (
                not interval > 0 or now is None or then is None or now < then
            ):  # a counter that began again
                continue
            is_share = name in _PER_SECOND
            row[name] = (now - then) / interval if is_share else now - then

    def _quick_counts(self) -> Counts:
        """Counters since the system's start, by the column that their change goes to."""
        ticks = proc_files.cpu_ticks(self._read("stat"))
        quota = proc_files.throttling((self._throttling and self._throttling.read()) or b"")
        return {
            "cores_busy": None if ticks is None else ticks.busy * self._tick_s,
            "iowait_cores": None if ticks is None else ticks.iowait * self._tick_s,
            "cgroup_periods": None if quota is None else quota.periods,
            "cgroup_throttled": None if quota is None else quota.throttled,
            "cgroup_throttled_s": None if quota is None else quota.throttled_s,
        }

    def _other_counts(self) -> Counts:
        """The counts that change slowly."""
        swap = self._read("vmstat")
        disk = proc_files.disk_bytes(self._read("diskstats"), self._disks)
        network = proc_files.network_bytes(self._read("net/dev"), self._interfaces)
        pages_in, pages_out = (proc_files.keyed(swap, key) for key in (b"pswpin ", b"pswpout "))
        return {
            "swap_in_bytes": None if pages_in is None else pages_in * _PAGE,
            "swap_out_bytes": None if pages_out is None else pages_out * _PAGE,
            "disk_read_bytes": None if disk is None else disk[0],
            "disk_written_bytes": None if disk is None else disk[1],
            "net_received_bytes": None if network is None else network[0],
            "net_sent_bytes": None if network is None else network[1],
            "memory_pressure": proc_files.pressure_s(self._pressure["memory"].read() or b""),
            "io_pressure": proc_files.pressure_s(self._pressure["io"].read() or b""),
        }

    # --- What there is ----------------------------------------------------------------------------
    def _find_disks(self) -> frozenset[bytes]:
        """Whole disks: partitions have no folder in /sys/block."""
        names = self._files.names(BLOCK.replace("class/block", "block"))
        return frozenset(name.encode() for name in names if not _NO_DISKS.match(name))

    def _find_interfaces(self) -> frozenset[bytes]:
        """The interfaces with hardware: bridges and tunnels pass on what these count. In a
        container none has, and all but the loopback count."""
        folder = "/sys/class/net"
        names = [name for name in self._files.names(folder) if name != "lo"]
        real = [name for name in names if self._files.exists(f"{folder}/{name}/device")]
        return frozenset(name.encode() for name in real or names)

    def _find_throttling(self, pid: int) -> KeptFile | None:
        """Statistics of the cgroup with the tightest CPU quota, or of the own one."""
        quota = shared_quota(self._system, str(pid))
        levels = own_levels(self._system, "cpu", str(pid)).value
        level = quota.level if quota is not None else None
        if level is None and levels is not None and levels.levels:
            level = levels.levels[0]
        return None if level is None else self._files.file(level.file("cpu.stat", "cpu.stat"))

    def _find_pressure(self, pid: int, name: str) -> KeptFile:
        """The run's cgroup's, where it has one (version 2); else the machine's."""
        levels = own_levels(self._system, name, str(pid)).value
        for level in levels.levels[:1] if levels is not None else ():
            path = level.file("", f"{name}.pressure")
            if level.version == 2 and self._files.exists(path):
                return self._files.file(path)
        return self._files.file(f"/proc/pressure/{name}")


#: Columns that are seconds of something a second.
_PER_SECOND: Final = frozenset(("cores_busy", "iowait_cores", "memory_pressure", "io_pressure"))


def _put(row: Table, name: str, value: Any) -> None:
    if value is not None:
        row[name] = value


# ---
# /dev/shm and the folder of temporary files: how full they are, and of which new files.


#: Seconds between two looks.
EVERY_S: Final = 1.0
#: Bytes more than at the start from which files are counted, and how many times more than when
#: they were counted last: few runs ever need it.
_NOTICED: Final = 32 << 20
_MORE: Final = 1.3
#: Entries of a folder that are looked at, and of the folders in it together.
_MOST_AT_TOP: Final = 1 << 14
_MOST_ENTRIES: Final = 5000
#: How much more of its files' bytes there must be before their names are told again.
_AGAIN: Final = 1.5
#: What changes from file to file in a name: numbers, and what tempfile and PyTorch make up.
_CHANGES: Final = re.compile(r"\d+|(?<=tmp)[a-z0-9_]{8}|[0-9a-f]{8,}")
#: What tempfile makes up stands between any prefix and suffix: before a dot, or at the end.
_MADE_UP: Final = re.compile(r"[a-z0-9_]{8}(?=\.|/|$)")
#: Files whose names differ in nothing else, from which that is what it is.
_LEAST_ALIKE: Final = 4

Tell = Callable[[str, str, Mapping[str, float]], None]


class Folders:
    """Rows of :data:`trainfit.results.runs.tables.FOLDERS`; nothing is opened, only looked at.

    Args:
        temporary: the run's folder of temporary files.
        tell: takes an event's kind, text and values.
        owner: the user whose files count.
        written: bytes that the run's processes have written (``None``: not known); other programs'
            files are not told of.
        is_mapped_elsewhere: has a process outside of the run mapped this file into its memory? Of
            files in memory, which need not be written to (multiprocessing.shared_memory).
    """

    def __init__(
        self,
        temporary: str,
        tell: Tell,
        shared: str = SHM,
        owner: int | None = None,
        written: Callable[[], int | None] = lambda: None,
        is_mapped_elsewhere: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._tell, self._began, self._written = tell, time.time(), written
        self._is_mapped_elsewhere = is_mapped_elsewhere
        self._owner = os.getuid() if owner is None else owner
        self._paths = {SHARED_MEMORY: shared, TEMPORARY: temporary}
        self._first: dict[int, int] = {}
        self._told: dict[int, float] = {}
        self._counted: dict[int, float] = {}

    def sample(self, now: float) -> Table:
        """A row for each that can be read, at ``now`` (``time.monotonic()``)."""
        rows = []
        for folder, path in self._paths.items():
            try:
                space = os.statvfs(path)
            except OSError:
                continue
            row = empty_rows(FOLDERS)
            used = (space.f_blocks - space.f_bfree) * space.f_frsize
            row["time_s"], row["folder"] = now, folder
            row["used_bytes"], row["free_bytes"] = used, space.f_bavail * space.f_frsize
            more = used - self._first.setdefault(folder, used)
            if more >= max(_NOTICED, _MORE * self._counted.get(folder, 0.0)):
                self._counted[folder] = more
                row["new_bytes"], row["new_files"] = self._count(folder, path)
            rows.append(row)
        return _joined(rows)

    def _count(self, folder: int, path: str) -> tuple[int, int]:
        sizes: collections.Counter[str] = collections.Counter()
        files: collections.Counter[str] = collections.Counter()
        entries, unseen = self._new_files(path)
        found = dict(entries)
        one_of: dict[str, str] = {}
        for file, (name, size) in zip(found, _by_pattern(found), strict=True):
            # Folders that were not looked into hold what others do.
            times = unseen if "/" in file else 1.0
            sizes[name] += round(times * size)
            files[name] += 1
            one_of[name] = f"{path}/{file}"
        for name in files:
            files[name] = round(files[name] * (unseen if "/" in name else 1.0))
        if sizes:
            name, size = sizes.most_common(1)[0]
            is_news = size >= _NOTICED and size >= _AGAIN * self._told.get(folder, 0.0)
            if is_news and self._is_ours(folder, size, one_of[name]):
                self._told[folder] = size
                values = {"folder": folder, "bytes": size, "files": files[name]}
                self._tell("new_files", f"{path}/{name}", values)
        return sum(sizes.values()), sum(files.values())

    def _is_ours(self, folder: int, nbytes: int, file: str) -> bool:
        written = self._written()
        if written is None or written >= nbytes / 2:
            return True
        return folder == SHARED_MEMORY and not self._is_mapped_elsewhere(file)

    def _new_files(self, path: str) -> tuple[list[tuple[str, int]], float]:
        """Names and bytes of the user's files that were written to since the run began, and how
        many times the new folders that were looked into all of them are."""
        found: list[tuple[str, int]] = []
        top, left, looked = True, _MOST_ENTRIES, 0
        waiting = [("", path)]
        while waiting and left > 0:
            prefix, folder = waiting.pop()
            looked += not top
            if top:  # of this one all entries are looked at: which are folders is not known before
                left = _MOST_AT_TOP
            try:
                with os.scandir(folder) as entries:
                    for entry in itertools.islice(entries, left):
                        left -= 1
                        status = entry.stat(follow_symlinks=False)
                        if status.st_uid != self._owner or status.st_mtime < self._began:
                            continue
                        if stat.S_ISREG(status.st_mode):
                            found.append((prefix + entry.name, status.st_blocks * 512))
                        elif stat.S_ISDIR(status.st_mode):
                            waiting.append((f"{prefix}{entry.name}/", entry.path))
            except OSError:  # it is gone, or another user's
                pass
            if top:
                top, left = False, _MOST_ENTRIES
        return found, 1.0 + len(waiting) / max(1, looked)


def _by_pattern(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What each file's name has in common with others, and its bytes."""
    patterns = {name: _CHANGES.sub("*", name) for name in sizes}
    alike = collections.Counter(patterns.values())
    # Names that no other file has may differ in what tempfile made up.
    without = {name: _MADE_UP.sub("*", name) for name in sizes if alike[patterns[name]] == 1}
    without = {name: _CHANGES.sub("*", pattern) for name, pattern in without.items()}
    made_up = collections.Counter(without.values())
    for name, size in sizes.items():
        pattern = without.get(name, "")
        yield pattern if made_up[pattern] >= _LEAST_ALIKE else patterns[name], size


def _joined(rows: list[Table]) -> Table:
    joined = empty_rows(FOLDERS, len(rows))
    for place, row in enumerate(rows):
        joined[place] = row[0]
    return joined


def temporary_folder(environment: Mapping[str, str]) -> str:
    """The folder in which a process of this environment makes temporary files
    (tempfile.gettempdir())."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        path = environment.get(name, "")
        if os.path.isabs(path) and Path(path).is_dir():
            return path
    return "/tmp"


#: Seconds between two tries to reach NVML, or a GPU, that went away.
_TRY_EVERY_S: Final = 1.0
#: The kernel's number of the first PID namespace (include/linux/proc_ns.h), whose PIDs NVML uses.
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
_COLUMNS: Final = frozenset(GPUS.names or ())


def load_nvml() -> Any:
    """The module `pynvml`; raises ``ImportError``."""
    return importlib.import_module("pynvml")


def nvml_knows_our_pids() -> bool:
    """Does NVML know our processes by our numbers? In a container with PIDs of its own it speaks of
    others."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


class GpuCounters:
    """Rows of the table of GPUs. Their column ``gpu`` is NVML's number until :meth:`renumber`.

    Args:
        module: `pynvml`, or what stands in for it.
        tell: takes an event's kind, text and values.
        knows_pids: whether NVML's PIDs are those of /proc.
        timer: seconds, by which calls are timed.

    Raises:
        Exception: whatever the module raises where NVML cannot be used at all.
    """

    def __init__(
        self,
        module: Any,
        tell: Tell,
        knows_pids: bool = True,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._module, self._tell, self._knows_pids = module, tell, knows_pids
        module.nvmlInit()
        count = int(module.nvmlDeviceGetCount())
        self.devices = [NvmlDevice(module, number, timer) for number in range(count)]
        self._lost: set[int] = set()
        self._tried_at = float("-inf")
        self._numbers: dict[int, int] = {}

    def choose(self, mask: str | None) -> None:
        """Keep only the GPUs that CUDA_VISIBLE_DEVICES leaves to the run, in its order."""
        if mask is None:
            return
        taken, _ = visible(mask, len(self.devices), [device.uuid for device in self.devices])
        chosen = [device for entry in taken for device in self._named(entry)]
        if chosen or not taken:
            self.devices = chosen

    def _named(self, entry: str) -> list[NvmlDevice]:
        if entry.isdigit():
            return [device for device in self.devices if device.number == int(entry)]
        return [device for device in self.devices if device.uuid.startswith(entry)]

    def sample(self, now: float, pids: frozenset[int]) -> Table:
        """A row a GPU, at ``now`` (seconds of ``time.monotonic()``); empty ones for GPUs that are
        gone. ``pids`` are the run's."""
        self._reach(now)
        rows = empty_rows(GPUS, len(self.devices))
        known = pids if self._knows_pids else None
        # One GPU at a time makes the calls that block, the one that made them longest ago.
        there = [device for device in self.devices if not device.is_gone]
        turn = min(there, key=lambda device: device.waited_at, default=None)
        for place, device in enumerate(self.devices):
            values = {} if device.is_gone else device.sample(now, known, device is turn)
            for column in values.keys() & _COLUMNS:
                rows[column][place] = values[column]
            rows["time_s"][place], rows["gpu"][place] = now, device.number
            self._notice(device)
        return rows

    def renumber(self, uuids: Sequence[str]) -> Callable[[Table], None]:
        """Gives rows the GPUs' places in ``uuids`` (of the ranks' headers), or, where these are
        not known, in what CUDA_VISIBLE_DEVICES leaves. A GPU keeps the number that it has got, also
        where a header that comes later has another order: its UUID goes with the number."""
        places = {plain_uuid(uuid): place for place, uuid in enumerate(uuids) if uuid}
        numbers = self._numbers
        for place, device in enumerate(self.devices):
            if device.number not in numbers:
                wanted = places.get(plain_uuid(device.uuid), len(places) + place)
                taken = set(numbers.values())
                free = (number for number in itertools.count(wanted) if number not in taken)
                numbers[device.number] = next(free)
                values = {"gpu": numbers[device.number], "nvml": device.number}
                self._tell("gpu", f"{device.uuid} {device.name}".strip(), values)

        def change(rows: Table) -> None:
            if len(rows):
                rows["gpu"] = np.array([numbers.get(int(gpu), -1) for gpu in rows["gpu"]])

        return change

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._module.nvmlShutdown()

    def _reach(self, now: float) -> None:
        """Try to have back what is gone."""
        gone = [device for device in self.devices if device.is_gone]
        if not gone or now - self._tried_at < _TRY_EVERY_S:
            return
        self._tried_at = now
        if len(gone) == len(self.devices):
            with contextlib.suppress(Exception):
                self._module.nvmlShutdown()
            try:
                self._module.nvmlInit()
            except Exception:
                return
        for device in gone:
            device.is_gone = not device.open()

    def _notice(self, device: NvmlDevice) -> None:
        values = {"nvml": device.number}
        if device.is_gone and device.number not in self._lost:
            self._lost.add(device.number)
            self._tell("nvml_lost", f"NVML does not answer for {device.name or 'a GPU'}", values)
        elif not device.is_gone and device.number in self._lost:
            self._lost.remove(device.number)
            self._tell("nvml_back", f"NVML answers for {device.name or 'a GPU'} again", values)
