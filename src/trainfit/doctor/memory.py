"""RAM, swap, the shared memory of DataLoader workers, and the storage of a path."""

from __future__ import annotations

import shlex

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import (
    bad,
    brief,
    evidence,
    good,
    on_host,
    raise_limit,
    unsure,
)
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Machine, Storage
from trainfit.results.text import byte_rate, percent, size

_LARGEST = "ps -eo pid,user,rss,comm --sort=-rss | head"


def check_memory(machine: Machine) -> tuple[Check, ...]:
    """What is available of RAM and of the cgroup's limit, and swap in use."""
    name = "memory"
    memory = machine.memory
    found = [
        evidence("RAM", memory.total_bytes, size),
        evidence("available", memory.available_bytes, size),
        evidence("cgroup memory limit", memory.limit_bytes, size),
        evidence("cgroup memory in use", memory.limit_used_bytes, size),
        evidence("swap", memory.swap_total_bytes, size),
        evidence("swap in use", memory.swap_used_bytes, size),
    ]
    total, available = memory.total_bytes.value, memory.available_bytes.value
    limit_check = _near_limit(machine, name, found)
    if limit_check is not None:
        return (limit_check,)
    if total is None or available is None:
        needed = "MemTotal and MemAvailable of /proc/meminfo"
        return (unsure(name, "the available memory could not be determined", needed, found),)
    check = _nearly_full(name, total, available, found) or _swapping(machine, name, found)
    return (check or _enough(machine, name, total, available, found),)


def _enough(
    machine: Machine, name: str, total: int, available: int, evidence: list[Evidence]
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
            f"it is less than one GPU's {size(largest)}: a checkpoint as large as the "
            "GPU cannot be loaded at once (torch.load(..., mmap=True), or one shard at a time)"
        )
    return good(name, summary, evidence, why)


def _near_limit(machine: Machine, name: str, evidence: list[Evidence]) -> Check | None:
    memory = machine.memory
    limit, used = memory.limit_bytes.value, memory.limit_used_bytes.value
    if not limit or used is None or used < policy.LIMIT_USED_SHARE * limit:
        return None
    if memory.total_bytes.value and limit >= memory.total_bytes.value:
        return None  # no limit in effect: the RAM ends first
    return bad(
        name,
        "memory_limit_near",
        f"{size(used)} of this job's memory limit of {size(limit)} are in use",
        "at the limit the kernel kills a process of the job (exit code 137; a DataLoader worker "
        "'killed by signal: Killed'). Tensors "
        "in /dev/shm and workers' copies count; reclaimable file cache is not included here.",
        evidence,
        [
            Fix(
                "lower num_workers or prefetch_factor of the DataLoader",
                "the previous values",
                "slower data loading if the workers were needed",
            ),
            raise_limit(
                machine,
                (
                    f"--memory={2 * limit} --memory-swap=-1",
                    f"--memory={limit} --memory-swap={2 * limit}",
                ),
                (f"memory: {2 * limit}", f"memory: {limit}"),
                (f"MemoryMax={2 * limit}", f"MemoryMax={limit}"),
                "memory that other users of the machine may need",
            ),
        ],
    )


def _nearly_full(name: str, total: int, available: int, evidence: list[Evidence]) -> Check | None:
    least = max(policy.LEAST_AVAILABLE_BYTES, policy.LEAST_AVAILABLE_SHARE * total)
    if available >= min(least, total / 2):
        return None
    return bad(
        name,
        "memory_nearly_full",
        f"only {size(available)} of {size(total)} RAM are available",
        "each DataLoader worker is a process of several hundred MB; when memory "
        "runs out, the kernel kills one of them or the job. Before that the page cache is evicted, "
        "and every epoch reads from disk.",
        evidence,
        [
            Fix(
                f"{_LARGEST}  # then: kill PID",
                "restart the programs",
                "unsaved work of the terminated program",
            )
        ],
    )


