"""The processes of a run: all below the one that is watched, with their rates.

A process' CPU time is its CPU clock (clock_getcpuclockid(3)), which counts nanoseconds and costs
one call; ticks of /proc are 10 ms, too coarse for a tenth of a second. Where so many threads run
that reading all of them each time would cost too much, processes are read in turns, and what was
not read in a sample is NaN in it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from trainfit.results.runs.tables import CORE_WAITS, MEMORY, PROCESSES, Table, empty_rows
from trainfit.watch.sampler import proc_files
from trainfit.watch.sampler.proc_files import KeptFiles
from trainfit.watch.sampler.roles import (
    MAIN,
    OTHER,
    WORKER,
    Known,
    Role,
    Worker,
    rank_variable,
    roles,
)
from trainfit.watch.sampler.threads import Threads, ThreadTimes, tick_s

#: Processes that are sampled at most, ranks and workers first.
MOST_PROCESSES: Final = 256
#: Readings of threads for each sample: some 2 µs each.
_THREADS_A_SAMPLE: Final = 300
#: How much longer another process waits for its turn than a rank's, whose main thread everything
#: else waits for.
_RANKS_WEIGHT: Final = 50
#: Seconds between two searches for new processes, between those among all of the machine, and after
#: which each of these is looked at again (a number may have been given to another).
_SEARCH_EVERY_S: Final = 0.2
_SEARCH_ALL_EVERY_S: Final = 10.0
_FORGET_EVERY_S: Final = 120.0
#: Seconds after which what a process is does not change any more: a child is its parent's copy
#: until it calls exec.
_SETTLED_S: Final = 1.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
#: States of a process that has ended.
_ENDED: Final = (b"Z", b"X", b"x")


def cpu_clock_s(pid: int) -> float | None:
    """CPU seconds of all threads of a process, past ones included; ``None``: not told here."""
    try:
        # Linux' number of a process' clock: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
        return time.clock_gettime((~pid << 3) | 2)
    except (OSError, OverflowError):
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Spent:
    """CPU seconds of a process within so many seconds."""

    cpu_s: float
    seconds: float


class _Process:
    """A process of the run, with what was read of it last."""

    def __init__(
        self, files: KeptFiles, pid: int, stat: proc_files.ProcessStat, now: float
    ) -> None:
        self.pid, self.stat, self.seen_at = pid, stat, now
        self.role = Role()
        self.known = Known(stat.parent, stat.name)
        self.is_settled = False
        self.cpu_s: float | None = None
        self.cpu_at = math.nan
        self.read_bytes: int | None = None
        self.threads_at = -math.inf
        self._files = files
        self._stat, self._io, self._children = (
            files.file(f"/proc/{pid}/{name}") for name in ("stat", "io", f"task/{pid}/children")
        )
        self.threads = Threads(files, pid, tick_s())

    def look(self) -> bool:
        """Read its state; ``False``: it has ended, or another has its number."""
        stat = proc_files.process_stat(self._stat.read() or b"")
        if stat is None or stat.started_ticks != self.stat.started_ticks:
            return False
        self.stat = stat
        return stat.state not in _ENDED

    def read_so_far(self) -> int | None:
        """Bytes read from storage; ``None`` where that may not be read."""
        content = self._io.read()
        return proc_files.keyed(content, b"read_bytes:") if content is not None else None

    def children(self) -> set[int] | None:
        """The processes that this one's first thread has started; ``None``: not told."""
        content = self._children.read()
        return None if content is None else {int(word) for word in content.split()}

    def settle(self, now: float) -> None:
        """Read what it is, until that does not change any more."""
        self.is_settled = now - self.seen_at > _SETTLED_S
        folder = f"/proc/{self.pid}"
        environment = self._files.content(f"{folder}/environ") or b""
        self.known = Known(
            self.known.parent,
            self.stat.name,
            self._files.content(f"{folder}/cmdline") or b"",
            rank_variable(environment),
        )

    def close(self) -> None:
        self._stat.close()
        self._io.close()
        self._children.close()
        self.threads.close()


