"""The mount table, the disks behind it, and the storage below a path: what kind, how fast."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterable
from typing import Any, Final

from trainfit.hardware.machine.parsing import asked, word_at
from trainfit.hardware.machine.system import Space, System
from trainfit.results.machine import DiskKind, Fact, Storage, cannot_tell, known
from trainfit.results.text import size

# ---
# The mount table, and the disks behind block devices.


MOUNTINFO = "/proc/self/mountinfo"

_OURS = re.compile(r"trainfit (\d+:\d+) (\S+) (.*) (/.*)", re.S)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclasses.dataclass(frozen=True)
class Mount:
    """One line. ``root`` is the folder of the file system that shows at ``point``.

    ``device`` is "MAJOR:MINOR"; major 0 is no block device (btrfs, overlay, tmpfs, network).
    """

    device: str
    root: str
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def read_mounts(system: System) -> Fact[tuple[Mount, ...]]:
    """Every mount that this process sees, in their order; lines that are none are left out."""
    return system.text(MOUNTINFO).map(_parsed, "a list of mounts")


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that an absolute path lies in: the longest mount point, the last of equals."""
    best: Mount | None = None
    for mount in mounts:
        inside = relative(path, mount.point) is not None
        # A later mount on the same point covers the earlier one.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def relative(path: str, folder: str) -> str | None:
    """``path`` as seen from ``folder``: "" for itself, ``None`` where it lies outside."""
    if path == folder:
        return ""
    prefix = folder.rstrip("/") + "/"
    return path.removeprefix(prefix) if path.startswith(prefix) else None


def _parsed(text: str) -> tuple[Mount, ...] | None:
    mounts = tuple(mount for line in text.split("\n") if (mount := _mount(line)) is not None)
    return mounts or None


def _mount(line: str) -> Mount | None:
    # Fields 7 and on are optional ones, until a lone hyphen.
    before, hyphen, after = line.partition(" - ")
    left, right = before.split(" "), after.split(" ")
    if not hyphen or len(left) < 6 or len(right) < 2 or "\0" in line:
        return None
    if not re.fullmatch(r"[0-9]{1,8}:[0-9]{1,8}", left[2]):
        return None
    root, point = _unescaped(left[3]), _unescaped(left[4])
    if not point.startswith("/") or "\0" in root + point:
        return None
    options = tuple((right[2] if len(right) > 2 else "").split(","))
    if right[0] == "overlay" and (covered := _OURS.fullmatch(_unescaped(right[1]))) is not None:
        # A layer of ours over a user's files (scripts/sandbox/overlay.py): they lie below it.
        device, filesystem, source, root = covered.groups()
        return Mount(device, root, normal(point), filesystem, source, options)
    # normpath: a damaged line must not lead out of the root that is read below.
    return Mount(left[2], root, normal(point), right[0], _unescaped(right[1]), options)


def normal(path: str) -> str:
    """An absolute path without "..", "." and doubled slashes."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _unescaped(field: str) -> str:
    """Blank, tab, newline and backslash are written as octal numbers."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), field)


# ---
# The disk type of a block device, through partitions, LVM, RAID and loops.
#
# Sources: Linux's Documentation/ABI/stable/sysfs-block, Documentation/admin-guide/devices.txt.


BLOCK: Final = "/sys/class/block"

#: What hypervisors and clouds call the disks that they emulate: what is behind one is not
#: shown. (Clouds' local NVMe, "Amazon EC2 NVMe Instance Storage", "nvme_card", is not among them.)
_EMULATED = re.compile(
    r"QEMU|VBOX|VMware|Virtual[ _]?disk|Msft|PersistentDisk|nvme_card-pd"
    r"|Amazon Elastic Block Store|MSFT NVMe Accelerator|XENSRC",
    re.IGNORECASE,
)
#: Deeper stacks of devices than any real one.
_DEEPEST = 8

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.!\-]{0,63}")


def device_name(system: System, mount: Mount) -> Fact[str]:
    """The kernel's name of the device that is mounted: "nvme0n1p2", "dm-0"."""
    if not mount.device.startswith("0:"):
        link = system.link(f"/sys/dev/block/{mount.device}")
        if link.value is not None and NAME.fullmatch(name := posixpath.basename(link.value)):
            return known(name, link.source)
    # btrfs has several devices and a number of its own; the mount names one of them.
    if not mount.source.startswith("/dev/"):
        return cannot_tell("/proc/self/mountinfo", f"{mount.source[:60]!r} names no device")
    return _named(system, mount.source)


