"""Landlock (Documentation/userspace-api/landlock.rst): writes are allowed in some folders only.

It holds for this process and all that it starts, whatever code they run.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

from trainfit.scripts.sandbox.errors import UnavailableError

#: The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

# <linux/landlock.h>: LANDLOCK_ACCESS_FS_*
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13
_TRUNCATE = 1 << 14


def allow_writes_only_in(folders: Sequence[str]) -> None:
    """Raises :class:`UnavailableError` where this kernel cannot."""
    if sys.platform != "linux":
        raise UnavailableError("Landlock needs Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    version = _call(libc, _CREATE_RULESET, None, 0, _VERSION_FLAG)
    rights = _WRITE_FILE | _REMOVE_AND_MAKE
    rights |= _REFER if version >= 2 else 0
    rights |= _TRUNCATE if version >= 3 else 0
    attributes = (ctypes.c_uint64 * 1)(rights)
    ruleset = _call(libc, _CREATE_RULESET, ctypes.byref(attributes), 8, 0)
    try:
        for folder in folders:
            _allow(libc, ruleset, folder, rights)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise UnavailableError("Landlock: no_new_privs cannot be set")
        _call(libc, _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(libc: Any, ruleset: int, folder: str, rights: int) -> None:
    parent = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr is packed: __u64 allowed_access; __s32 parent_fd
        rule = ctypes.create_string_buffer(
            rights.to_bytes(8, sys.byteorder) + parent.to_bytes(4, sys.byteorder), 12
        )
        _call(libc, _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(parent)


def _call(libc: Any, number: int, *args: Any) -> int:
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise UnavailableError(f"Landlock: {os.strerror(error)}")
    return result
