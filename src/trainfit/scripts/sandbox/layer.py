"""Temporary folders that receive what a script writes, and the report on them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

from trainfit.results.runs.script import ProtectionKind

_PREFIX = "trainfit-layer-"
#: A process that uses a layer holds a lock on this file in it.
_LOCK = "lock"
#: The most that a script may write: so much, and so much of what is free.
MOST_BYTES = 20_000_000_000
_SHARE_OF_DISK = 0.5
_SHARE_OF_MEMORY = 0.5
#: What no run may leave of a disk, whoever fills it.
_RESERVE = 0.1
#: What was written is measured again after so many times as long as that took.
_REST = 20
#: A redirected script's: what was written, and marks of what was removed with their ending.
FILES, GONE, REMOVED = "files", "removed", "#removed"
#: Folders with what Python and its libraries write by themselves.
_BYTECODE = "__pycache__"


@dataclasses.dataclass
class Layer:
    """Folders on different paths, so that none has to lie in what it covers."""

    folders: tuple[Path, ...]
    limit_bytes: int
    _locks: list[int]
    _free_at_start: dict[Path, int]
    _measure_at: float = 0.0

    @classmethod
    def make(cls, limit_bytes: int | None = None, within: str = "") -> Layer:
        """New folders, in the system's places for temporary files or in another layer."""
        folders, locks = [], []
        for base in [Path(within)] if within else _bases():
            if not within:
                _sweep(base)
            with contextlib.suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                folders.append(folder)
                locks.append(_locked(folder))
        if not folders:
            raise OSError("no writable folder for temporary files; set TMPDIR to one")
        free = {folder: _free_bytes(folder) for folder in folders}
        limit = int(min(MOST_BYTES, _SHARE_OF_DISK * max(free.values())))
        return cls(tuple(folders), min(limit, limit_bytes or limit), locks, free)

    @property
    def widest(self) -> Path:
        """The folder with the most free space."""
        return max(self._free_at_start, key=lambda folder: self._free_at_start[folder])

    def memory_bytes(self) -> int:
        """The size of a file system in RAM, where no disk can hold the layer."""
        return int(min(self.limit_bytes, _SHARE_OF_MEMORY * _memory_bytes()))

    def locks(self) -> set[tuple[int, int]]:
        """Device and number of the files that are open for its locks."""
        return {(status.st_dev, status.st_ino) for status in map(os.fstat, self._locks)}

    def drop(self) -> None:
        for folder in self.folders:
            remove_tree(folder)
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def exceeded(self, uppers: Iterable[str]) -> str:
        """Why the script has to end: it wrote too much, or a disk is about to be full. Empty
        if nothing is wrong. ``uppers`` are the folders with what was written."""
        free = {folder: _free_bytes(folder) for folder in self.folders}
        maximum = max(self._free_at_start[folder] - now for folder, now in free.items())
        began = time.monotonic()
        # It may lie on two disks. What others remove meanwhile hides what was written: at times
        # it is measured in any case.
        if 2 * maximum >= self.limit_bytes or began >= self._measure_at:
            written = sum(allocated_bytes(upper) for upper in uppers)
            ended = time.monotonic()
            self._measure_at = ended + _REST * (ended - began)
            if written >= self.limit_bytes:
                return (
                    f"the script wrote more than {self.limit_bytes / 1e9:.3g} GB, the limit of a "
                    "trainfit run; let it save less often, shorten it with --steps, or give "
                    "--allow-writes"
                )
        for folder, now in free.items():
            if now < _RESERVE * self._free_at_start[folder]:
                return (
                    f"only {now / 1e9:.3g} GB of {str(folder.parent)!r} are free while the "
                    "script runs (a large file opened for writing is copied first); free some, "
                    "set TMPDIR to another disk, or give --allow-writes"
                )
        return ""


def _bases() -> list[Path]:
    named = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp")]
    real = dict.fromkeys(each.resolve() for each in named)
    return [each for each in real if each.is_dir() and os.access(each, os.W_OK)]


def _locked(folder: Path) -> int:
    """The lock of a new layer, which is there for others once it is held."""
    part = folder / f"{_LOCK}.part"
    lock = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    part.rename(folder / _LOCK)
    return lock


def _sweep(base: Path) -> None:
    """Remove layers whose processes were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
            finally:
                os.close(lock)


def is_in_layer(path: str) -> bool:
    """Does a path lie in a layer, of this run or of another one?"""
    return f"/{_PREFIX}" in path


def _memory_bytes() -> int:
    """RAM that is available (proc_meminfo(5)); a little where that is not told."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 1 << 30


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


@dataclasses.dataclass(frozen=True)
class LayerContents:
    """Files in a layer: paths with bytes, and paths of originals that were removed."""

    files: dict[str, int]
    removed: tuple[str, ...]