def _named(system: System, path: str) -> Fact[str]:
    """The kernel's name behind a path below /dev, such as /dev/mapper/vg-root."""
    link = system.link(path)
    if link.value is not None:
        path = normal(posixpath.join(posixpath.dirname(path), link.value))
    name = posixpath.basename(path)
    if NAME.fullmatch(name) and system.exists(f"{BLOCK}/{name}"):
        return known(name, path)
    for each in system.names(BLOCK).value or ():
        if each.startswith("dm-") and word_at(system, f"{BLOCK}/{each}/dm/name") == name:
            return known(each, f"{BLOCK}/{each}/dm/name")
    return cannot_tell(path, f"{BLOCK} has no {name[:60]!r}")


def disk_kind(
    system: System, name: str, mounts: tuple[Mount, ...], depth: int = 0
) -> Fact[DiskKind]:
    """The kind of a device by its name; of several disks behind it, theirs if they agree."""
    place = f"{BLOCK}/{name}"
    if depth > _DEEPEST:
        return cannot_tell(place, "devices form a cycle")
    if re.match(r"nbd|rbd|drbd", name):
        return known("network", place)
    if re.match(r"zram|ram[0-9]|pmem", name):
        return known("memory", place)
    if behind := _behind(system, name):
        return _of_all(system, place, behind, mounts, depth)
    if name.startswith("loop"):
        return _of_loop(system, place, mounts, depth)
    link = system.link(place)
    disk = _disk(system, name, link.value or "")
    if disk != name:
        return disk_kind(system, disk, mounts, depth + 1)
    return _of_disk(system, name, link.value or "")


def _behind(system: System, name: str) -> tuple[str, ...]:
    """The devices that LVM, encryption or RAID is made of."""
    names = system.names(f"{BLOCK}/{name}/slaves").value or ()
    return tuple(each for each in names if NAME.fullmatch(each))


def _of_all(
    system: System, place: str, names: tuple[str, ...], mounts: tuple[Mount, ...], depth: int
) -> Fact[DiskKind]:
    kinds = [disk_kind(system, name, mounts, depth + 1) for name in names[:64]]
    different = sorted({str(kind.value) for kind in kinds})
    if len(different) == 1:
        return kinds[0]
    return cannot_tell(f"{place}/slaves", f"its disks have different types: {different}")


def _of_loop(system: System, place: str, mounts: tuple[Mount, ...], depth: int) -> Fact[DiskKind]:
    file = word_at(system, f"{place}/loop/backing_file")
    mount = mount_of(normal(file), mounts) if file else None
    if mount is None:
        return cannot_tell(f"{place}/loop/backing_file", "it does not name the backing file")
    name = device_name(system, mount)
    if name.value is None:
        return cannot_tell(name.source, name.reason)
    return disk_kind(system, name.value, mounts, depth + 1)


def _disk(system: System, name: str, link: str) -> str:
    """The whole disk of a partition; anything else is itself."""
    above = posixpath.basename(posixpath.dirname(link))
    # Above a whole disk there is "block", or for NVMe its controller.
    if NAME.fullmatch(above) and system.exists(f"{BLOCK}/{above}"):
        return above
    if not system.exists(f"{BLOCK}/{name}/partition"):
        return name
    match = re.fullmatch(r"(.*[0-9])p[0-9]+|([a-z]+)[0-9]+", name)  # nvme0n1p2, sda1
    stem = (match[1] or match[2]) if match else name
    return stem if system.exists(f"{BLOCK}/{stem}") else name


def _of_disk(system: System, name: str, link: str) -> Fact[DiskKind]:
    place = f"{BLOCK}/{name}"
    if re.match(r"vd[a-z]|xvd[a-z]", name) or "/virtio" in link or "/vbd-" in link:
        return known("virtual", place)
    called = " ".join(
        word_at(system, f"{place}/device/{each}") or "" for each in ("vendor", "model")
    )
    if _EMULATED.search(called):
        return known("virtual", f"{place}/device/model")
    if name.startswith("nvme"):
        transport = word_at(system, f"{place}/device/transport")
        over_network = transport in ("tcp", "rdma", "fc")
        return known("network" if over_network else "nvme", place)
    if re.search(r"/session[0-9]+/target", link):  # iSCSI
        return known("network", place)
    rotational = system.text(f"{place}/queue/rotational")
    kinds: dict[str, DiskKind] = {"0": "ssd", "1": "hdd"}
    return rotational.map(kinds.get, "0 or 1")


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
