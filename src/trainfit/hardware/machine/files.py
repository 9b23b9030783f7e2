"""Sources of files: the disk below a root, or a recorded machine's document.

Both raise ``OSError`` as the system does; :class:`trainfit.hardware.machine.system.System` turns
that into facts.
"""

from __future__ import annotations

import base64
import errno
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainfit.results.machine import Fact, cannot_tell, known

_RANGE = re.compile(r"\{(\d+)-(\d+)\}")
_MOST_IN_RANGE = 4096
_PIECE = 1 << 16
_MOST_LINKS = 40  # as Linux has it


class Files(Protocol):
    """Files by absolute path."""

    def read(self, path: str, most: int) -> bytes:
        """Up to ``most`` bytes of a file."""

    def names(self, path: str) -> list[str]:
        """The names in a folder."""

    def link(self, path: str) -> str:
        """The target of a symbolic link, as it is written."""

    def exists(self, path: str) -> bool:
        """Is there such a file, folder, link or device?"""


class DiskFiles:
    """Files on the disk, absolute paths below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str, most: int) -> bytes:
        # In pieces: files below /proc/sys refuse a request of megabytes (ENOMEM).
        pieces, left = [], most
        with self.place(path).open("rb", buffering=0) as file:
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                pieces.append(piece)
                left -= len(piece)
        return b"".join(pieces)

    def names(self, path: str) -> list[str]:
        return os.listdir(self.place(path))

    def link(self, path: str) -> str:
        return os.readlink(self.place(path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.place(path))

    def place(self, path: str) -> Path:
        """The path on the disk at which a path of this tree really lies."""
        return self.root / path.lstrip("/")


class RecordedFiles:
    """The files of a recorded machine, as :mod:`trainfit.hardware.machine.recorded` describes them.

    They are kept in memory: a server has some 7,000 files below /sys, which take longer to
    write to a disk than to diagnose.

    Raises ``ValueError`` for what is no path or no content.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._contents: dict[str, bytes | int] = {}  # an int is an errno
        self._links: dict[str, str] = {}
        self._folders: dict[str, set[str]] = {"": set()}
        for path, content in expanded(files):
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not an absolute path")
            self._add("/" + path.strip("/"), content)

    def read(self, path: str, most: int) -> bytes:
        found = self._resolve(path)
        if found not in self._contents:
            raise _error(errno.EISDIR, path)
        return self._content(found, path)[:most]

    def names(self, path: str) -> list[str]:
        found = self._resolve(path)
        if found in self._folders:
            return list(self._folders[found])
        self._content(found, path)
        raise _error(errno.ENOTDIR, path)

    def link(self, path: str) -> str:
        # As it was written, even where what lies behind was recorded by the link's name.
        name = "/" + path.strip("/")
        if name in self._links:
            return self._links[name]
        above, _, last = name.rpartition("/")
        text = f"{self._resolve(above)}/{last}"
        if text in self._links:
            return self._links[text]
        raise _error(errno.EINVAL if self.exists(path) else errno.ENOENT, path)

    def exists(self, path: str) -> bool:
        if "/" + path.strip("/") in self._links:
            return True
        try:
            self._resolve(path)
        except OSError:
            return False
        return True

    def _content(self, text: str, path: str) -> bytes:
        content = self._contents[text]
        if isinstance(content, int):
            raise _error(content, path)
        return content

    def _add(self, path: str, content: Any) -> None:
        above = path
        while above:
            above, _, name = above.rpartition("/")
            names = self._folders.setdefault(above, set())
            if name in names:
                break
            names.add(name)
        if isinstance(content, str):
            self._contents[path] = content.encode()
        elif not isinstance(content, Mapping):
            raise ValueError(f"{path}: {content!r} is not valid content")
        elif "link" in content:
            self._links[path] = str(content["link"])
        elif "base64" in content:
            self._contents[path] = base64.b64decode(content["base64"], validate=True)
        elif "error" in content:
            self._contents[path] = getattr(errno, str(content["error"]), errno.EIO)
        elif "folder" in content:
            self._folders.setdefault(path, set())
        else:
            raise ValueError(f"{path}: no content")

    def _resolve(self, path: str) -> str:
        """The path without links; raises ``OSError`` if there is no such file."""
        todo, done, links = [part for part in reversed(path.split("/")) if part], "", 0
        while todo:
            part = todo.pop()
            if part == ".":
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            step = f"{done}/{part}"
            if step in self._folders:
                done = step
            elif step in self._links:
                links += 1
                if links > _MOST_LINKS:
                    raise _error(errno.ELOOP, path)
                target = self._links[step]
                done = "" if target.startswith("/") else done
                todo.extend(piece for piece in reversed(target.split("/")) if piece)
            elif step not in self._contents:
                raise _error(errno.ENOENT, path)
            elif todo:
                raise _error(errno.ENOTDIR, path)
            else:
                done = step
        return done


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def expanded(files: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every path with its content, ranges written out."""
    for path, content in files.items():
        match = _RANGE.search(path)
        if match is None:
            yield path, content
            continue
        first, last = int(match[1]), int(match[2])
        if last - first >= _MOST_IN_RANGE:
            raise ValueError(f"{path!r} expands to too many paths")
        each = content if isinstance(content, list) else [content] * (last - first + 1)
        if len(each) != last - first + 1:
            raise ValueError(f"{path!r} expands to {last - first + 1} paths, not {len(each)}")
        for number, one in zip(range(first, last + 1), each, strict=True):
            yield path[: match.start()] + str(number) + path[match.end() :], one


# ---
# Read rate of a file, bypassing the page cache and from it.


#: One read; a multiple of every device's block, as O_DIRECT demands, and of a RAID's stripe.
_BLOCK = 4 << 20
#: Less than this says more about the first seek than about the rate.
_LEAST_BYTES = 8 << 20


def read_rate(
    path: str, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Fact[tuple[float, float]]:
    """Bytes/s of reading ``path`` in sequence from the storage, then again from the cache.

    The first reading asks the kernel for no caching (O_DIRECT), so that it neither profits
    from the page cache nor empties it. Each reading ends with the file or after half of
    ``seconds``.
    """
    if not hasattr(os, "O_DIRECT"):
        return cannot_tell(path, "this system cannot bypass the page cache (no O_DIRECT)")
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror or str(error)
        return cannot_tell(path, f"reading cannot bypass the page cache ({why})")
    try:
        nbytes, took = _read(direct, seconds / 2, clock)
    except OSError as error:
        return cannot_tell(path, error.strerror or str(error))
    finally:
        os.close(direct)
    if nbytes < _LEAST_BYTES:
        return cannot_tell(path, f"only {nbytes} bytes could be read, too few for a rate")
    try:
        with open(path, "rb", buffering=0) as file:
            _read(file.fileno(), seconds / 4, clock, nbytes)
            file.seek(0)
            again, cached = _read(file.fileno(), seconds / 4, clock, nbytes)
    except OSError as error:
        return cannot_tell(path, error.strerror or str(error))
    return known((nbytes / max(took, 1e-9), again / max(cached, 1e-9)), path)


def _read(
    file: int, seconds: float, clock: Callable[[], float], limit: int | None = None
) -> tuple[int, float]:
    """Bytes read from the beginning, and the time that it took."""
    nbytes, start = 0, clock()
    # O_DIRECT wants memory that is aligned to pages.
    with mmap.mmap(-1, _BLOCK) as buffer:
        while clock() - start < seconds and (limit is None or nbytes < limit):
            count = os.readv(file, [buffer])
            nbytes += count
            if count < _BLOCK:  # the end; past it O_DIRECT may refuse the unaligned place
                break
    return nbytes, clock() - start
