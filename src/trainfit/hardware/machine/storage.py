"""The storage below a path: where it is mounted, what kind it is, how fast it is read."""

from __future__ import annotations

from typing import Any, Final

from trainfit.hardware.machine.mounts import (
    MOUNTINFO,
    Mount,
    device_name,
    disk_kind,
    mount_of,
    normal,
    read_mounts,
)
from trainfit.hardware.machine.parsing import asked
from trainfit.hardware.machine.system import Space, System
from trainfit.results.machine import DiskKind, Fact, Storage, cannot_tell, known
from trainfit.results.text import size

#: File systems of other machines; 9p, virtiofs and the like are folders of the host.
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "lustre", "ceph", "glusterfs", "beegfs")
) | {"gpfs", "panfs", "wekafs", "orangefs", "pvfs2", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs"}
#: The same through FUSE, where the type is "fuse.NAME".
_NETWORK_FUSE: Final = frozenset(
    ("sshfs", "glusterfs", "ceph", "ceph-fuse", "s3fs", "gcsfuse", "rclone", "juicefs", "goofys")
) | {"blobfuse", "blobfuse2", "mount-s3", "mountpoint-s3", "vmhgfs-fuse", "davfs", "moosefs"}
_MEMORY: Final = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
_OVERLAY: Final = frozenset(("overlay", "aufs", "fuse.fuse-overlayfs"))

#: Both readings together.
_SECONDS = 1.0
#: Files looked at; each may be a question to a server.
_MOST_FILES = 1000
#: Less than that `read_rate` does not take for a rate.
_LEAST_BYTES = 8 << 20


def read_storage(system: System, data: str | None) -> Storage:
    """Facts of the storage that holds ``data``, a file or folder; none of them raises.

    Without ``data`` it is the current folder, and no rate is measured. Reading takes about a
    second, of the largest file found.
    """
    try:
        path = system.real_path(data if data is not None else ".")
    except (OSError, ValueError) as error:
        return _nothing(str(data), f"it is not a path ({error})")
    mounts = read_mounts(system)
    listed = mounts.value or ()
    mount = mount_of(normal(path), listed)
    space: Fact[Space] = asked(path, lambda: system.space(path))
    rates = _rates(system, path if data is not None else None)
    nowhere: Fact[Any] = cannot_tell(MOUNTINFO, mounts.reason or "no mount point is above it")
    return Storage(
        path=path,
        filesystem=known(mount.filesystem, MOUNTINFO) if mount else nowhere,
        mount_point=known(mount.point, MOUNTINFO) if mount else nowhere,
        device=_device(mount, listed) if mount else nowhere,
        kind=_kind(system, mount, listed) if mount else nowhere,
        total_bytes=space.map(lambda found: found.total, "a size"),
        free_bytes=space.map(lambda found: found.free, "a size"),
        read_bytes_per_s=rates.map(lambda pair: pair[0], "a rate"),
        cached_bytes_per_s=rates.map(lambda pair: pair[1], "a rate"),
    )


def _nothing(path: str, why: str) -> Storage:
    fact: Fact[Any] = cannot_tell(path, why)
    return Storage(path, fact, fact, fact, fact, fact, fact, fact, fact)


# --- What it is -------------------------------------------------------------------------------


def _device(mount: Mount, mounts: tuple[Mount, ...]) -> Fact[str]:
    if mount.filesystem in _OVERLAY:
        return cannot_tell(MOUNTINFO, "an overlay's layers are directories" + _beside(mounts))
    return known(mount.source, MOUNTINFO) if mount.source else cannot_tell(MOUNTINFO, "it is empty")


def _beside(mounts: tuple[Mount, ...]) -> str:
    """Container engines mount files of theirs from the disk that the layers usually are on."""
    for mount in mounts:
        if mount.point in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
            return (
                f" of the host, whose container engine stores {mount.point} on {mount.source[:100]}"
            )
    return " that are not visible from here"


def _kind(system: System, mount: Mount, mounts: tuple[Mount, ...]) -> Fact[DiskKind]:
    through_fuse = mount.filesystem.removeprefix("fuse.").lower()
    if mount.filesystem in _NETWORK or through_fuse in _NETWORK_FUSE:
        return known("network", f"{MOUNTINFO} ({mount.filesystem})")
    if mount.filesystem in _MEMORY:
        return known("memory", f"{MOUNTINFO} ({mount.filesystem})")
    if mount.filesystem in _OVERLAY:
        return _below_overlay(system, mount, mounts) or known("overlay", MOUNTINFO)
    name = device_name(system, mount)
    if name.value is None:
        return cannot_tell(name.source, name.reason)
    return disk_kind(system, name.value, mounts)


def _below_overlay(
    system: System, mount: Mount, mounts: tuple[Mount, ...]
) -> Fact[DiskKind] | None:
    """The kind of the upper layer's disk, where the folder is visible; in containers it is not."""
    upper = next((o[9:] for o in mount.options if o.startswith("upperdir=/")), None)
    if upper is None or not system.exists(normal(upper)):
        return None
    below = mount_of(normal(upper), mounts)
    if below is None or below.filesystem in _OVERLAY:
        return None
    kind = _kind(system, below, mounts)
    return kind if kind.is_known else None


# --- How fast it is ---------------------------------------------------------------------------


def _rates(system: System, path: str | None) -> Fact[tuple[float, float]]:
    """Bytes/s past the page cache and from it, of the largest file at or below ``path``."""
    if path is None:
        return cannot_tell("--data", "no data given: pass a folder or file of training data")
    files = asked(path, lambda: system.file_sizes(path, _MOST_FILES))
    if not files.value:
        return cannot_tell(path, files.reason or "it contains no files")
    largest, nbytes = max(files.value, key=lambda file: file[1])
    if nbytes < _LEAST_BYTES:
        looked = len(files.value)
        return cannot_tell(
            path,
            f"the largest of {looked} files has {size(nbytes)}; measuring a rate needs at least "
            f"{size(_LEAST_BYTES)}",
        )
    return asked(largest, lambda: system.read_rate(largest, _SECONDS))
