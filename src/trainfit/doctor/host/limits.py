"""Checks of process limits that stop a job with workers: open files, and the user's threads."""

from __future__ import annotations

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.doctor.formatting import all_gpus, whole
from trainfit.hardware.machine.limits import OWN_FILES
from trainfit.results.format import count
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Machine


def files_needed(workers: int) -> int:
    """Open files of one process whose DataLoader has ``workers`` workers."""
    return workers * policy.PREFETCH * policy.TENSORS_PER_BATCH + OWN_FILES


def usual_workers(machine: Machine) -> int | None:
    """Half of the usable cores of each GPU's process: where a search for workers starts."""
    usable = machine.cpu.usable_cores.value
    return None if usable is None else whole(usable / max(1, len(all_gpus(machine))) / 2)


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
    machine: Machine, soft: int, workers: int, needed: int, found: list[Evidence]
) -> Check:
    hard = machine.limits.open_files_hard.value
    wanted = max(needed, policy.FILES_WANTED)
    raised = min(wanted, hard) if hard is not None else wanted
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
                f'echo "$USER - nofile {wanted}" | sudo tee /etc/security/limits.d/trainfit.conf',
                "sudo rm /etc/security/limits.d/trainfit.conf",
                "none; takes effect at the next login (in a container: docker run --ulimit "
                f"nofile={wanted})",
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
        found,
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
