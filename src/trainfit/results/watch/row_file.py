"""Appends whole rows to a table's file; a disk that is full costs rows, nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Bytes of one write at most.
_MOST_BYTES: Final = 1 << 16
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

Write = Callable[[int, "memoryview | bytes"], int]


class RowFile:
    """A file of rows of ``size`` bytes that one process appends to. It is opened by :meth:`open`,
    or by the first rows; nothing else raises."""

    def __init__(self, path: Path, size: int, write: Write | None = None) -> None:
        self._path, self._size, self._write = path, size, write
        self._descriptor = -1

    def open(self) -> None:
        """Raises ``OSError`` where it cannot be written to."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, _FLAGS, 0o644)
            self._cut()

    def lock(self) -> bool:
        """Keep other processes that ask from it; ``False``: one has it already. It must be open."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems know no locks.
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        return True

    def append(self, rows: memoryview | bytes) -> int:
        """Write whole rows; returns how many could not be."""
        data, done, write = memoryview(rows), 0, self._write or os.write
        try:
            self.open()
            while done < len(data):
                done += write(self._descriptor, data[done : done + _MOST_BYTES])
        except OSError:
            self._cut()
        return (len(data) - done + self._size - 1) // self._size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _cut(self) -> None:
        """Take half a row at the file's end away: the next one must begin where a row does."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            if size % self._size:
                os.ftruncate(self._descriptor, size - size % self._size)
