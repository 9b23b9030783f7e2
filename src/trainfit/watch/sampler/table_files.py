"""Tables that are appended to while they are sampled; a full disk costs rows, nothing else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.watch.tables import Table

#: Bytes of rows that wait for a table at most, until the run's beginning is known: an hour of
#: hundreds of processes would otherwise fill the memory.
_MOST_WAITING: Final = 16 << 20


class TableFile:
    """A table of the run's folder. Its rows have seconds of ``time.monotonic()`` in ``time_s``
    until they are written.

    Threads may add rows while another writes. Nothing raises but the constructor (``OSError``).
    """

    def __init__(
        self,
        path: Path,
        kind: np.dtype[Any],
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._kind, self._write = kind, write
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._waiting: list[Table] = []
        self._bytes = 0
        self.lost = 0
        """Rows that could not be written, or that waited for too long."""
        self._cut()

    def lock(self) -> bool:
        """Keep other samplers of this run from it; ``False``: there is one already."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems know no locks.
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        return True

    def add(self, rows: Table) -> None:
        """Have them written by the next :meth:`flush`."""
        if not len(rows):
            return
        with self._lock:
            self._waiting.append(rows)
            self._bytes += rows.nbytes
            while self._bytes > _MOST_WAITING:
                oldest = self._waiting.pop(0)
                self._bytes -= oldest.nbytes
                self.lost += len(oldest)

    def flush(self, began: float, change: Callable[[Table], None] | None = None) -> None:
        """Write what waits, with times since ``began``; ``change`` may correct the rows first."""
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        rows = np.concatenate(waiting)
        rows["time_s"] -= began
        if change is not None:
            change(rows)
        self._append(rows)

    def _append(self, rows: Table) -> None:
        content, done = rows.tobytes(), 0
        try:
            while done < len(content):
                done += self._write(self._descriptor, content[done:])
        except OSError:
            self.lost += len(rows) - done // self._kind.itemsize
            self._cut()

    def _cut(self) -> None:
        """Take half a row at the file's end away: the next one must begin where a row does."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            if size % self._kind.itemsize:
                os.ftruncate(self._descriptor, size - size % self._kind.itemsize)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
