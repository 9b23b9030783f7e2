"""Checks of what a container or scheduler allocates, against what the process sees."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainfit.doctor.findings import bad, evidence, good
from trainfit.doctor.formatting import brief, restore, whole
from trainfit.results.format import core_count, cores, count, size
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Machine


def check_container(machine: Machine) -> tuple[Check, ...]:
    """The limits of a container in one place; what is too little is bad in its own check."""
    name = "container"
    container = machine.surroundings.container
    if container.value is None:
        return ()
    cpu, memory = machine.cpu, machine.memory
    found = [
        evidence("container", container),
        evidence("CPU quota in cores", cpu.quota_cores, cores),
        evidence("memory limit", memory.limit_bytes, size),
        evidence("/dev/shm", memory.shm_total_bytes, size),
        evidence("locked memory", machine.limits.locked_memory_bytes, size),
    ]
    limits = []
    if cpu.quota_cores.value is not None:
        limits.append(f"{core_count(cpu.quota_cores.value)}")
    if memory.limit_bytes.value is not None:
        limits.append(f"{size(memory.limit_bytes.value)} RAM")
    if memory.shm_total_bytes.value is not None:
        limits.append(f"{size(memory.shm_total_bytes.value)} /dev/shm")
    words = ", ".join(limits) or "no CPU or memory limit is visible"
    why = (
        "free, top and nproc show the host's figures; checks cores, memory and shm use these "
        "limits. Clocks, drivers and limits are changed on the host. The locked-memory limit "
        "affects RDMA between machines (docker run --ulimit memlock=-1), not CUDA's pinned memory."
    )
    return (good(name, f"in {brief(container.value)}: {words}", found, why),)


_GRANTS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_CPUS_PER_NODE",
    "PBS_NCPUS",
    "NSLOTS",
    "LSB_DJOB_NUMPROC",
)
#: How a job asks for CPUs, by scheduler.
_REQUESTS = {
    "slurm": "#SBATCH --cpus-per-task={}",
    "pbs": "#PBS -l select=1:ncpus={}",
    "lsf": "#BSUB -n {}",
    "sge": "#$ -pe smp {}",
}


def granted_cpus(grant: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable with the CPUs that a scheduler grants one task here, and their number."""
    for variable in _GRANTS:
        # "16(x2)": as many on each of two nodes.
        match = re.match(r"([0-9]{1,6})(\(x[0-9]+\))?(,|$)", grant.get(variable, ""))
        if match and int(match[1]) > 0:
            return variable, int(match[1])
    return None


def check_scheduler(machine: Machine) -> tuple[Check, ...]:
    """What Slurm granted against what the process sees."""
    name = "scheduler"
    scheduler = machine.surroundings.scheduler
    if scheduler.value is None:
        return ()
    grant = dict(machine.surroundings.scheduler_grant)
    found = [
        evidence("scheduler", scheduler),
        *(Evidence(key, value or "(empty)", "environment") for key, value in sorted(grant.items())),
        evidence("usable cores", machine.cpu.usable_cores, cores),
    ]
    usable = machine.cpu.usable_cores.value
    granted = granted_cpus(grant)
    logical = machine.cpu.logical_cpus.value
    if usable is not None and usable <= 1 and (logical or 1) > 1:
        return (_one_cpu(machine, name, found),)
    if granted is not None and usable is not None and usable > granted[1]:
        return (_more_seen(machine, name, granted, usable, found),)
    if granted is None:
        summary = f"{brief(scheduler.value)}: no CPU allocation in the environment"
        return (
            good(
                name, summary, found, "the usable cores are derived from affinity and quota instead"
            ),
        )
    summary = (
        f"{brief(scheduler.value)} allocates {count(granted[1], 'CPU')}; the process sees no more"
    )
    return (good(name, summary, found),)


def _one_cpu(machine: Machine, name: str, found: list[Evidence]) -> Check:
    wanted = min(8, machine.cpu.logical_cpus.value or 8)
    slurm = machine.surroundings.scheduler.value == "slurm"
    then = f"  # and: srun --cpus-per-task={wanted} python train.py" if slurm else ""
    return bad(
        name,
        "scheduler_grants_one_cpu",
        "the scheduler allocates one CPU: workers and the main process share it",
        "loading and kernel launches compete for it. Slurm gives a task one CPU unless "
        "--cpus-per-task requests more, and since 22.05 srun does not inherit sbatch's value.",
        found,
        [
            Fix(
                _request(machine, wanted) + then,
                "restore the job script's line",
                "a longer wait in the queue, and CPU hours of the account",
            )
        ],
    )


def _request(machine: Machine, number: int) -> str:
    scheduler = machine.surroundings.scheduler.value or ""
    return _REQUESTS.get(scheduler, "request {} CPUs per task from the scheduler").format(number)


def _more_seen(
    machine: Machine, name: str, granted: tuple[str, int], usable: float, found: list[Evidence]
) -> Check:
    variable, number = granted
    return bad(
        name,
        "scheduler_grants_fewer",
        f"{variable} allocates {count(number, 'CPU')}, but the process may run on {cores(usable)}",
        "the cluster does not confine jobs to their CPUs: libraries and workers "
        "that count visible CPUs compete with other jobs for theirs.",
        found,
        [
            Fix(
                f"export OMP_NUM_THREADS={number}  # and num_workers={max(1, number - 1)} at most",
                restore(machine, "OMP_NUM_THREADS"),
                "none: the other CPUs belong to other jobs",
            ),
            Fix(
                _request(machine, whole(usable)),
                _request(machine, number),
                "a longer wait in the queue, and CPU hours of the account",
            ),
        ],
    )