def _swapping(machine: Machine, name: str, evidence: list[Evidence]) -> Check | None:
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
        f"{size(used)} swapped out, only {percent(available / total)} of RAM available",
        "swapped pages are read back from disk when accessed: steps "
        "stall for milliseconds to seconds.",
        evidence,
        [
            Fix(
                f"{_LARGEST}  # terminate what is not needed: kill PID",
                "restart the programs",
                "unsaved work of the terminated program",
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
        return (
            unsure(name, "the size of /dev/shm could not be read", "statvfs of /dev/shm", found),
        )
    ram = memory.total_bytes.value
    cut = ram is None or total.value < policy.SHM_SHARE_OF_RAM * ram
    if total.value < policy.LEAST_SHM_BYTES and cut:
        return (_small_shm(machine, name, total.value, found),)
    if free.value is not None and free.value < policy.LEAST_SHM_BYTES < total.value:
        return (_full_shm(name, free.value, total.value, found),)
    return (good(name, f"/dev/shm has {size(total.value)}", found, _NEED),)


_NEED = (
    "it must hold num_workers × prefetch_factor × bytes per batch; a batch of 64 float32 "
    "images of 3 × 224 × 224 is 37 MiB, so 8 workers with 2 batches each need 0.6 GiB"
)


def _small_shm(machine: Machine, name: str, total: int, evidence: list[Evidence]) -> Check:
    kubernetes = "kube" in (machine.surroundings.container.value or "").lower()
    wanted = policy.SHM_WANTED
    remount = Fix(
        f"sudo mount -o remount,size={wanted} /dev/shm",
        f"sudo mount -o remount,size={total} /dev/shm",
        "none until it is filled: then the same amount of RAM; inside a container it needs "
        "--privileged",
    )
    docker = [
        Fix(
            f"docker run --shm-size={wanted} IMAGE",
            f"docker run --shm-size={total} IMAGE",
            "none until it is filled; it counts toward the container's memory",
        ),
        Fix(
            "docker run --ipc=host IMAGE",
            "docker run IMAGE",
            "the container shares /dev/shm with the host: less isolation",
        ),
    ]
    pod = Fix(
        "add to the pod: volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}], "
        "volumeMounts: [{name: shm, mountPath: /dev/shm}]",
        "remove the volume and its mount",
        "none until it is filled; it counts toward the pod's memory",
    )
    in_container = machine.surroundings.container.is_known
    remedies = [pod] if kubernetes else docker if in_container else [remount]
    return bad(
        name,
        "shm_small",
        f"/dev/shm has {size(total)}: DataLoader workers die there with a bus error",
        f"{_NEED}. Docker and Kubernetes give 64 MiB by default; when it is full, a worker is "
        "'killed by signal: Bus error'. The sharing strategy 'file_system' uses "
        "it, too.",
        evidence,
        [
            *remedies,
            Fix(
                "DataLoader(..., num_workers=0)",
                "the previous num_workers",
                "the main process loads the data: the GPU waits for it",
            ),
        ],
    )


def _full_shm(name: str, free: int, total: int, evidence: list[Evidence]) -> Check:
    return bad(
        name,
        "shm_full",
        f"only {size(free)} of {size(total)} in /dev/shm are free",
        f"{_NEED}. Running jobs fill it, or files left by killed jobs (torch_*, psm_*, "
        "nccl-*): when it is full, a worker is 'killed by signal: Bus error'.",
        evidence,
        [
            Fix(
                "ls -lS /dev/shm | head; fuser -v /dev/shm/torch_*  # rm unused ones",
                "none: removed files cannot be restored",
                "a job that still uses a removed file fails when it reopens it",
            )
        ],
    )


def _no_shm(machine: Machine, name: str, evidence: list[Evidence]) -> Check:
    return bad(
        name,
        "shm_missing",
        "no /dev/shm: DataLoader workers cannot transfer tensors",
        "workers put batches, and multiprocessing its locks, into shared memory: without "
        "it any num_workers above 0 fails.",
        evidence,
        [
            Fix(
                f"sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o size={policy.SHM_WANTED} "
                "tmpfs /dev/shm",
                "sudo umount /dev/shm",
                on_host(machine, "none until it is filled"),
            )
        ],
    )


# ---
# Check of the storage of a path: space for checkpoints, and read rate.


DISK = "disk"


def check_disk(machine: Machine) -> tuple[Check, ...]:
    """Free space, the measured rate, and the kind where no rate was measured."""
    storage = machine.storage
    found = [
        Evidence("path", storage.path or "(empty)", source="the requested path"),
        evidence("file system", storage.filesystem),
        evidence("mounted at", storage.mount_point),
        evidence("kind", storage.kind),
        evidence("size", storage.total_bytes, size),
        evidence("free", storage.free_bytes, size),
        evidence("read rate bypassing the page cache", storage.read_bytes_per_s, byte_rate),
        evidence("read rate from the page cache", storage.cached_bytes_per_s, byte_rate),
    ]
    check = _full(storage, found) or _slow(storage, found) or _rotating(storage, found)
    return (check or _fine(storage, found),)


def _full(storage: Storage, evidence: list[Evidence]) -> Check | None:
    free = storage.free_bytes.value
    if free is None or free >= policy.LEAST_FREE_BYTES:
        return None
    place = storage.mount_point.value or storage.path
    return bad(
        DISK,
        "disk_full",
        f"only {size(free)} free at {brief(place, 40)}",
        "a checkpoint with AdamW's moments needs 12 bytes per parameter (1.2 GB for 100 "
        "million); one that does not fit stops the job or is truncated.",
        evidence,
        [
            Fix(
                f"du -xh --max-depth=2 {shlex.quote(place)} | sort -h | tail  "
                "# then remove old files",
                "none: removed files cannot be restored",
                "the removed files",
            )
        ],
    )


def _slow(storage: Storage, evidence: list[Evidence]) -> Check | None:
    measured = storage.read_bytes_per_s.value
    if measured is None or measured >= policy.LEAST_READ_RATE:
        return None
    return bad(
        DISK,
        "disk_slow",
        f"storage reads at {byte_rate(measured)}, less than {byte_rate(policy.LEAST_READ_RATE)}",
        "one GPU consumes 900 images of 110 kB per second, 100 MB/s, or more: the first "
        "epoch, and every epoch if the data set is larger than RAM, runs at the disk's rate.",
        evidence,
        [_copy(storage), _pack()],
    )


def _rotating(storage: Storage, evidence: list[Evidence]) -> Check | None:
    """A rotating disk whose rate was not measured: the time of its seeks is known."""
    if storage.kind.value != "hdd" or storage.read_bytes_per_s.is_known:
        return None
    return bad(
        DISK,
        "disk_rotates",
        f"{brief(storage.path, 40)} is on a rotating disk: about 100 random reads a second",
        "a shuffled DataLoader reads files in random order, and each costs a seek of about 10 ms "
        "regardless of the number of workers. Data that fits in RAM is slow in the first epoch "
        "only; large files read sequentially are not affected.",
        evidence,
        [_copy(storage), _pack()],
    )


def _copy(storage: Storage) -> Fix:
    return Fix(
        f"rsync -a {shlex.quote(storage.path)}/ /path/on/a/local/ssd/  # and point the job there",
        "point the job at the previous path; rm -r the copy",
        "disk space for the copy, and the time to copy once",
    )


def _pack() -> Fix:
    return Fix(
        "pack the files into shards of some 100 MB (WebDataset's tar, Parquet) and shuffle in a "
        "buffer",
        "read individual files again",
        "shuffling happens within a buffer and between shards, not over the whole data set",
    )


def _fine(storage: Storage, evidence: list[Evidence]) -> Check:
    free, measured, kind = (
        storage.free_bytes.value,
        storage.read_bytes_per_s.value,
        storage.kind.value,
    )
    if free is None:
        needed = f"statvfs of {storage.path}"
        return unsure(DISK, "the free space could not be read", needed, evidence)
    room = f"{size(free)} free"
    if measured is not None:
        named = brief(kind or "kind unknown")
        return good(DISK, f"{room}, reads {byte_rate(measured)} ({named})", evidence)
    if kind in ("nvme", "ssd", "memory"):
        return good(DISK, f"{room}, {kind}", evidence, "read rate not measured")
    words = {"network": "network storage", None: "storage of unknown type"}
    what = words.get(kind, f"{kind} storage")
    needed = (
        "a measured read rate: trainfit doctor --data FOLDER, with the training data's "
        f"folder (checked: {storage.path}; {storage.read_bytes_per_s.reason or 'no rate'})"
    )
    return unsure(DISK, f"{room}; read rate of {brief(what)} not measured", needed, evidence)
