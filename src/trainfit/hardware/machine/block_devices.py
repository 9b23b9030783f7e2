"""The disk type of a block device, through partitions, LVM, RAID and loops.

Sources: Linux's Documentation/ABI/stable/sysfs-block, Documentation/admin-guide/devices.txt.
"""

from __future__ import annotations

import posixpath
import re
from typing import Final

from trainfit.hardware.host.mounts import Mount, mount_of, normal
from trainfit.hardware.host.parsing import word_at
from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, cannot_tell, known
from trainfit.results.machine.machine import DiskKind

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
    system: System, name: str, mounts: tuple[Mount, ...] = (), depth: int = 0
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
    found = re.fullmatch(r"(.*[0-9])p[0-9]+|([a-z]+)[0-9]+", name)  # nvme0n1p2, sda1
    stem = (found[1] or found[2]) if found else name
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
