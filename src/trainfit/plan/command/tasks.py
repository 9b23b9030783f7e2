"""Programs that start a training on several GPUs as tasks of a batch system or of MPI.

``srun --ntasks=8 python train.py`` and ``mpirun -np 8 python train.py`` start processes that are
the ranks themselves. What the first of them finds in its environment is that of Slurm 24.11 (srun,
"OUTPUT ENVIRONMENT VARIABLES"), Open MPI 5.0 ("Environment variables") and, where an option is
theirs, MPICH and Intel MPI (PMI).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainfit.results.runs.communication import MEETING_PLACE

#: Options that a program was given, by their name without dashes; "" for one without a value.
Given = Mapping[str, str]

#: Between the values of an option that was given several times.
SEPARATOR: Final = "\0"


@dataclasses.dataclass(frozen=True)
class Tasks:
    """What a program (``starter``: "srun"; empty: none) starts of a command: ``count`` tasks
    (``None``: it does not say) on so many ``machines``, ``where`` that is said if not in the
    command, and the ``variables`` of the first task."""

    starter: str = ""
    count: int | None = 1
    machines: int = 1
    where: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# -- Slurm ----------------------------------------------------------------------------------------

#: Slurm's variables of an allocation by the option that they stand for.
SLURM_VARIABLES: Final = {
    "ntasks": "SLURM_NTASKS",
    "nodes": "SLURM_JOB_NUM_NODES",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
}


def number(text: str) -> int | None:
    """A positive number of tasks or machines; 1 where none is given, ``None`` for any other."""
    if not text:
        return 1
    return int(text) if text.isascii() and text.isdigit() and int(text) else None


def wanted_of_slurm(given: Given) -> dict[str, str]:
    """What says how many tasks there are: options, or else the allocation."""
    return {
        name: given.get(name) or os.environ.get(variable, "")
        for name, variable in SLURM_VARIABLES.items()
    }


def of_slurm(given: Given) -> Tasks:
    """srun starts a task for each of ``--ntasks``, else one (or several) for each node."""
    wanted = wanted_of_slurm(given)
    nodes, each = number(wanted["nodes"].rpartition("-")[2]), number(wanted["ntasks-per-node"])
    count = number(wanted["ntasks"])
    if not wanted["ntasks"]:
        count = None if nodes is None else nodes * (each or 1)
    machines = nodes or 1
    if count and not wanted["nodes"] and wanted["ntasks-per-node"]:
        machines = -(-count // (each or count))
    machines = min(machines, count or 1)
    said = any(given.get(variable) for variable in SLURM_VARIABLES)
    where = "" if said else f" (by {SLURM_VARIABLES['ntasks']} of this allocation)"
    variables = _slurm_variables(given, count or 1, machines)
    return Tasks("srun", count, machines, where, variables)


def _slurm_variables(given: Given, count: int, machines: int) -> dict[str, str]:
    each = -(-count // machines)
    hosts = "node1" if machines == 1 else f"node[1-{machines}]"
    per_node = f"{each}(x{machines})" if machines > 1 else str(each)
    found = {
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"), "0"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(count)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(machines)),
        "SLURM_STEP_NUM_NODES": str(machines),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
        "SLURM_GPUS_ON_NODE": str(each),
        "SLURMD_NODENAME": "node1",
        "SLURM_JOB_NAME": given.get("job-name", "train"),
    }
    of_job = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "1"),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"), hosts),
    }
    found |= {name: value for name, value in of_job.items() if name not in os.environ}
    options = {"SLURM_CPUS_PER_TASK": "cpus-per-task", "SLURM_NTASKS_PER_NODE": "ntasks-per-node"}
    found |= {name: given[option] for name, option in options.items() if given.get(option)}
    if _one_gpu_each(given):
        found["CUDA_VISIBLE_DEVICES"] = "0"
    pairs = (part.partition("=") for part in given.get("export", "").split(","))
    return MEETING_PLACE | found | {name: value for name, equals, value in pairs if equals}


def _one_gpu_each(given: Given) -> bool:
    """Does each task see a single GPU, which is its cuda:0?"""
    per_task = given.get("gpus-per-task", "").rpartition(":")[2]
    bound = given.get("gpu-bind", "").removeprefix("verbose,")
    return bound in ("single:1", "per_task:1") or (per_task == "1" and bound != "none")


# -- MPI ------------------------------------------------------------------------------------------

#: Open MPI's, MPICH's and Intel MPI's names of it.
MPI_PROGRAMS: Final = ("mpirun", "mpiexec", "orterun", "mpiexec.hydra")

#: Options that say how many tasks there are.
_COUNTS: Final = ("n", "np", "c", "n-procs")
_PER_NODE: Final = ("N", "npernode", "ppn", "perhost")
_HOSTS: Final = ("H", "host", "hosts")
_FILES: Final = ("hostfile", "machinefile", "f", "default-hostfile")
#: Options that MPICH and Intel MPI have, and Open MPI has not.
_OF_PMI: Final = frozenset(("ppn", "perhost", "hosts", "f", "genv", "env", "genvall", "iface"))
#: One-word options of ``-x`` (Open MPI) and of two words (MPICH) that set variables.
_SETS: Final = ("x", "genv", "env")


def of_mpi(given: Given) -> Tasks:
    """mpirun starts as many as ``-np`` says, else one for each slot of its hosts."""
    hosts = _hosts(given)
    each = next((number(given[name]) for name in _PER_NODE if given.get(name)), None)
    said = next((given[name] for name in _COUNTS if given.get(name)), "")
    if said:
        count = number(said)
    elif each is not None and hosts:
        count = each * len(hosts)
    else:
        count = sum(hosts.values()) or None
    if each is not None and count:
        machines = -(-count // each)
    else:
        machines = _filled(list(hosts.values()), count or 1)
    return Tasks("mpirun", count, machines, "", _mpi_variables(given, count or 1, machines))


def _filled(slots: list[int], count: int) -> int:
    """The number of hosts of ``count`` tasks that fill one after the other."""
    machines = 0
    while count > 0 and machines < len(slots):
        count -= slots[machines]
        machines += 1
    return max(1, machines)


def _hosts(given: Given) -> dict[str, int]:
    """Slots by host, of ``-H a:4,b:4`` or of a file of hosts (``a slots=4``, ``a:4``)."""
    named = next((given[name] for name in _HOSTS if given.get(name)), "")
    lines = [part for part in named.replace(SEPARATOR, ",").split(",") if part]
    if not lines and (path := next((given[name] for name in _FILES if given.get(name)), "")):
        try:
            # A device may have no end.
            lines = Path(path).read_text().splitlines() if Path(path).is_file() else []
        except (OSError, UnicodeDecodeError):
            return {}
    hosts: dict[str, int] = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, slots = words[0].partition(":")
        said = next((word[6:] for word in words[1:] if word.startswith("slots=")), slots)
        hosts[host] = hosts.get(host, 0) + (number(said) or 1)
    return hosts


def _mpi_variables(given: Given, count: int, machines: int) -> dict[str, str]:
    each = -(-count // machines)
    if _OF_PMI & given.keys():
        found = {"PMI_RANK": "0", "PMI_SIZE": str(count)}
        found |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": str(each)}
    else:
        ranks = ("RANK", "LOCAL_RANK", "NODE_RANK")
        found = {f"OMPI_COMM_WORLD_{name}": "0" for name in ranks}
        found |= {"OMPI_COMM_WORLD_SIZE": str(count), "OMPI_UNIVERSE_SIZE": str(count)}
        found["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(each)
    for option in _SETS:
        for word in given.get(option, "").split(SEPARATOR):
            name, equals, value = word.partition("=")
            if equals:
                found[name] = value
    return MEETING_PLACE | found
