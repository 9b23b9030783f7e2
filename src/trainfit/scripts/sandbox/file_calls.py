"""Python's file calls over a view: ``open`` and those of :mod:`os`."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import glob
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainfit.scripts.sandbox.view import LayeredView

#: Calls that only look, and follow links or not.
_LOOKS = ("stat", "access", "statvfs", "getxattr", "listxattr", "pathconf")
_LOOKS_AT_LINK = ("lstat", "readlink")
#: Calls that change what there is of a file but its content, which is copied then.
_CHANGES = (
    *("chmod", "chown", "lchown", "lchmod", "utime", "truncate"),
    *("setxattr", "removexattr"),
)
_CREATES = ("mkfifo", "mknod")


class FileCalls:
    """Installed for the life of the process."""

    def __init__(self, view: LayeredView) -> None:
        self._view = view
        self._open = io.open
        self._calls = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}

    def uninstall(self) -> None:
        """The calls are again what they were; for a process that runs nothing of the user's."""
        builtins.open = io.open = self._open
        installed = {name: getattr(os, name) for name in self._calls}
        for name, original in self._calls.items():
            setattr(os, name, original)
        _pass_on(installed)

    def install(self) -> None:
        builtins.open = io.open = _standing_for(self._open, io.__name__, self.open)
        looks = {name: self._looking(name, follow=True) for name in _LOOKS}
        looks |= {name: self._looking(name, follow=False) for name in _LOOKS_AT_LINK}
        changes = {name: self._changing(name) for name in (*_CHANGES, *_CREATES)}
        own = {
            name: getattr(self, name)
            for name in (
                *("scandir", "listdir", "chdir", "getcwd", "mkdir", "rmdir", "unlink", "remove"),
                *("rename", "replace", "link", "symlink"),
            )
        }
        own["open"] = self.os_open
        for name, function in {**looks, **changes, **own}.items():
            original = self._calls.get(name)
            if original is not None:
                setattr(os, name, _standing_for(original, os.__name__, function))
        _pass_on(self._calls)
        for kind in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
            names = {each.__name__ for each in getattr(os, kind)}
            setattr(os, kind, {getattr(os, name) for name in names})
        # By folders' descriptors it would remove the original files.
        shutil._use_fd_functions = False  # type: ignore[attr-defined]

    def open(self, file: Any, mode: str = "r", *args: Any, opener: Any = None, **more: Any) -> Any:
        """Open a file as :func:`open` does; it has the name that the script gave."""
        path = self._view.path(file) if opener is None else None
        if path is None:
            if opener is not None:
                more["opener"] = opener
            return self._open(file, mode, *args, **more)
        with _named(file):
            if "x" in mode and self._view.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
            if set(mode) & set("wax+"):
                at = self._to_write(path, copy="w" not in mode, creates="r" not in mode)
                mode = mode.replace("x", "w")
            else:
                at = self._view.place(path)
            opened = self._open(at, mode, *args, **more)
        buffer: Any = getattr(opened, "buffer", opened)
        raw = getattr(buffer, "raw", buffer)
        with contextlib.suppress(AttributeError, TypeError):
            raw.name = file
        return opened

    def os_open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        inner = self._view.path(path, dir_fd)
        if inner is None:
            return int(self._calls["open"](path, flags, mode, dir_fd=dir_fd))
        with _named(path):
            if flags & os.O_CREAT and flags & os.O_EXCL and self._view.exists(inner):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                copy = not flags & os.O_TRUNC
                at = self._to_write(inner, copy=copy, creates=bool(flags & os.O_CREAT))
            else:
                at = self._view.place(inner)
            return int(self._calls["open"](at, flags, mode))

    def _to_write(self, path: str, *, copy: bool, creates: bool) -> str:
        if not creates and not self._view.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._view.to_write(path, copy=copy)

    # -- looking -------------------------------------------------------------------------

    def _looking(self, name: str, *, follow: bool) -> Callable[..., Any]:
        original = self._calls.get(name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
            assert original is not None
            inner = self._view.path(path, dir_fd)
            if inner is None:
                where = {} if dir_fd is None else {"dir_fd": dir_fd}
                return original(path, *args, **where, **more)
            follows = follow and more.get("follow_symlinks", True)
            with _named(path):
                return original(self._view.place(inner, follow=follows), *args, **more)

        return call

    def listdir(self, path: Any = ".") -> list[Any]:
        inner = self._view.path(path)
        if inner is None or self._view.is_plain(inner):
            found: list[Any] = self._calls["listdir"](path)
            return found
        with _named(path):
            if self._view.exists(inner) and not self._view.is_dir(inner):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            names = self._view.names(inner)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else list(names)

    def scandir(self, path: Any = ".") -> Any:
        inner = self._view.path(path)
        if inner is None or self._view.is_plain(inner):
            return self._calls["scandir"](path)
        return _Scan(iter([_Entry(os.fspath(path), name) for name in self.listdir(path)]))

    def getcwd(self) -> str:
        return self._view.getcwd()

    def chdir(self, path: Any) -> None:
        inner = self._view.path(path)
        with _named(path):
            self._calls["chdir"](path if inner is None else self._view.place(inner))

    # -- changing ------------------------------------------------------------------------

    def _changing(self, name: str) -> Callable[..., Any]:
        original = self._calls.get(name)

        def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
            assert original is not None
            inner = self._view.path(path, dir_fd)
            if inner is None:
                where = {} if dir_fd is None else {"dir_fd": dir_fd}
                return original(path, *args, **where, **more)
            with _named(path):
                at = self._to_write(inner, copy=True, creates=name in _CREATES)
                return original(at, *args, **more)

        return call

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        inner = self._view.path(path, dir_fd)
        if inner is None:
            self._calls["mkdir"](path, mode, dir_fd=dir_fd)
            return
        with _named(path):
            if self._view.exists(inner):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._view.make_parents(inner)
            self._calls["mkdir"](self._view.own(inner), mode)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        inner = self._view.path(path, dir_fd)
        if inner is None:
            self._calls["rmdir"](path, dir_fd=dir_fd)
            return
        if not self._view.exists(inner):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not self._view.is_dir(inner):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._view.names(inner):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._view.remove(inner)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        inner = self._view.path(path, dir_fd)
        if inner is None:
            self._calls["unlink"](path, dir_fd=dir_fd)
            return
        if not self._view.exists(inner):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        place = self._view.place(inner, follow=False)
        if stat.S_ISDIR(self._calls["lstat"](place).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._view.remove(inner)

    remove = unlink

    def rename(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        source, target = self._view.path(src, src_dir_fd), self._view.path(dst, dst_dir_fd)
        if source is None and target is None:
            self._calls["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        with _named(src):
            if source is not None and target is not None:
                self._view.move(source, target)
                return
            # From or to a folder of the sandbox's own, such as that for temporary files.
            at = src if source is None else self._view.place(source, follow=False)
            to = dst if target is None else self._view.to_write(target, copy=False)
            self._calls["rename"](at, to)
            if source is not None:
                self._view.remove(source)

    replace = rename

    def link(self, src: Any, dst: Any, **more: Any) -> None:
        """A copy: the original must not change with it."""
        source, target = self._view.path(src), self._view.path(dst)
        if source is None and target is None:
            self._calls["link"](src, dst, **more)
            return
        if target is not None and self._view.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
        shutil.copy2(src, dst)

    def symlink(
        self,
        src: Any,
        dst: Any,
        target_is_directory: bool = False,
        *,
        dir_fd: int | None = None,
    ) -> None:
        inner = self._view.path(dst, dir_fd)
        if inner is None:
            self._calls["symlink"](src, dst, target_is_directory, dir_fd=dir_fd)
            return
        with _named(dst):
            if self._view.exists(inner):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), dst)
            self._view.make_parents(inner)
            self._calls["symlink"](src, self._view.own(inner))


def _pass_on(former: Mapping[str, Callable[..., Any]]) -> None:
    """Classes that keep calls of :mod:`os` as their own get the current ones (Python 3.13:
    ``glob._StringGlobber``, which ``Path.glob`` uses)."""
    for kind in [each for each in vars(glob).values() if isinstance(each, type)]:
        for name, kept in list(vars(kind).items()):
            if isinstance(kept, staticmethod) and kept.__func__ is former.get(name):
                setattr(kind, name, staticmethod(getattr(os, name)))


def _standing_for(
    original: Callable[..., Any], module: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A plain function in the place of ``original`` in ``module``, pickled by its name there."""

    def called(*args: Any, **more: Any) -> Any:
        return function(*args, **more)

    functools.update_wrapper(called, original)
    called.__module__, called.__qualname__ = module, original.__name__
    return called


@contextlib.contextmanager
def _named(path: Any) -> Iterator[None]:
    """An error names the file as the script does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


class _Scan:
    """An iterator like that of ``os.scandir``."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _Entry:
    """An entry like :class:`os.DirEntry`."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_junction(self) -> bool:
        return False
