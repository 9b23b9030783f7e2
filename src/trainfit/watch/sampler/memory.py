"""Memory of the run's processes by kind; of some workers also what they share with no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from trainfit.results.runs.tables import MEMORY, Table, empty_rows
from trainfit.watch.sampler import proc_files
from trainfit.watch.sampler.proc_files import KeptFiles
from trainfit.watch.sampler.roles import WORKER, Role

#: Seconds between two readings of all processes.
EVERY_S: Final = 1.0
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

    def is_due(self, now: float) -> bool:
        """Is it time to read again?"""
        return now - self._sampled_at >= EVERY_S

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
        """By column; ``None``: it has ended, or the kernel does not tell (before 4.5)."""
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
        told = [proc_files.keyed(rollup, key) for key in _PRIVATE]
        return None if told[0] is None else sum(each or 0 for each in told) * 1024
