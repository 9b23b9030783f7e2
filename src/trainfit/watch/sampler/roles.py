"""Which process of a run is a rank, which a DataLoader worker, and which something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from trainfit.watch.sampler.run_folder import Worker

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
    """By its name, or by how multiprocessing starts children: forked ones have the command line of
    whom they were forked from."""
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
    seen: set[int] = set()
    while pid in processes and pid not in seen:
        seen.add(pid)
        pid = processes[pid].parent
        if pid in mains:
            return mains[pid]
    return -1
