"""RAM, swap and the shared memory through which DataLoader workers hand over batches."""

from __future__ import annotations

from trainfit.doctor import thresholds as policy
from trainfit.doctor.figures import on_host, percent, raise_limit
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.results.files.words import size
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Machine

_LARGEST = "ps -eo pid,user,rss,comm --sort=-rss | head"


def check_memory(machine: Machine) -> tuple[Check, ...]:
    """What is available of RAM and of the cgroup's limit, and swap in use."""
    name = "memory"
    memory = machine.memory
    found = [
        evidence("RAM", memory.total_bytes, size),
        evidence("available", memory.available_bytes, size),
        evidence("limit of the cgroup", memory.limit_bytes, size),
        evidence("used of the limit", memory.limit_used_bytes, size),
        evidence("swap", memory.swap_total_bytes, size),
        evidence("swap in use", memory.swap_used_bytes, size),
    ]
    total, available = memory.total_bytes.value, memory.available_bytes.value
    limit_check = _near_limit(machine, name, found)
    if limit_check is not None:
        return (limit_check,)
    if total is None or available is None:
        needed = "MemTotal and MemAvailable of /proc/meminfo"
        return (unsure(name, "the available memory cannot be told", needed, found),)
    check = _nearly_full(name, total, available, found) or _swapping(machine, name, found)
    return (check or _enough(machine, name, total, available, found),)


def _enough(
    machine: Machine, name: str, total: int, available: int, found: list[Evidence]
) -> Check:
    summary = f"{size(available)} of {size(total)} RAM available"
    limit = machine.memory.limit_bytes.value
    if limit is not None and limit < total:
        summary += f"; this job's limit is {size(limit)}"
    why = ""
    gpus = machine.gpus.value or ()
    largest = max((gpu.memory_bytes.value or 0 for gpu in gpus), default=0)
    if largest > min(total, limit or total):
        why = (
            f"it is less than one GPU's {size(largest)}: a checkpoint that fills the GPU does not "
            "fit through it whole (torch.load(..., mmap=True), or one shard at a time)"
        )
    return good(name, summary, found, why)


def _near_limit(machine: Machine, name: str, found: list[Evidence]) -> Check | None:
    memory = machine.memory
    limit, used = memory.limit_bytes.value, memory.limit_used_bytes.value
    if not limit or used is None or used < policy.LIMIT_USED_SHARE * limit:
        return None
    if memory.total_bytes.value and limit >= memory.total_bytes.value:
        return None  # no limit in effect: the RAM ends first
    return bad(
        name,
        "memory_limit_near",
        f"{size(used)} of the {size(limit)} that this job may use are in use",
        "at the limit the kernel ends a process of the job (exit code 137; a DataLoader worker "
        "'killed by signal: Killed'). Tensors in "
        "/dev/shm and workers' copies count; file cache that can be dropped is not counted here.",
        found,
        [
            Fix(
                "lower num_workers or prefetch_factor of the DataLoader",
                "the former values",
                "a slower input, where workers were needed",
            ),
            raise_limit(
                machine,
                f"--memory={2 * limit} --memory-swap=-1|--memory={limit} --memory-swap={2 * limit}",
                f"memory: {2 * limit}|memory: {limit}",
                f"MemoryMax={2 * limit}|MemoryMax={limit}",
                "memory that others on the machine may need",
            ),
        ],
    )


def _nearly_full(name: str, total: int, available: int, found: list[Evidence]) -> Check | None:
    least = max(policy.LEAST_AVAILABLE_BYTES, policy.LEAST_AVAILABLE_SHARE * total)
    if available >= min(least, total / 2):
        return None
    return bad(
        name,
        "memory_nearly_full",
        f"only {size(available)} of {size(total)} RAM are available",
        "each DataLoader worker is a process of several hundred MB; when memory runs out, the "
        "kernel ends one of them or the job itself. Until then the page cache is gone, and every "
        "epoch reads from the disk again.",
        found,
        [
            Fix(
                f"{_LARGEST}  # then: kill PID",
                "start the ended programs again",
                "unsaved work of the program that is ended",
            )
        ],
    )


def _swapping(machine: Machine, name: str, found: list[Evidence]) -> Check | None:
    memory = machine.memory
    used, total, available = (
        memory.swap_used_bytes.value,
        memory.total_bytes.value,
        memory.available_bytes.value,
    )
    if not used or not total or available is None:
        return None
    if used < policy.SWAP_USED_SHARE * total or available >= policy.SWAP_PRESSURE_SHARE * total:
        return None
    return bad(
        name,
        "swap_in_use",
        f"{size(used)} are swapped out and only {percent(available / total)} of RAM is available",
        "what is swapped out is read back from the disk when it is touched: steps stall for "
        "milliseconds to seconds at a time.",
        found,
        [
            Fix(
                f"{_LARGEST}  # end what is not needed: kill PID",
                "start the ended programs again",
                "unsaved work of the program that is ended",
            )
        ],
    )


