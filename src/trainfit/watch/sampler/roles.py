"""Which process of a run is a rank or a worker, and what the run's folder tells of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs.tables import FETCHES
from trainfit.results.runs.watched import SAMPLER_EVENTS, Event, RunHeader

# ---
# What the run's folder tells a sampler: when the run began, its ranks and its workers.


_HEADER: Final = re.compile(r"rank(\d{1,6})\.json")
_FETCHES: Final = re.compile(r"rank(\d{1,6})\.fetches\.(\d{1,10})\.bin")
#: Clocks of the kernel's ticks and of Python differ by less.
_SLACK_S: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Worker:
    """A DataLoader worker: its rank, and its number if it is known (else -1)."""

    rank: int
    number: int


class RunFolder:
    """The folder of a run that goes on; :meth:`look` takes in what is new.

    Args:
        path: an existing folder.
        not_before: headers of processes that started earlier (seconds of ``time.monotonic()``)
            are of another run that was recorded into the same folder.
    """

    def __init__(self, path: Path, not_before: float = 0.0) -> None:
        self.path = path
        self._not_before = not_before - _SLACK_S
        self._identity = self._now()
        self._headers: dict[str, tuple[tuple[int, int], RunHeader | None]] = {}
        self.workers: dict[int, Worker] = {}
        """By PID."""

    @property
    def is_gone(self) -> bool:
        """Was it removed, or is another in its place?"""
        return self._now() != self._identity

    def look(self) -> None:
        """Read the headers that have changed, and who writes batches' tables."""
        for name in self._names():
            if header := _HEADER.fullmatch(name):
                self._read_header(name, int(header[1]))
            elif fetches := _FETCHES.fullmatch(name):
                self._read_worker(name, Worker(int(fetches[1]), -1), int(fetches[2]))

    @property
    def headers(self) -> list[RunHeader]:
        """The headers of this run's ranks, in order."""
        found = [header for _, header in self._headers.values() if header is not None]
        return sorted(found, key=lambda header: header.rank)

    @property
    def began(self) -> float | None:
        """``started_monotonic`` of the run, the zero of all tables' times; ``None``: no rank has
        told it yet.

        All ranks of a folder have the same: that of the command that started them, or of the rank
        that made the folder (:mod:`trainfit.watch.rank_folder`). Rank 0 may be on another machine.
        """
        headers = self.headers
        return headers[0].started_monotonic if headers else None

    @property
    def ranks(self) -> dict[int, int]:
        """The PIDs of the ranks' processes, by rank."""
        return {header.rank: header.pid for header in self.headers}

    def write_event(self, event: Event) -> bool:
        """Append it to the sampler's events; ``False`` where it could not be written."""
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        try:
            with (self.path / SAMPLER_EVENTS).open("ab", buffering=0) as file:
                return file.write(line.encode()) == len(line.encode())
        except OSError:
            return False

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _read_header(self, name: str, rank: int) -> None:
        path = self.path / name
        try:
            found = os.stat(path)
        except OSError:
            return
        version = found.st_mtime_ns, found.st_size
        if name in self._headers and self._headers[name][0] == version:
            return
        header: RunHeader | None = None
        with contextlib.suppress(ResultFileError):  # it is being written, or it is damaged
            header = RunHeader.load(path)
        if header is not None and header.rank != rank:
            header = None
        if header is not None and header.started_monotonic < self._not_before:
            header = None
        self._headers[name] = version, header

    def _read_worker(self, name: str, worker: Worker, pid: int) -> None:
        known = self.workers.get(pid)
        if known is not None and known.number >= 0:
            return
        rows = np.zeros(0, FETCHES)
        with contextlib.suppress(OSError):
            rows = np.fromfile(self.path / name, FETCHES, count=1)
        number = int(rows["worker"][0]) if len(rows) else -1
        self.workers[pid] = dataclasses.replace(worker, number=number)


#: Of ``processes.role``.
MAIN: Final = 0
WORKER: Final = 1
OTHER: Final = 2

#: What PyTorch calls a worker's first thread (torch/utils/data/_utils/worker.py).
_WORKER_NAME: Final = b"pt_data_worker"
#: In the command lines of multiprocessing's children that are not forked (multiprocessing/spawn.py,
#: forkserver.py).
_SPAWNED: Final = b"--multiprocessing-fork"
_FORK_SERVER: Final = b"multiprocessing.forkserver"


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What is known of a process: its parent (the first that it had), name, command line and the
    rank that its environment gives it (``None``: none)."""

    parent: int
    name: bytes = b""
    command: bytes = b""
    rank: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """``kind`` is :data:`MAIN`, :data:`WORKER` or :data:`OTHER`; -1 is not known."""

    kind: int = OTHER
    rank: int = -1
    worker: int = -1


def rank_variable(environment: bytes) -> int | None:
    """RANK of /proc/PID/environ, as torchrun and others set it."""
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"RANK" and value.isdigit() and len(value) < 7:
            return int(value)
    return None


def roles(
    processes: Mapping[int, Known], ranks: Mapping[int, int], workers: Mapping[int, Worker]
) -> dict[int, Role]:
    """The role of each process.

    Args:
        processes: those of the run, by PID.
        ranks: the PIDs of the ranks that have told them, by rank.
        workers: the PIDs that write a table of batches.
    """
    mains = _mains(processes, ranks)
    return {pid: _role(pid, processes, mains, workers) for pid in processes}


def _mains(processes: Mapping[int, Known], ranks: Mapping[int, int]) -> dict[int, int]:
    """The rank of each rank's process, by PID."""
    found = {pid: rank for rank, pid in ranks.items() if pid in processes}
    for pid, known in processes.items():
        # A rank's children inherit the variable; who has it first is the rank itself.
        above = processes.get(known.parent)
        if known.rank is not None and (above is None or above.rank != known.rank):
            told = known.rank in ranks or known.rank in found.values()
            if not told:
                found[pid] = known.rank
    return found


def _role(
    pid: int,
    processes: Mapping[int, Known],
    mains: Mapping[int, int],
    workers: Mapping[int, Worker],
) -> Role:
    if pid in mains:
        return Role(MAIN, mains[pid])
    above = _rank_above(pid, processes, mains)
    worker = workers.get(pid)
    if worker is not None:
        return Role(WORKER, worker.rank, worker.number)
    return Role(WORKER if _is_worker(processes[pid], processes, mains) else OTHER, above)


def _is_worker(known: Known, processes: Mapping[int, Known], mains: Mapping[int, int]) -> bool:
    """Is it a worker, by its name, or by how multiprocessing starts children? Forked ones have the
    command line of whom they were forked from."""
    if known.name == _WORKER_NAME:
        return True
    above = processes.get(known.parent)
    if above is None or not known.command:
        return False
    if known.parent in mains:
        return _SPAWNED in known.command or known.command == above.command
    return _FORK_SERVER in above.command and known.command == above.command


def _rank_above(pid: int, processes: Mapping[int, Known], mains: Mapping[int, int]) -> int:
    """The rank of the nearest process above that is one; -1: none is."""
    visited: set[int] = set()
    while pid in processes and pid not in visited:
        visited.add(pid)
        pid = processes[pid].parent
        if pid in mains:
            return mains[pid]
    return -1
