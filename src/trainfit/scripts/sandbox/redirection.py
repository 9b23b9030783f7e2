"""Sends Python's file calls to a scratch layer, where the kernel allows no overlay."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainfit.scripts.sandbox.file_calls import FileCalls
from trainfit.scripts.sandbox.layer import Layer, UnavailableError
from trainfit.scripts.sandbox.mounts import SYSTEM
from trainfit.scripts.sandbox.network import Patch, after_import
from trainfit.scripts.sandbox.view import LayeredView

# ---
# Landlock (Documentation/userspace-api/landlock.rst): writes are allowed in some folders only.
#
# It holds for this process and all that it starts, whatever code they run.


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
    words = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in args
    ]
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise UnavailableError(f"Landlock: {os.strerror(error)}")
    return result


# ---
# C code that opens files by name: the names are those in the layer.
#
# What is not here is refused by Landlock, with the file's name.


def patches(view: LayeredView) -> dict[str, Patch]:
    """The patches by the module after whose import they are made."""
    return {
        "torch": functools.partial(_torch, view),
        "sqlite3": functools.partial(_sqlite, view),
        "h5py": functools.partial(_h5py, view),
        "safetensors": functools.partial(_safetensors, view),
        "cv2": functools.partial(_opencv, view),
    }


def _mapped(view: LayeredView, given: Any, *, writes: bool, keep: bool = True) -> Any:
    """The name of the file in the layer; what is no name stays as it is."""
    if not isinstance(given, str | bytes | os.PathLike):
        return given
    path = view.path(given)
    if path is None:
        return given
    return view.to_write(path, copy=keep) if writes else view.place(path)


def _first(
    view: LayeredView, function: Callable[..., Any], name: str, *, writes: bool, keep: bool = True
) -> Callable[..., Any]:
    """The function, its first argument (or ``name``) mapped."""

    def called(*args: Any, **more: Any) -> Any:
        if args:
            args = (_mapped(view, args[0], writes=writes, keep=keep), *args[1:])
        elif name in more:
            more[name] = _mapped(view, more[name], writes=writes, keep=keep)
        return function(*args, **more)

    called.__doc__ = function.__doc__
    return called


def _writer(view: LayeredView, base: Any) -> type:
    """The class of what writes an archive, which others are derived from, likewise."""

    class Writer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            init = _first(view, super().__init__, "name", writes=True, keep=False)
            init(*args, **more)

    return Writer


def _torch(view: LayeredView, module: Any) -> None:
    c = module._C
    c.PyTorchFileWriter = _writer(view, c.PyTorchFileWriter)
    c.PyTorchFileReader = _first(view, c.PyTorchFileReader, "name", writes=False)
    for storage in (module.UntypedStorage, c.StorageBase):
        original = storage.from_file

        def from_file(
            filename: Any, shared: bool = False, *args: Any, _original: Any = original, **more: Any
        ) -> Any:
            name = _mapped(view, filename, writes=bool(shared))
            return _original(name, shared, *args, **more)

        try:
            storage.from_file = staticmethod(from_file)
        except TypeError:  # a type of C
            continue


def _sqlite(view: LayeredView, module: Any) -> None:
    original = module.connect

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **more: Any) -> Any:
        text = os.fsdecode(database) if isinstance(database, bytes | os.PathLike) else database
        if text and text != ":memory:" and not str(text).startswith("file:"):
            database = _mapped(view, text, writes=True)
        return original(database, *args, **more)

    module.connect = module.dbapi2.connect = connect


def _h5py(view: LayeredView, module: Any) -> None:
    original = module.File.__init__

    @functools.wraps(original)
    def __init__(self: Any, name: Any, mode: str = "r", *args: Any, **more: Any) -> None:
        writes = mode != "r"
        name = _mapped(view, name, writes=writes, keep=mode != "w")
        original(self, name, mode, *args, **more)

    module.File.__init__ = __init__


def _safetensors(view: LayeredView, module: Any) -> None:
    serialize = module.serialize_file

    @functools.wraps(serialize)
    def serialize_file(tensors: Any, filename: Any, *args: Any, **more: Any) -> Any:
        name = _mapped(view, filename, writes=True, keep=False)
        return serialize(tensors, name, *args, **more)

    module.serialize_file = serialize_file
    module.safe_open = _first(view, module.safe_open, "filename", writes=False)


def _opencv(view: LayeredView, module: Any) -> None:
    module.imwrite = _first(view, module.imwrite, "filename", writes=True, keep=False)
    module.imread = _first(view, module.imread, "filename", writes=False)


# ---
# Redirects a process's file calls into a layer, guarded by Landlock.


@dataclasses.dataclass(frozen=True)
class Redirected:
    """``folder`` is the layer's; ``unguarded`` says why other code may write as it likes
    ("": it may not)."""

    folder: str
    earlier: tuple[str, ...]
    unguarded: str
    view: LayeredView
    calls: FileCalls


def enter(
    layer: Layer, folder: Path, guard: bool = True, before: Redirected | None = None
) -> Redirected:
    """Redirect the file calls of this process and of those that it forks.

    ``folder`` stays as it is, for real. With ``before`` the process was forked from one that
    had entered: its layer is laid over that one's.
    """
    own = str(layer.widest)
    earlier = (before.folder, *before.earlier) if before is not None else ()
    temporary = f"{own}/tmp"
    os.makedirs(temporary, exist_ok=True)
    real = [str(folder.resolve()), *SYSTEM, *map(str, layer.folders)]
    if before is not None:
        view, calls, unguarded = before.view, before.calls, before.unguarded
        view.become((own, *earlier), tuple(real))
    else:
        view = LayeredView((own,), tuple(real))
        unguarded = _guard(own, folder) if guard else "not requested"
        after_import(patches(view))
        calls = FileCalls(view)
        calls.install()
        # Rust code writes the cache otherwise, which no redirect reaches.
        os.environ["HF_HUB_DISABLE_XET"] = "1"
    # What only Python redirects is out of reach of a child program; here it may write.
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    return Redirected(own, earlier, unguarded, view, calls)


def _guard(layer: str, folder: Path) -> str:
    # The runs that are forked from here have folders next to this one.
    runs = folder if folder.name.startswith("trainfit-") else folder.parent
    try:
        allow_writes_only_in([layer, str(runs), *filter(os.path.isdir, SYSTEM[:2])])
    except UnavailableError as error:
        return str(error)
    return ""


__all__ = ["Redirected", "enter"]