def written(uppers: Iterable[tuple[str, str]]) -> LayerContents:
    """What is in layers: pairs of the folder that one covers and the one with what was written,
    earlier ones first. Python's bytecode is left out."""
    files: dict[str, int] = {}
    removed: dict[str, None] = {}
    for point, upper in uppers:
        for relative, entry in (*_marked(upper), *_walk(upper)):
            path = os.path.join(point, relative)
            if is_whiteout(entry) or path.endswith(REMOVED):
                path = path.removesuffix(REMOVED)
                files = {each: size for each, size in files.items() if not _in(each, path)}
                removed[path] = None
            elif stat.S_ISREG(entry.st_mode):
                files[path] = entry.st_size
                removed.pop(path, None)
            elif stat.S_ISLNK(entry.st_mode):
                files[path] = 0
                removed.pop(path, None)
    # What was in a folder that was removed went with it.
    whole = (each for each in removed if not _has_parent_in(each, removed))
    return LayerContents(files, tuple(whole))


def _has_parent_in(path: str, folders: Container[str]) -> bool:
    return any(str(parent) in folders for parent in PurePath(path).parents)


def _marked(upper: str) -> Iterator[tuple[str, os.stat_result]]:
    """What a redirected script removed (redirection/view.py); it may have written it again."""
    if upper.endswith(f"/{FILES}"):
        marks = os.path.join(os.path.dirname(upper), GONE)
        yield from (each for each in _walk(marks) if each[0].endswith(REMOVED))


def copy_writes(uppers: Iterable[tuple[str, str]], target: Path) -> None:
    """Copy what is in layers to ``target``, each file under its own absolute path; the names of
    removed files go to ``REMOVED.txt``."""
    uppers = list(uppers)
    for point, upper in uppers:
        for relative, entry in _walk(upper):
            to = target / os.path.join(point, relative).lstrip("/")
            if stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(os.path.join(upper, relative), to, follow_symlinks=False)
            elif stat.S_ISDIR(entry.st_mode) and entry.st_nlink == 2:
                to.mkdir(parents=True, exist_ok=True)
    if gone := written(uppers).removed:
        target.mkdir(parents=True, exist_ok=True)
        (target / "REMOVED.txt").write_text("".join(f"{each}\n" for each in gone))


def is_whiteout(entry: os.stat_result) -> bool:
    """The mark of a removed file (overlayfs.rst): a character device 0/0."""
    return stat.S_ISCHR(entry.st_mode) and entry.st_rdev == 0


def allocated_bytes(folder: str) -> int:
    """Bytes on the disk of all that is in a folder."""
    return sum(entry.st_blocks * 512 for _, entry in _walk(folder, bytecode=True))


def remove_tree(folder: Path) -> None:
    """Remove a folder, also where its subfolders may not be entered (mode 0, as overlayfs makes
    its own)."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _walk(folder: str, *, bytecode: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below ``folder``: its path from there and what it is; folders come first."""
    for parent, names, files in os.walk(folder):
        if not bytecode and _BYTECODE in names:
            names.remove(_BYTECODE)
        for name in (*names, *files):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                yield os.path.relpath(path, folder), os.lstat(path)


def _in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


# ---
# The error for an unavailable protection.


class UnavailableError(Exception):
    """This protection does not work here; the message says why, in a few words."""


# ---
# State of this process's own sandbox; empty in a process without one.


@dataclasses.dataclass
class State:
    """``entered`` is the protection's own (:mod:`overlay`, :mod:`redirection`)."""

    kind: ProtectionKind
    folder: Path
    entered: Any


_state: State | None = None


def current() -> State | None:
    return _state


def become(state: State) -> None:
    global _state
    _state = state


def stopped() -> str:
    """Why the script has to end, if its keeper says so (it wrote too much)."""
    if _state is None:
        return ""
    try:
        return (_state.folder / "stop").read_text()
    except OSError:
        return ""


def note(line: str) -> None:
    """Something that the reader of the result should know; the same line counts once."""
    if _state is None:
        return
    with contextlib.suppress(OSError):
        data = " ".join(line.split()).encode() + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(_state.folder / "notes.txt", flags, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


# ---
# Hints for scripts that fail because of the sandbox.


_QUESTION = (
    "; it reads from standard input, which trainfit does not provide: pass "
    "the answer as an argument or environment variable"
)
_FULL = (
    "; the temporary layer for the script's writes is full: free space on "
    "the disk of TMPDIR, let the script save less, or give --allow-writes"
)
_REFUSED = (
    "; non-Python code wrote to a protected file, and no overlay can be mounted "
    "here: run where user namespaces are allowed, or give --allow-writes"
)


def hint(error: BaseException) -> str:
    """A hint to put behind the error's message; empty where the sandbox has no part in it."""
    state, text = current(), str(error)
    if isinstance(error, EOFError) and "reading a line" in text:
        return _QUESTION
    if state is None or state.kind == "none":
        return ""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC or "No space left on device" in text:
        return _FULL
    refused = number == errno.EACCES or "ermission denied" in text
    return _REFUSED if refused and state.kind == "redirection" else ""
