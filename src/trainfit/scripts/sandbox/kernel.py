"""Linux system calls that Python does not offer, by ctypes. Every failure is an ``OSError``."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

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
