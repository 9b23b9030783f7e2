"""mpi4py's communicator for the one task that is simulated: of as many tasks as mpirun starts.

Without mpirun, ``MPI.COMM_WORLD`` has one task, and a script that asks it for its rank would train
alone. What other tasks would send is what equal ones do (:data:`EQUAL` of
``results/runs/communication``), or is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from trainfit.simgpu.communication.peers import TASKS, ranks_per_machine
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet

_MODULE: Final = "mpi4py.MPI"


class MpiTasks:
    """Stands for ``mpi4py.MPI.Comm`` of ``ranks``, of which this task is ``rank``."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str = "MPI_COMM_WORLD") -> None:
        self._ranks, self._rank, self.name = tuple(ranks), rank, name

    @property
    def rank(self) -> int:
        return self._ranks.index(self._rank)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_name(self) -> str:
        return self.name

    def Barrier(self, *_: Any) -> None:
        """Equal tasks come to it at the same time."""

    barrier = Free = Set_name = Disconnect = Barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """What this task has for it, too: scripts mostly send what all can tell."""
        if root != self.rank and obj is None:
            raise _only_elsewhere(f"bcast from rank {root}")
        return obj

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj] * self.size

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return [sendobj] * self.size if root == self.rank else None

    def scatter(self, sendobj: Any = None, root: int = 0) -> Any:
        if root != self.rank:
            raise _only_elsewhere(f"scatter from rank {root}")
        return sendobj[self.rank]

    def Dup(self, *_: Any) -> MpiTasks:
        return self

    def Split_type(self, split_type: Any = None, *_: Any, **__: Any) -> MpiTasks:
        """Tasks of the same machine (``MPI.COMM_TYPE_SHARED``)."""
        each = ranks_per_machine(self.size)
        first = self._rank // each * each
        mine = [rank for rank in self._ranks if first <= rank < first + each]
        return MpiTasks(self._rank, mine, "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _only_elsewhere(name)


def _only_elsewhere(name: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{name} of mpi4py",
        user_frame(),
        "not simulated",
        "one task runs, and what only others have is not known; let rank 0 send it, or use a "
        "collective of torch.distributed",
    )


def install(patches: PatchSet) -> None:
    """Give scripts that ask mpi4py the number of tasks that they are started with."""
    for rank, size in TASKS:
        if os.environ.get(size, "1") != "1" and os.environ.get(rank, "").isdigit():
            world = MpiTasks(int(os.environ[rank]), range(int(os.environ[size])))
            break
    else:
        return
    patches.when_imported(_MODULE, lambda module: patches.set(module, "COMM_WORLD", world))
