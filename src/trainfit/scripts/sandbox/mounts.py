"""The mounts that an overlay needs, and the Linux system calls that Python does not offer."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.hardware.machine.storage import Mount, relative

#: Shared memory: DataLoader workers hand batches over through files in it.
SHARED_MEMORY = "/dev/shm"
#: Devices, processes and the kernel's settings are no files of the user's.
SYSTEM = ("/dev", "/proc", "/sys")
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
    """A plan of overlays for the mounts that this process sees.

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
        covered += [folder for folder in _own_folders() if _lies_in_one(folder, covered)]
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
    inside = (path for path in paths if any(_in(path, folder) for folder in covered))
    return [path for path in inside if os.access(path, os.W_OK)][:_MOST_ENTRIES]


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
    if any(_in(mount.point, folder) for folder in SYSTEM) or mount.filesystem in _NO_FILES:
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
        skip = entry.path in inside or entry.path in layers or entry.path in SYSTEM
        if not skip and entry.is_dir(follow_symlinks=False):
            found += _split(entry.path, inside, layers, locked)[0]
    return found, False


def _own_folders() -> list[str]:
    """The folders in which a user's scripts write, as real paths."""
    named = [os.getcwd(), str(Path.home()), "/tmp", "/var/tmp", os.environ.get("TMPDIR", "/tmp")]
    paths = [os.path.realpath(each) for each in named]
    return [path for path in dict.fromkeys(paths) if path != "/" and os.path.isdir(path)]


def _lies_in_one(path: str, folders: Sequence[str]) -> bool:
    return path not in folders and any(_in(path, folder) for folder in folders)


def _in(path: str, folder: str) -> bool:
    return relative(path, folder) is not None


# ---
# Linux system calls that Python does not offer, by ctypes. Every failure is an ``OSError``.


# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/capability.h>
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
_AT_FDCWD = -100
_MOUNT_ATTR_RDONLY = 0x1
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x2008_0522
#: The same number on every architecture, as of all system calls since 5.1.
_SYS_MOUNT_SETATTR = 442


def unshare(flags: int) -> None:
    _checked(_libc().unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int, flags: int) -> None:
    _checked(_libc().setns(ctypes.c_int(descriptor), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2); ``target`` is in the error."""
    result = _libc().mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _checked(result, target)


def make_read_only(point: str) -> None:
    """The mount at ``point`` alone, not what is mounted below it (mount_setattr(2), Linux 5.12)."""
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc().syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(point),
        ctypes.c_uint(0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(result, point)


def adopt_orphans() -> None:
    """Descendants whose parents die become children of this process (prctl(2))."""
    _checked(_libc().prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def map_to_itself(uid: int, gid: int) -> None:
    """Users and groups of a new user namespace (user_namespaces(7)): only one of each."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


class Capabilities:
    """The capabilities that a new user namespace gave to a user who is not root.

    The script runs without them (what a user may not do fails for it too), and they are
    taken up again to make another layer.
    """

    def lay_down(self) -> None:
        self._set_effective(0)

    def take_up(self) -> None:
        self._set_effective(0xFFFF_FFFF)

    def _set_effective(self, mask: int) -> None:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low, then high words
        _checked(_libc().capget(ctypes.byref(header), ctypes.byref(data)), "capget")
        for word in (0, 3):
            data[word] = data[word + 1] & mask
        _checked(_libc().capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
