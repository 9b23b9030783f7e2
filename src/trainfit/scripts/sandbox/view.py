"""A script's view of the file system: the files of its layers over the original ones.

A layer has two folders. ``files`` holds what was written, each file under its own absolute
path; ``removed`` holds an empty file "PATH#removed" for each original that was removed, which
hides all below it too. Both are on the disk, so that forked DataLoader workers see the same.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import stat
from collections.abc import Iterator
from typing import Any

from trainfit.scripts.sandbox.layer import FILES, GONE, REMOVED

_MOST_LINKS = 40


@dataclasses.dataclass(frozen=True)
class Calls:
    """The file calls as Python has them: what redirects must not redirect itself."""

    lstat: Any = os.lstat
    stat: Any = os.stat
    listdir: Any = os.listdir
    mkdir: Any = os.mkdir
    open: Any = os.open
    close: Any = os.close
    readlink: Any = os.readlink
    symlink: Any = os.symlink
    unlink: Any = os.unlink
    rmdir: Any = os.rmdir
    rename: Any = os.rename
    chmod: Any = os.chmod
    utime: Any = os.utime
    read: Any = os.read
    write: Any = os.write
    access: Any = os.access
    getcwd: Any = os.getcwd


class LayeredView:
    """``layers`` are folders, the one that is written to first; ``untouched`` are folders whose
    files are the real ones. Paths are absolute, without links in their folders (:meth:`path`).
    """

    def __init__(self, layers: tuple[str, ...], untouched: tuple[str, ...]) -> None:
        self.calls = Calls()
        self._folder = functools.lru_cache(4096)(self._real_folder)
        self.become(layers, untouched)

    def become(self, layers: tuple[str, ...], untouched: tuple[str, ...]) -> None:
        """Write to another layer from now on."""
        self.layers = layers
        self._files = tuple(f"{layer}/{FILES}" for layer in layers)
        self._removed = tuple(f"{layer}/{GONE}" for layer in layers)
        self._untouched = (*layers, *untouched)
        for folder in (*self._files[:1], *self._removed[:1]):
            self._make(folder)

    def leave(self, folder: str) -> None:
        """The files of this folder too are the real ones."""
        self._untouched = (*self._untouched, folder)

    # -- paths ---------------------------------------------------------------------------

    def path(self, given: Any, dir_fd: int | None = None) -> str | None:
        """The path that a call is about; ``None`` where it is the real one's business."""
        if isinstance(given, int):
            return None
        text = os.fsdecode(given)
        if dir_fd is not None and not text.startswith("/"):
            text = f"{self.calls.readlink(f'/proc/self/fd/{dir_fd}')}/{text}"
        elif not text.startswith("/"):
            text = f"{self.getcwd()}/{text}"
        text = self.shown(os.path.normpath(text))
        if self._is_untouched(text):
            return None
        folder, name = os.path.split(text)
        text = os.path.join(self._folder(folder), name)
        return None if self._is_untouched(text) else text

    def shown(self, path: str) -> str:
        """A path in a layer as the script knows it."""
        for files in self._files:
            if path == files or path.startswith(files + "/"):
                return path[len(files) :] or "/"
        return path

    def getcwd(self) -> str:
        return self.shown(self.calls.getcwd())

    def _is_untouched(self, path: str) -> bool:
        return any(path == each or path.startswith(each + "/") for each in self._untouched)

    def _real_folder(self, folder: str) -> str:
        """A folder without symbolic links, as far as there are real ones."""
        parts, done, links = folder.split("/")[1:], "", 0
        while parts:
            name = parts.pop(0)
            try:
                target = self.calls.readlink(f"{done}/{name}")
            except (OSError, ValueError):
                done = f"{done}/{name}"
                continue
            links += 1
            if links > _MOST_LINKS:
                return folder
            joined = os.path.normpath(target if target.startswith("/") else f"{done}/{target}")
            parts, done = [*joined.split("/")[1:], *parts], ""
        return done or "/"

    # -- looking -------------------------------------------------------------------------

    def place(self, path: str, *, follow: bool = True) -> str:
        """The place of a file: in a layer, or the original. Of one that is not there: where it
        would be in the layer."""
        if follow:
            path = self._followed(path)
            if self._is_untouched(path):
                return path
        for files, removed in zip(self._files, self._removed, strict=True):
            at = files + path
            if self._lstat(at) is not None:
                return at
            if self._hides(removed, path):
                return self._files[0] + path
        return path

    def _followed(self, path: str) -> str:
        """The path that a link leads to, and so on; links in its folders are followed before."""
        for _ in range(_MOST_LINKS):
            at = self.place(path, follow=False)
            found = self._lstat(at)
            if found is None or not stat.S_ISLNK(found.st_mode):
                return path
            target = os.path.join(os.path.dirname(path), self.calls.readlink(at))
            inner = self.path(target)
            if inner is None:
                return os.path.normpath(target)
            path = inner
        return path

    def exists(self, path: str) -> bool:
        return self._lstat(self.place(path, follow=False)) is not None

    def is_dir(self, path: str) -> bool:
        found = self._lstat(self.place(path))
        return found is not None and stat.S_ISDIR(found.st_mode)

    def names(self, path: str) -> list[str]:
        """The names in a folder; raises as ``os.listdir`` does."""
        found: dict[str, None] = {}
        hidden: set[str] = set()
        any_folder = False
        for files, removed in zip(self._files, self._removed, strict=True):
            if self._lstat(files + path) is not None:
                any_folder = True
                found.update(dict.fromkeys(set(self.calls.listdir(files + path)) - hidden))
            hidden |= self._hidden_names(removed, path)
            if self._hides(removed, path):
                break
        else:
            try:
                found.update(dict.fromkeys(n for n in self.calls.listdir(path) if n not in hidden))
            except (FileNotFoundError, NotADirectoryError):
                if not any_folder:
                    raise
            return sorted(found)
        if not any_folder:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return sorted(found)

    def is_plain(self, path: str) -> bool:
        """Is a folder as it is in reality: nothing was written into it, nothing removed?"""
        return all(
            self._lstat(files + path) is None and self._lstat(removed + path) is None
            for files, removed in zip(self._files, self._removed, strict=True)
        ) and not any(self._hides(removed, path) for removed in self._removed)

    def _lstat(self, at: str) -> os.stat_result | None:
        try:
            found: os.stat_result = self.calls.lstat(at)
        except (OSError, ValueError):
            return None
        return found

    def _hides(self, removed: str, path: str) -> bool:
        """Was the original, or a folder that it is in, removed in this layer?"""
        return any(self._lstat(removed + upward + REMOVED) is not None for upward in _upwards(path))

    def _hidden_names(self, removed: str, path: str) -> set[str]:
        try:
            names = self.calls.listdir(removed + path)
        except OSError:
            return set()
        return {name.removesuffix(REMOVED) for name in names if name.endswith(REMOVED)}

    # -- changing ------------------------------------------------------------------------

    def to_write(self, path: str, *, copy: bool) -> str:
        """The path to write a file at: in the layer, with what it holds now if ``copy``."""
        path = self._followed(path)
        at = self._files[0] + path
        if self._is_untouched(path):
            return path
        if self._lstat(at) is not None:
            return at
        now = self.place(path)
        found = self._lstat(now)
        if now == path and found is not None:
            self._allowed(path)
        self.make_parents(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            self._make(at)
            self._like(now, at)
        elif found is not None and copy:
            self._copy(now, at)
        return at

    def own(self, path: str) -> str:
        """The path at which a new folder or link is made."""
        return self._files[0] + path

    def make_parents(self, path: str) -> None:
        """The folders that a file is in, in the layer; raises where the script sees none."""
        parent = os.path.dirname(path)
        at = self._files[0] + parent
        if self._lstat(at) is None:
            if not self.is_dir(parent):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            now = self.place(parent)
            if now == parent:
                self._allowed(parent)
            self._make(at)
            self._like(now, at)

    def remove(self, path: str) -> None:
        """A file, or a folder that the script sees empty."""
        at = self._files[0] + path
        below = any(self._lstat(place + path) is not None for place in ("", *self._files[1:]))
        if below and self._lstat(path) is not None:
            self._allowed(os.path.dirname(path))
        found = self._lstat(at)
        if found is not None:
            (self.calls.rmdir if stat.S_ISDIR(found.st_mode) else self.calls.unlink)(at)
        if below:
            self.hide(path)

    def hide(self, path: str) -> None:
        """The original is not seen any more."""
        marker = self._removed[0] + path + REMOVED
        self._make(os.path.dirname(marker))
        self.calls.close(self.calls.open(marker, os.O_CREAT | os.O_WRONLY, 0o600))

    def move(self, source: str, target: str) -> None:
        """Rename within the view; what is not in the layer yet is copied there."""
        self._bring(source)
        if self.is_dir(target) and not self.is_dir(source):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if self.is_dir(target) and self.names(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        self.make_parents(target)
        self.calls.rename(self._files[0] + source, self._files[0] + target)
        if any(self._lstat(place + target) is not None for place in ("", *self._files[1:])):
            self.hide(target)
        if any(self._lstat(place + source) is not None for place in ("", *self._files[1:])):
            self.hide(source)

    def _bring(self, path: str) -> None:
        """All of a file or folder, into the layer."""
        at = self._files[0] + path
        now = self.place(path, follow=False)
        found = self._lstat(now)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if now == path:
            self._allowed(os.path.dirname(path))
        self.make_parents(path)
        if stat.S_ISDIR(found.st_mode):
            names = self.names(path)
            self._make(at)
            for name in names:
                self._bring(f"{path}/{name}")
            self._like(now, at)
        elif now != at and stat.S_ISLNK(found.st_mode):
            self.calls.symlink(self.calls.readlink(now), at)
        elif now != at:
            self._copy(now, at)

    def _make(self, at: str) -> None:
        """A folder of a layer and those that it is in; ``os.makedirs`` would be redirected."""
        if self._lstat(at) is not None:
            return
        self._make(os.path.dirname(at))
        try:
            self.calls.mkdir(at)
        except FileExistsError:  # another process was faster
            return

    def _allowed(self, path: str) -> None:
        """Raise where the user may not write either."""
        if not self.calls.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _copy(self, source: str, target: str) -> None:
        reading = self.calls.open(source, os.O_RDONLY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            writing = self.calls.open(target, flags, 0o600)
            try:
                while data := self.calls.read(reading, 1 << 20):
                    while data:
                        data = data[self.calls.write(writing, data) :]
            finally:
                self.calls.close(writing)
        finally:
            self.calls.close(reading)
        self._like(source, target)

    def _like(self, source: str, target: str) -> None:
        """Mode and times; the user may always write to the layer's own folders."""
        found = self.calls.stat(source)
        more = 0o700 if stat.S_ISDIR(found.st_mode) else 0o200
        self.calls.chmod(target, stat.S_IMODE(found.st_mode) | more)
        self.calls.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _upwards(path: str) -> Iterator[str]:
    while path not in ("", "/"):
        yield path
        path = os.path.dirname(path)