def check_shm(machine: Machine) -> tuple[Check, ...]:
    """/dev/shm: each batch of a worker lies there until the main process has taken it."""
    name = "shm"
    memory = machine.memory
    total, free = memory.shm_total_bytes, memory.shm_free_bytes
    found = [
        evidence("size of /dev/shm", total, size),
        evidence("free in it", free, size),
        evidence("RAM", memory.total_bytes, size),
        evidence("container", machine.surroundings.container),
    ]
    if total.is_absent:
        return (_no_shm(machine, name, found),)
    if total.value is None:
        return (unsure(name, "the size of /dev/shm cannot be told", "statvfs of /dev/shm", found),)
    ram = memory.total_bytes.value
    cut = ram is None or total.value < policy.SHM_SHARE_OF_RAM * ram
    if total.value < policy.LEAST_SHM_BYTES and cut:
        return (_small_shm(machine, name, total.value, found),)
    if free.value is not None and free.value < policy.LEAST_SHM_BYTES < total.value:
        return (_full_shm(name, free.value, total.value, found),)
    return (good(name, f"/dev/shm has {size(total.value)}", found, _NEED),)


_NEED = (
    "it has to hold num_workers × prefetch_factor × the bytes of one batch; a batch of 64 float32 "
    "images of 3 × 224 × 224 is 37 MiB, so 8 workers with 2 batches each need 0.6 GiB"
)


def _small_shm(machine: Machine, name: str, total: int, found: list[Evidence]) -> Check:
    kubernetes = "kube" in (machine.surroundings.container.value or "").lower()
    wanted = policy.SHM_WANTED
    remount = Fix(
        f"sudo mount -o remount,size={wanted} /dev/shm",
        f"sudo mount -o remount,size={total} /dev/shm",
        "none until it is filled: then as much RAM; inside a container it needs --privileged",
    )
    docker = [
        Fix(
            f"docker run --shm-size={wanted} IMAGE",
            f"docker run --shm-size={total} IMAGE",
            "none until it is filled; it counts as the container's memory",
        ),
        Fix(
            "docker run --ipc=host IMAGE",
            "docker run IMAGE",
            "the container shares all shared memory with the host: less isolation",
        ),
    ]
    pod = Fix(
        "add to the pod: volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}], "
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
        "remove the volume and its mount",
        "none until it is filled; it counts as the pod's memory",
    )
    in_container = machine.surroundings.container.is_known
    remedies = [pod] if kubernetes else docker if in_container else [remount]
    return bad(
        name,
        "shm_small",
        f"/dev/shm has {size(total)}: DataLoader workers die there with a bus error",
        f"{_NEED}. Docker and Kubernetes give 64 MiB unless told otherwise; beyond it a worker is "
        "'killed by signal: Bus error'. The sharing strategy 'file_system' uses it "
        "as well.",
        found,
        [
            *remedies,
            Fix(
                "DataLoader(..., num_workers=0)",
                "the former num_workers",
                "the main process loads the data itself: the GPU waits for it",
            ),
        ],
    )


def _full_shm(name: str, free: int, total: int, found: list[Evidence]) -> Check:
    return bad(
        name,
        "shm_full",
        f"only {size(free)} of {size(total)} in /dev/shm are free",
        f"{_NEED}. Running jobs fill it, or killed ones that left files behind (torch_*, psm_*, "
        "nccl-*): beyond it a worker is 'killed by signal: Bus error'.",
        found,
        [
            Fix(
                "ls -lS /dev/shm | head; fuser -v /dev/shm/torch_*  # rm those that nobody uses",
                "none: a removed file cannot be brought back",
                "a job that still uses a removed file fails when it opens it again",
            )
        ],
    )


def _no_shm(machine: Machine, name: str, found: list[Evidence]) -> Check:
    return bad(
        name,
        "shm_missing",
        "there is no /dev/shm: DataLoader workers cannot hand over tensors",
        "workers put batches into shared memory, and multiprocessing its locks: without it every "
        "num_workers above 0 fails.",
        found,
        [
            Fix(
                f"sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size={policy.SHM_WANTED} "
                "tmpfs /dev/shm",
                "sudo umount /dev/shm",
                on_host(machine, "none until it is filled"),
            )
        ],
    )
