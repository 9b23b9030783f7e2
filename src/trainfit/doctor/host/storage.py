"""Check of the storage of a path: space for checkpoints, and read rate."""

from __future__ import annotations

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.doctor.formatting import brief, quoted
from trainfit.results.format import byte_rate, size
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Machine, Storage

NAME = "disk"


def check_disk(machine: Machine) -> tuple[Check, ...]:
    """Free space, the measured rate, and the kind where no rate was measured."""
    storage = machine.storage
    found = [
        Evidence("path", storage.path or "(empty)", "the requested path"),
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


def _full(storage: Storage, found: list[Evidence]) -> Check | None:
    free = storage.free_bytes.value
    if free is None or free >= policy.LEAST_FREE_BYTES:
        return None
    place = storage.mount_point.value or storage.path
    return bad(
        NAME,
        "disk_full",
        f"only {size(free)} free at {brief(place, 40)}",
        "a checkpoint with AdamW's moments needs 12 bytes per parameter (1.2 GB for 100 "
        "million); one that does not fit stops the job or is truncated.",
        found,
        [
            Fix(
                f"du -xh --max-depth=2 {quoted(place)} | sort -h | tail  # then remove old files",
                "none: removed files cannot be restored",
                "the removed files",
            )
        ],
    )


def _slow(storage: Storage, found: list[Evidence]) -> Check | None:
    measured = storage.read_bytes_per_s.value
    if measured is None or measured >= policy.LEAST_READ_RATE:
        return None
    return bad(
        NAME,
        "disk_slow",
        f"storage reads at {byte_rate(measured)}, less than {byte_rate(policy.LEAST_READ_RATE)}",
        "one GPU consumes 900 images of 110 kB per second, 100 MB/s, or more: the first "
        "epoch, and every epoch if the data set is larger than RAM, runs at the disk's rate.",
        found,
        [_copy(storage), _pack()],
    )


def _rotating(storage: Storage, found: list[Evidence]) -> Check | None:
    """A rotating disk whose rate was not measured: the time of its seeks is known."""
    if storage.kind.value != "hdd" or storage.read_bytes_per_s.is_known:
        return None
    return bad(
        NAME,
        "disk_rotates",
        f"{brief(storage.path, 40)} is on a rotating disk: about 100 random reads a second",
        "a shuffled DataLoader reads files in random order, and each costs a seek of about 10 ms "
        "regardless of the number of workers. Data that fits in RAM is slow in the first epoch "
        "only; large files read sequentially are not affected.",
        found,
        [_copy(storage), _pack()],
    )


def _copy(storage: Storage) -> Fix:
    return Fix(
        f"rsync -a {quoted(storage.path)}/ /path/on/a/local/ssd/  # and point the job there",
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


def _fine(storage: Storage, found: list[Evidence]) -> Check:
    free, measured, kind = (
        storage.free_bytes.value,
        storage.read_bytes_per_s.value,
        storage.kind.value,
    )
    if free is None:
        needed = f"statvfs of {storage.path}"
        return unsure(NAME, "the free space could not be read", needed, found)
    room = f"{size(free)} free"
    if measured is not None:
        named = brief(kind or "kind unknown")
        return good(NAME, f"{room}, reads {byte_rate(measured)} ({named})", found)
    if kind in ("nvme", "ssd", "memory"):
        return good(NAME, f"{room}, {kind}", found, "read rate not measured")
    words = {"network": "network storage", None: "storage of unknown type"}
    what = words.get(kind, f"{kind} storage")
    needed = (
        "a measured read rate: trainfit doctor --data FOLDER, with the training data's "
        f"folder (checked: {storage.path}; {storage.read_bytes_per_s.reason or 'no rate'})"
    )
    return unsure(NAME, f"{room}; read rate of {brief(what)} not measured", needed, found)
