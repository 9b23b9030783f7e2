"""Files of /proc and cgroups that are kept open, as reading an open one takes half the time.

An open file of /proc/PID belongs to that process for good: after its end it cannot be read, also
where its number is given to another.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Final

_PIECE: Final = 1 << 16
#: A file that the kernel writes line by line comes in pieces of about a page (seq_file.rst); a
#: shorter piece is its last.
_LAST_PIECE: Final = 3072
#: No file of counters is longer.
_MOST: Final = 1 << 22
#: Descriptors to have at most, and those that are left for everything else.
_MOST_OPEN: Final = 4096
_LEFT: Final = 64


class KeptFiles:
    """How many files may be kept open; all others are opened for each reading."""

    def __init__(self, root: Path = Path("/"), most: int | None = None) -> None:
        self._root = str(root).rstrip("/")
        self.left = most if most is not None else _descriptors()

    def file(self, path: str) -> KeptFile:
        """The file at an absolute path below the root; it need not be there."""
        return KeptFile(self, self._root + path)

    def content(self, path: str) -> bytes | None:
        """The content of a file that is read once; ``None``: it cannot be."""
        kept = KeptFile(self, self._root + path)
        content = kept.read()
        kept.close()
        return content

    def names(self, path: str) -> list[str]:
        """The names in a folder; none where it cannot be read."""
        try:
            return os.listdir(self._root + path)
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(self._root + path)


class KeptFile:
    """A file that is read again and again, from its beginning."""

    __slots__ = ("_descriptor", "_files", "_path")

    def __init__(self, files: KeptFiles, path: str) -> None:
        self._files, self._path = files, path
        self._descriptor = -1

    def read(self) -> bytes | None:
        """The whole content; ``None`` where it cannot be read (any more)."""
        try:
            if self._descriptor >= 0:
                return _content(self._descriptor)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            return None
        try:
            content = _content(descriptor)
        except OSError:
            os.close(descriptor)
            return None
        if self._files.left > 0:
            self._files.left -= 1
            self._descriptor = descriptor
        else:
            os.close(descriptor)
        return content

    def close(self) -> None:
        """Let it go; a later reading opens it again."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
            self._files.left += 1


def _content(descriptor: int) -> bytes:
    content = piece = os.pread(descriptor, _PIECE, 0)
    while len(piece) >= _LAST_PIECE and len(content) < _MOST:
        piece = os.pread(descriptor, _PIECE, len(content))
        content += piece
    return content


def _descriptors() -> int:
    """How many this process may have open; its limit is raised where that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MOST_OPEN + _LEFT
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            raised = wanted if hard == unlimited else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return _MOST_OPEN if soft == unlimited else max(0, min(_MOST_OPEN, soft - _LEFT))
