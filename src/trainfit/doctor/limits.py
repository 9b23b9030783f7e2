"""Checks of what limits a job: open files and processes, what a container or scheduler grants."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, brief, evidence, good, restore, unsure, whole
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.hardware.machine.limits import OWN_FILES
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Machine
from trainfit.results.text import core_count, cores, count, size


def files_needed(workers: int) -> int:
    """Open files of one process whose DataLoader has ``workers`` workers."""
    return workers * policy.PREFETCH * policy.TENSORS_PER_BATCH + OWN_FILES


def usual_workers(machine: Machine) -> int | None:
    """Half of the usable cores of each GPU's process: where a search for workers starts."""
    usable = machine.cpu.usable_cores.value
    return None if usable is None else whole(usable / max(1, len(gpus_of_job(machine))) / 2)


def check_files(machine: Machine) -> tuple[Check, ...]:
    """The soft limit of open files, against what this machine's workers would hold."""
    name = "files"
    limits = machine.limits
    found = [
        evidence("open files (soft limit)", limits.open_files),
        evidence("open files (hard limit)", limits.open_files_hard),
    ]
    if limits.open_files.is_absent:
        return (good(name, "open files are not limited", found),)
    soft, workers = limits.open_files.value, usual_workers(machine)
    if soft is None:
        return (unsure(name, "the open-file limit could not be read", "getrlimit", found),)
    if workers is None:
        needed = "the number of usable cores, see check cores"
        return (unsure(name, f"open-file limit {soft}; number of workers unknown", needed, found),)
    needed_files = files_needed(workers)
    if soft < needed_files:
        return (_few_files(machine, soft, workers, needed_files, found),)
    why = (
        "enough for a typical DataLoader; code that keeps batches in a list "
        "still holds a file descriptor per tensor ('received 0 items of ancdata'): clone them"
    )
    return (good(name, f"open-file limit {soft}", found, why),)


def _few_files(
    machine: Machine, soft: int, workers: int, needed: int, evidence: list[Evidence]
) -> Check:
    hard = machine.limits.open_files_hard.value
    target = max(needed, policy.FILES_WANTED)
    raised = min(target, hard) if hard is not None else target
    remedies = [
        Fix(
            "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script",
            "torch.multiprocessing.set_sharing_strategy('file_descriptor')",
            "a killed job leaves its shared memory in /dev/shm until you remove it",
        )
    ]
    if raised > soft:
        remedies.insert(0, Fix(f"ulimit -n {raised}", f"ulimit -n {soft}", "none"))
    else:
        remedies.insert(
            0,
            Fix(
                f'echo "$USER - nofile {target}" | sudo tee /etc/security/limits.d/trainfit.conf',
                "sudo rm /etc/security/limits.d/trainfit.conf",
                "none; takes effect at the next login (in a container: docker run --ulimit "
                f"nofile={target})",
            ),
        )
    return bad(
        "files",
        "open_files_limit_low",
        f"open-file limit {soft}; {count(workers, 'worker')} may hold {needed}",
        "each tensor in flight between a worker and the main process is an open file: at the "
        "limit the job fails with 'Too many open files' or 'received 0 items of ancdata'. The "
        f"estimate assumes {policy.PREFETCH} prefetched batches per worker with "
        f"{policy.TENSORS_PER_BATCH} tensors each.",
        evidence,
        remedies,
    )


def check_processes(machine: Machine) -> tuple[Check, ...]:
    """The limit of processes and threads of this user."""
    name = "processes"
    limit = machine.limits.processes
    found = [evidence("processes and threads of this user", limit)]
    if limit.is_absent:
        return (good(name, "no limit of processes and threads", found),)
    if limit.value is None:
        return (unsure(name, "the process limit could not be read", "getrlimit", found),)
    if limit.value >= policy.LEAST_PROCESSES:
        return (good(name, f"at most {limit.value} processes and threads", found),)
    return (
        bad(
            name,
            "process_limit_low",
            f"at most {limit.value} processes and threads for this user",
            "each worker is a process, and its libraries start one thread per core: the job "
            "fails with 'Resource temporarily unavailable' or 'can't start new thread'. The "
            "limit covers all of this user's programs.",
            found,
            [
                Fix(
                    f"ulimit -u {4 * policy.LEAST_PROCESSES}  # if the hard limit allows it",
                    f"ulimit -u {limit.value}",
                    "none",
                ),
                Fix(
                    f'echo "$USER - nproc {4 * policy.LEAST_PROCESSES}" | sudo tee '
                    "/etc/security/limits.d/trainfit-nproc.conf",
                    "sudo rm /etc/security/limits.d/trainfit-nproc.conf",
                    "none; takes effect at the next login",
                ),
            ],
        ),
    )


# ---
# Checks of what a container or scheduler allocates, against what the process sees.


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
        *(
            Evidence(key, value or "(empty)", source="environment")
            for key, value in sorted(grant.items())
        ),
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


def _one_cpu(machine: Machine, name: str, evidence: list[Evidence]) -> Check:
    target = min(8, machine.cpu.logical_cpus.value or 8)
    slurm = machine.surroundings.scheduler.value == "slurm"
    then = f"  # and: srun --cpus-per-task={target} python train.py" if slurm else ""
    return bad(
        name,
        "scheduler_grants_one_cpu",
        "the scheduler allocates one CPU: workers and the main process share it",
        "loading and kernel launches compete for it. Slurm gives a task one CPU unless "
        "--cpus-per-task requests more, and since 22.05 srun does not inherit sbatch's value.",
        evidence,
        [
            Fix(
                _request(machine, target) + then,
                "restore the job script's line",
                "a longer wait in the queue, and CPU hours of the account",
            )
        ],
    )


def _request(machine: Machine, number: int) -> str:
    scheduler = machine.surroundings.scheduler.value or ""
    return _REQUESTS.get(scheduler, "request {} CPUs per task from the scheduler").format(number)


def _more_seen(
    machine: Machine, name: str, granted: tuple[str, int], usable: float, evidence: list[Evidence]
) -> Check:
    variable, number = granted
    return bad(
        name,
        "scheduler_grants_fewer",
        f"{variable} allocates {count(number, 'CPU')}, but the process may run on {cores(usable)}",
        "the cluster does not confine jobs to their CPUs: libraries and workers "
        "that count visible CPUs compete with other jobs for theirs.",
        evidence,
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