class ProcessTree:
    """The watched process and everything below it, but for this process.

    Args:
        pid: the process that is watched.
        started_ticks: when it was started (/proc/PID/stat); ``None``: whoever has the number now.
        root: where /proc is.
        cpu_clock: CPU seconds of a process by its PID.
    """

    def __init__(
        self,
        pid: int,
        started_ticks: int | None = None,
        root: Path = Path("/"),
        cpu_clock: Callable[[int], float | None] = cpu_clock_s,
        most: int = MOST_PROCESSES,
    ) -> None:
        self._files, self._pid, self._most = KeptFiles(root), pid, most
        self._cpu_clock = cpu_clock
        self._tick_s = tick_s()
        self._loadavg = self._files.file("/proc/loadavg")
        self._processes: dict[int, _Process] = {}
        self._strangers: set[int] = {os.getpid()}
        self._searched_at = self._searched_all_at = self._forgot_at = -math.inf
        self._searched_before = math.nan
        self._last_pid: int | None = None
        self._sampled_at = math.nan
        self._credit = 0.0
        self._clocks: dict[int, float] = {}
        self._clocks_at = math.nan
        self._has_new = True
        self.changed_at = -math.inf
        """When a process came or went last."""
        self.left_out = 0
        """Processes at the last sample that were beyond the limit."""
        self.core_waits = empty_rows(CORE_WAITS, 0)
        """Of the last sample, how long threads of those processes waited for a core whose turn it
        was to be read."""
        stat = proc_files.process_stat(self._files.content(f"/proc/{pid}/stat") or b"")
        if stat is not None and started_ticks in (None, stat.started_ticks):
            self._processes[pid] = _Process(self._files, pid, stat, time.monotonic())

    @property
    def is_alive(self) -> bool:
        """Does the watched process live, or a rank?"""
        return any(pid == self._pid or p.role.kind == MAIN for pid, p in self._processes.items())

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._processes)

    @property
    def roles(self) -> dict[int, Role]:
        """What each process is, as far as it is known, by PID."""
        return {pid: process.role for pid, process in self._processes.items()}

    @property
    def started_s(self) -> float | None:
        """When the watched process was started, in seconds of ``time.monotonic()``; the kernel
        counts from its own start, through suspensions. ``None``: it does not live."""
        process = self._processes.get(self._pid)
        if process is None:
            return None
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.stat.started_ticks * self._tick_s
        return time.monotonic() - age

    def cpus(self) -> list[int]:
        """The CPUs that ranks and workers ran on last, those of ranks first."""
        chosen = sorted(
            (p for p in self._processes.values() if p.role.kind != OTHER),
            key=lambda p: p.role.kind,
        )
        return list(dict.fromkeys(p.stat.cpu for p in chosen if p.stat.cpu >= 0))

    def environment(self) -> bytes:
        """The environment of the watched process, as it was started."""
        return self._files.content(f"/proc/{self._pid}/environ") or b""

    def written(self) -> int | None:
        """Bytes that the processes that live now have written to files; ``None``: not told."""
        found: list[int | None] = []
        for pid in self.pids:
            content = self._files.content(f"/proc/{pid}/io") or b""
            # Of a mapped file the kernel counts pages alone, of /tmp in RAM calls alone.
            found += [proc_files.keyed(content, key) for key in (b"wchar:", b"write_bytes:")]
        known = [number for number in found if number is not None]
        return sum(known) if known else None

    def assign(self, ranks: dict[int, int], workers: dict[int, Worker]) -> dict[int, Role]:
        """Find out what each process is, by the ranks' PIDs and the workers'."""
        now = time.monotonic()
        for process in self._processes.values():
            if not process.is_settled:
                process.settle(now)
        found = roles({pid: p.known for pid, p in self._processes.items()}, ranks, workers)
        for pid, role in found.items():
            self._processes[pid].role = role
        self._has_new = False
        return found

    @property
    def has_new(self) -> bool:
        """Are there processes that :meth:`assign` has not seen?"""
        return self._has_new

    # --- Sampling ---------------------------------------------------------------------------------
    def sample(self, now: float, switches: bool = True) -> tuple[Table, float]:
        """A row a process, and the CPU seconds a second of all of them together, also of those that
        are new (NaN: there is no sample before). ``now`` is in seconds of ``time.monotonic()``;
        context switches are read where ``switches`` says so."""
        interval = now - self._sampled_at
        if gone := [pid for pid, process in self._processes.items() if not process.look()]:
            self._drop(gone)
            self.changed_at = now
        self._search(now)
        chosen = self._chosen()
        spent = {pid: self._spent(process, now) for pid, process in self._processes.items()}
        rows = empty_rows(PROCESSES, len(chosen))
        self.core_waits = empty_rows(CORE_WAITS, 0)
        if chosen:
            self._fill(rows, chosen, spent, now, switches)
        self._sampled_at = now
        measured = [each.cpu_s for each in spent.values() if each is not None]
        return rows, sum(measured) / interval if interval > 0 and measured else math.nan

    def cores(self, now: float) -> float:
        """CPU seconds a second of all known processes since this was last asked, by their clocks
        alone, which cost a few microseconds each; NaN: there are no such clocks, or nothing to
        compare with."""
        found = {pid: self._cpu_clock(pid) for pid in self._processes}
        clocks = {pid: cpu_s for pid, cpu_s in found.items() if cpu_s is not None}
        before, self._clocks = self._clocks, clocks
        since, self._clocks_at = self._clocks_at, now
        both = clocks.keys() & before.keys()
        if not both or not now > since:
            return math.nan
        return sum(max(0.0, clocks[pid] - before[pid]) for pid in both) / (now - since)

    def _fill(
        self,
        rows: Table,
        chosen: list[_Process],
        spent: dict[int, _Spent | None],
        now: float,
        switches: bool,
    ) -> None:
        cores = {each.pid: _rate(spent[each.pid]) for each in chosen}
        threads = self._threads_of(chosen, cores, now, switches)
        _put_members(rows, chosen, now)
        places = [place for place, thread in enumerate(threads) if not math.isnan(thread.waits)]
        self.core_waits = empty_rows(CORE_WAITS, len(places))
        _put_members(self.core_waits, [chosen[place] for place in places], now)
        self.core_waits["cpu_cores"] = [cores[chosen[place].pid] for place in places]
        self.core_waits["main_thread"] = [threads[place].main_waits for place in places]
        self.core_waits["threads"] = [threads[place].waits for place in places]
        rows["cpu_cores"] = list(cores.values())
        rows["hottest_thread"] = [thread.hottest for thread in threads]
        rows["threads"] = [each.stat.threads for each in chosen]
        rows["voluntary_switches"] = [thread.voluntary for thread in threads]
        rows["involuntary_switches"] = [thread.involuntary for thread in threads]
        rows["rss_bytes"] = [each.stat.rss_pages * _PAGE for each in chosen]
        rows["read_bytes"] = [_read_since(each) for each in chosen]
        # One look a sample: over many samples it is the share of the time.
        rows["waits_for_io"] = [float(each.stat.state == b"D") for each in chosen]

    def _spent(self, process: _Process, now: float) -> _Spent | None:
        """``None``: it was not there at the sample before, and had begun earlier."""
        cpu_s = self._cpu_clock(process.pid)
        if cpu_s is None:
            cpu_s = process.stat.cpu_ticks * self._tick_s
        before, since = process.cpu_s, process.cpu_at
        process.cpu_s, process.cpu_at = cpu_s, now
        if before is None or not now > since:
            return None
        return _Spent(max(0.0, cpu_s - before), now - since)

    def _chosen(self) -> list[_Process]:
        """The processes that get a row: ranks, workers, others, up to the limit."""
        every = list(self._processes.values())
        self.left_out = max(0, len(every) - self._most)
        if self.left_out:
            every.sort(key=lambda process: (process.role.kind, process.pid))
        return every[: self._most]

    def _threads_of(
        self, chosen: list[_Process], cores: dict[int, float], now: float, switches: bool
    ) -> list[ThreadTimes]:
        """The times of threads, of those whose turn it is; ranks' turns come more often."""
        found = {each.pid: ThreadTimes() for each in chosen}
        self._credit = min(self._credit + _THREADS_A_SAMPLE, _THREADS_A_SAMPLE)
        turns = sorted(
            chosen,
            key=lambda p: (p.threads_at - now) * (_RANKS_WEIGHT if p.role.kind == MAIN else 1),
        )
        for process in turns:
            if self._credit <= 0:
                break
            found[process.pid] = times = process.threads.read(
                now, process.stat.threads, cores[process.pid], switches
            )
            process.threads_at = now
            self._credit -= times.cost
        return [found[each.pid] for each in chosen]

    # --- Which processes there are ----------------------------------------------------------------
    def _search(self, now: float) -> None:
        """Add new children. The kernel says which number it gave out last: mostly there is nothing
        to search for, or only what other programs have started."""
        if now - self._searched_at < _SEARCH_EVERY_S:
            return
        self._searched_before, self._searched_at = self._searched_at, now
        queue = proc_files.run_queue(self._loadavg.read() or b"")
        every = now - self._searched_all_at > _SEARCH_ALL_EVERY_S
        if queue is not None and queue[1] == self._last_pid and not every:
            return
        self._last_pid = queue[1] if queue is not None else None
        if every:
            self._searched_all_at = now
            if now - self._forgot_at > _FORGET_EVERY_S:
                self._forgot_at = now
                self._strangers = {os.getpid()}
        elif (children := self._children()) is not None:
            # Those of other threads than the first are found by the next search of all.
            while children is not None and self._add(children | self._strangers, now):
                children = self._children()
            return
        self._add({int(name) for name in self._files.names("/proc") if name.isdigit()}, now)

    def _children(self) -> set[int] | None:
        """The children of the known processes' first threads; ``None``: this kernel does not
        tell."""
        found = set()
        for process in self._processes.values():
            children = process.children()
            if children is None:
                return None
            found |= children
        return found

    def _add(self, numbers: set[int], now: float) -> bool:
        """Add those of these processes that are below the known ones. Are there any that were not
        known?"""
        self._strangers &= numbers
        stats = {}
        for pid in numbers - self._strangers - self._processes.keys():
            stat = proc_files.process_stat(self._files.content(f"/proc/{pid}/stat") or b"")
            if stat is not None:
                stats[pid] = stat
        known, found = len(self._processes), True
        while found:  # children of children
            found = False
            for pid in [pid for pid, stat in stats.items() if stat.parent in self._processes]:
                stat = stats.pop(pid)
                if stat.state not in _ENDED:
                    self._processes[pid] = self._new(pid, stat, now)
                    found = self._has_new = True
        self._strangers |= stats.keys()
        if len(self._processes) == known:
            return False
        self.changed_at = now
        return True

    def _new(self, pid: int, stat: proc_files.ProcessStat, now: float) -> _Process:
        process = _Process(self._files, pid, stat, now)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_ticks * self._tick_s
        if age <= now - self._searched_before + self._tick_s:
            # All that it has done was since then.
            process.cpu_s, process.cpu_at = 0.0, now - max(age, self._tick_s)
            process.read_bytes = 0
        return process

    def _drop(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._processes.pop(pid).close()


def _put_members(rows: Table, members: list[_Process], now: float) -> None:
    rows["time_s"] = now
    rows["pid"] = [member.pid for member in members]
    rows["rank"] = [member.role.rank for member in members]
    rows["role"] = [member.role.kind for member in members]
    rows["worker"] = [member.role.worker for member in members]


def _read_since(process: _Process) -> int:
    """Bytes read since the sample before; -1: not told."""
    so_far = process.read_so_far()
    before, process.read_bytes = process.read_bytes, so_far
    return -1 if so_far is None or before is None else max(0, so_far - before)


def _rate(spent: _Spent | None) -> float:
    return math.nan if spent is None else spent.cpu_s / spent.seconds


# ---
# Memory of the run's processes by kind; of some workers also what they share with no other.


#: Workers whose private pages are counted: all of them read the same data set.
_COUNTED: Final = 2
#: Seconds between two such counts of a worker at least, and the CPU seconds a second that they may
#: take, after some at once. The kernel walks the process' page tables: 80 ms a GiB were measured.
_COUNT_EVERY_S: Final = 2.0
_MOST_CPU: Final = 0.001
_CREDIT_S: Final = 0.15
#: Of /proc/PID/status, by column; and what /proc/PID/smaps_rollup has of pages that no other
#: process maps (proc(5)).
_KINDS: Final[Mapping[str, bytes]] = {
    "anonymous_bytes": b"RssAnon:",
    "file_bytes": b"RssFile:",
    "shared_bytes": b"RssShmem:",
}
_PRIVATE: Final = (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:")


class MemoryByKind:
    """Rows of :data:`trainfit.results.runs.tables.MEMORY`.

    Args:
        root: where /proc is.
        cpu_clock: CPU seconds of this process, by which counting is limited.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._files, self._cpu_clock = KeptFiles(root), cpu_clock
        self._counted_at: dict[int, float] = {}
        self._credit_s = _CREDIT_S
        self._sampled_at = float("-inf")
        self.counting_s = 0.0
        """CPU seconds that counting private pages took, all in all."""

    def sample(self, now: float, members: Mapping[int, Role]) -> Table:
        """A row for each process that can be read, at ``now`` (``time.monotonic()``)."""
        seconds = min(60.0, now - self._sampled_at) if self._counted_at else 0.0
        self._credit_s = min(_CREDIT_S, self._credit_s + _MOST_CPU * seconds)
        self._sampled_at = now
        found = {pid: self._kinds(pid) for pid in members}
        there = [pid for pid, kinds in found.items() if kinds is not None]
        counted = self._counted(now, (pid for pid in there if members[pid].kind == WORKER))
        rows = empty_rows(MEMORY, len(there))
        for place, pid in enumerate(there):
            role = members[pid]
            row = rows[place]
            row["time_s"], row["pid"] = now, pid
            row["rank"], row["role"], row["worker"] = role.rank, role.kind, role.worker
            for column, value in (found[pid] or {}).items():
                row[column] = value
            row["private_bytes"] = counted.get(pid, -1)
        return rows

    def _kinds(self, pid: int) -> dict[str, int] | None:
        """Bytes of a process by column; ``None``: it has ended, or the kernel does not tell (before
        4.5)."""
        status = self._files.content(f"/proc/{pid}/status") or b""
        found = {column: proc_files.keyed(status, key) for column, key in _KINDS.items()}
        told = {column: value * 1024 for column, value in found.items() if value is not None}
        return told if len(told) == len(_KINDS) else None

    def _counted(self, now: float, workers: Iterable[int]) -> dict[int, int]:
        """Bytes of private pages of the first workers, as far as it is their time."""
        found = {}
        chosen = sorted(workers)[:_COUNTED]
        self._counted_at = {pid: self._counted_at.get(pid, float("-inf")) for pid in chosen}
        for pid in chosen:
            if self._credit_s <= 0 or now - self._counted_at[pid] < _COUNT_EVERY_S:
                continue
            began = self._cpu_clock()
            private = self._private(pid)
            spent = self._cpu_clock() - began
            self.counting_s += spent
            self._credit_s -= spent
            self._counted_at[pid] = now
            if private is not None:
                found[pid] = private
        return found

    def _private(self, pid: int) -> int | None:
        """``None``: it may not be read, or the kernel does not tell it (before 4.14)."""
        rollup = self._files.content(f"/proc/{pid}/smaps_rollup")
        if rollup is None:
            return None
        numbers = [proc_files.keyed(rollup, key) for key in _PRIVATE]
        return None if numbers[0] is None else sum(number or 0 for number in numbers) * 1024
