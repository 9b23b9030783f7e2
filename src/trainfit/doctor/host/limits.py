"""Limits of the process that end a job with workers: open files, and threads of the user."""

from __future__ import annotations

from trainfit.doctor import thresholds as policy
from trainfit.doctor.figures import all_gpus, whole
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.hardware.host.limits import OWN_FILES
from trainfit.results.files.words import count
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
        return (unsure(name, "the limit of open files cannot be told", "getrlimit", found),)
    if workers is None:
        needed = "the number of usable cores, see check cores"
        return (unsure(name, f"{soft} open files; workers unknown", needed, found),)
    needed_files = files_needed(workers)
    if soft < needed_files:
        return (_few_files(machine, soft, workers, needed_files, found),)
    why = (
        "enough for a DataLoader of the usual size; code that keeps batches in a list still holds "
        "a descriptor for each of their tensors ('received 0 items of ancdata'): clone them"
    )
    return (good(name, f"{soft} open files are allowed", found, why),)


def _few_files(
    machine: Machine, soft: int, workers: int, needed: int, found: list[Evidence]
) -> Check:
    hard = machine.limits.open_files_hard.value
    wanted = max(needed, policy.FILES_WANTED)
    raised = min(wanted, hard) if hard is not None else wanted
    remedies = [
        Fix(
            "torch.multiprocessing.set_sharing_strategy('file_system')  # at the script's top",
            "torch.multiprocessing.set_sharing_strategy('file_descriptor')",
            "a killed job leaves its shared memory in /dev/shm until it is removed by hand",
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
                "none; it takes effect at the next login (in a container: docker run --ulimit "
                f"nofile={wanted})",
            ),
        )
    return bad(
        "files",
        "open_files_limit_low",
        f"{soft} open files are allowed; {count(workers, 'worker')} may hold {needed}",
        "each tensor in flight between a worker and the main process is an open file: at the "
        "limit the job ends with 'Too many open files' or 'received 0 items of ancdata'. Counted "
        f"are {policy.PREFETCH} batches a worker of {policy.TENSORS_PER_BATCH} tensors each.",
        found,
        remedies,
    )


def check_processes(machine: Machine) -> tuple[Check, ...]:
    """The limit of processes and threads of this user."""
    name = "processes"
    limit = machine.limits.processes
    found = [evidence("processes and threads of this user", limit)]
    if limit.is_absent:
        return (good(name, "processes and threads are not limited", found),)
    if limit.value is None:
        return (unsure(name, "the limit of processes cannot be told", "getrlimit", found),)
    if limit.value >= policy.LEAST_PROCESSES:
        return (good(name, f"{limit.value} processes and threads are allowed", found),)
    return (
        bad(
            name,
            "process_limit_low",
            f"only {limit.value} processes and threads of this user are allowed",
            "each worker is a process, and its libraries start a thread a core: the job ends with "
            "'Resource temporarily unavailable' or 'can't start new thread'. All of this user's "
            "programs count.",
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
                    "none; it takes effect at the next login",
                ),
            ],
        ),
    )
