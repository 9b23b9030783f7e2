"""Which rank of how many this process is: by the process group, or else by what the launcher puts
into the environment. Imports no PyTorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

#: Rank, world size and rank on the machine, by launcher: torchrun, DeepSpeed and others; Open MPI;
#: MPICH and Intel MPI; Slurm. MPI's come first: `mpirun` in a Slurm job starts one task a machine.
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def world() -> tuple[int, int]:
    """Rank and world size."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    found = _launched()
    if found is not None:
        return int(os.environ[found[0]]), int(os.environ[found[1]])
    return _number("LOCAL_RANK") or 0, 1


def local_rank() -> int | None:
    """The rank on this machine; ``None``: the launcher does not say."""
    found = _launched()
    return _number("LOCAL_RANK" if found is None else found[2])


def set_for_a_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environment`` that differ from rank to rank."""
    names = [name for rank, _, local in _LAUNCHERS for name in (rank, local)]
    return {name: environment[name] for name in names if name in environment}


def _launched() -> tuple[str, str, str] | None:
    """The names of the launcher that has started this process."""
    for names in _LAUNCHERS:
        if _number(names[0]) is not None and _number(names[1]) is not None:
            return names
    return None


def _number(name: str) -> int | None:
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else None
