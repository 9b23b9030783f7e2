"""The folders that an overlay must cover, and the mounts that it leaves unchanged."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from trainfit.hardware.host.mounts import Mount, relative

#: Shared memory: DataLoader workers hand batches over through files in it.
SHARED_MEMORY = "/dev/shm"
#: Devices, processes and the kernel's settings are no files of the user's.
_SYSTEM = ("/dev", "/proc", "/sys")
#: File systems that hold no files, in other places.
_NO_FILES = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
        *("devtmpfs", "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore"),
        *("rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
    }
)
#: The kernel's list of them (proc(5)): the path is the eighth field.
_SOCKETS = "/proc/net/unix"
#: A folder with more entries is not taken apart to cover each of them.
_MOST_ENTRIES = 400


@dataclasses.dataclass(frozen=True)
class MountPlan:
    """``covered`` get an overlay each, in this order. ``kept`` are mount points (of what is
    read-only or holds no files) that an overlay above them would hide. ``bare`` are mounts
    of which not every folder can be covered: what is left of them is made read-only."""

    covered: tuple[str, ...]
    kept: tuple[str, ...]
    bare: tuple[str, ...]


def places(mounts: Sequence[Mount], layers: Sequence[str], *, locked: bool) -> MountPlan:
    """Of the mounts that this process sees.

    A folder that holds all of ``layers`` is covered by its subfolders, as a layer cannot lie
    in what it covers. So is one with mounts below it where these are ``locked``: in a user
    namespace the kernel lets nobody look below them (mount_namespaces(7)). There, folders of
    the user's own and shared ones are covered by themselves too: what belongs to others cannot
    be copied into a layer.
    """
    shown = _shown(mounts)
    points = [mount.point for mount in shown]
    covered: list[str] = []
    kept: list[str] = []
    bare: list[str] = []
    for mount in shown:
        if not _is_covered(mount):
            kept.append(mount.point)
            continue
        below = [point for point in points if point != mount.point and _in(point, mount.point)]
        found, whole = _split(mount.point, below, layers, locked)
        covered += found
        if not whole:
            bare.append(mount.point)
    if locked:
        covered += [each for each in _own_folders() if _lies_in_one(each, covered)]
    covered = sorted(dict.fromkeys(covered), key=lambda path: (path.count("/"), path))
    above = [path for path in kept if any(_in(path, each) for each in covered)]
    return MountPlan(tuple(covered), tuple(above), tuple(bare))


def open_sockets(covered: Sequence[str]) -> list[str]:
    """Sockets of running services: through an overlay nobody reaches them (MPS, nscd, sssd)."""
    try:
        lines = Path(_SOCKETS).read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []
    named = (line.split(maxsplit=7)[-1] for line in lines if line.count(" ") >= 7)
    paths = dict.fromkeys(each for each in named if each.startswith("/"))
    inside = (each for each in paths if any(_in(each, folder) for folder in covered))
    return [each for each in inside if os.access(each, os.W_OK)][:_MOST_ENTRIES]


def foreign_files(folder: str, uid: int, gid: int) -> str:
    """Something in ``folder`` that the user may write but a user namespace of the user's own
    cannot show as it is: it belongs to another user or group. Empty if there is none."""
    groups = {*os.getgroups(), gid}
    try:
        paths = [folder, *(entry.path for entry in os.scandir(folder))]
    except OSError:
        return ""
    for path in paths:
        try:
            found = os.lstat(path)
        except OSError:
            continue
        if found.st_uid == uid and found.st_gid == gid:
            continue
        by_group = found.st_gid in groups and found.st_mode & stat.S_IWGRP
        is_own = found.st_uid == uid and found.st_mode & stat.S_IWUSR
        if path != folder and (by_group or is_own):
            return path
    return ""


def _shown(mounts: Sequence[Mount]) -> list[Mount]:
    """The mounts that can be reached: a later one on the same point covers the earlier one."""
    last = {mount.point: mount for mount in mounts}
    return sorted(last.values(), key=lambda mount: (mount.point.count("/"), mount.point))


def _is_covered(mount: Mount) -> bool:
    if mount.point == SHARED_MEMORY:
        return mount.filesystem == "tmpfs"
    if any(_in(mount.point, folder) for folder in _SYSTEM) or mount.filesystem in _NO_FILES:
        return False
    try:
        writable = not os.statvfs(mount.point).f_flag & os.ST_RDONLY
    except OSError:  # not even root may look into another user's FUSE file system
        return False
    return writable and os.path.isdir(mount.point)


def _split(
    folder: str, below: Sequence[str], layers: Sequence[str], locked: bool
) -> tuple[list[str], bool]:
    """Folders that cover ``folder``, and whether they cover all of it."""
    inside = [point for point in below if _in(point, folder)]
    holds_layers = all(_in(layer, folder) for layer in layers)
    if folder != "/" and not holds_layers and not (locked and inside):
        return [folder], True
    found: list[str] = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return [], False
    if len(entries) > _MOST_ENTRIES:
        return [], False
    for entry in entries:
        skip = entry.path in inside or entry.path in layers or entry.path in _SYSTEM
        if not skip and entry.is_dir(follow_symlinks=False):
            found += _split(entry.path, inside, layers, locked)[0]
    return found, False


def _own_folders() -> list[str]:
    """Where a user's scripts write, as real paths."""
    named = [os.getcwd(), str(Path.home()), "/tmp", "/var/tmp", os.environ.get("TMPDIR", "/tmp")]
    paths = [os.path.realpath(each) for each in named]
    return [each for each in dict.fromkeys(paths) if each != "/" and os.path.isdir(each)]


def _lies_in_one(path: str, folders: Sequence[str]) -> bool:
    return path not in folders and any(_in(path, folder) for folder in folders)


def _in(path: str, folder: str) -> bool:
    return relative(path, folder) is not None
