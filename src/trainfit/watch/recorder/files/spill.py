"""Rows on their way to a file: a ring of fixed size, emptied by a thread of its own.

The training thread only hands over a row. A thread packs and writes them twice a second, so that
a slow disk or a step of minutes holds up neither the training nor the file: what a killed process
leaves behind is at most a second old. A ring that is full (the disk hangs) drops rows and counts
them; so does a disk that is full, whose file keeps whole rows only.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.watch.row_file import RowFile

#: Rows that a ring holds: at 0.5 s between writes, of steps of 0.1 ms.
_ROWS: Final = 4096
#: Rows that are packed and written at once.
_AT_ONCE: Final = 256

Row = tuple[Any, ...]
#: Seconds between writes.
INTERVAL_S: Final = 0.5
#: ``struct``'s letters of the columns' types.
_LETTERS: Final = {"i8": "q", "i4": "i", "i2": "h", "u2": "H", "f8": "d", "f4": "f"}


def packer(kind: np.dtype[Any]) -> struct.Struct:
    """Packs a tuple as a row of ``kind``, several times faster than an assignment to an array."""
    names = kind.names or ()
    return struct.Struct("=" + "".join(_LETTERS[kind[name].str[1:]] for name in names))


class Ring:
    """The rows of one table that are not written yet, at most ``rows``. One thread appends, one
    writes; a deque needs no lock of ours (a fork could leave it locked). Rows are packed by the
    thread that writes, many at once: in the training, between two steps, each would find its code
    and data out of the caches.

    ``hurry`` is called when the ring is half full; ``whole`` completes a row before it is packed.
    """

    def __init__(
        self,
        path: Path,
        kind: np.dtype[Any],
        rows: int = _ROWS,
        hurry: Callable[[], None] = lambda: None,
        whole: Callable[[Row], Row] | None = None,
    ) -> None:
        self._hurry, self._half, self._whole = hurry, rows // 2, whole
        self._packer = packer(kind)
        self._rows: Final = rows
        self._waiting: collections.deque[Row] = collections.deque()
        self._file = RowFile(path, kind.itemsize)
        self._dropped = 0
        self.refused = 0
        """Rows for which the disk had no room."""
        self.first_lost: int | None = None
        """The number in the first column of the first lost row."""

    @property
    def lost(self) -> int:
        """Rows that found no room, or no disk."""
        return self._dropped + self.refused

    @property
    def waiting(self) -> int:
        """Rows that are not written yet."""
        return len(self._waiting)

    def append(self, row: Row) -> None:
        """Keep a row, its values in the columns' order."""
        waiting = len(self._waiting)
        if waiting >= self._rows:
            self._drop(row)
            return
        self._waiting.append(row)
        if waiting + 1 == self._half:
            self._hurry()

    def write(self) -> None:
        """Write what waits. Raises ``struct.error`` after it, where a row had a value that its
        column cannot hold."""
        error = None
        for _ in range(0, len(self._waiting), _AT_ONCE):
            rows: list[Row] = []
            packed = bytearray()
            for _ in range(min(_AT_ONCE, len(self._waiting))):
                row = self._waiting.popleft()
                try:
                    packed += self._packer.pack(*(self._whole(row) if self._whole else row))
                    rows.append(row)
                except struct.error as mine:
                    error = mine
                    self._drop(row)
            lost = self._file.append(memoryview(packed))
            if lost and self.first_lost is None:
                self.first_lost = int(rows[-lost][0])
            self.refused += lost
        if error is not None:
            raise error

    def close(self) -> None:
        with contextlib.suppress(struct.error):  # was told by ``write``
            self.write()
        self._file.close()

    def _drop(self, row: Row) -> None:
        self._dropped += 1
        if self.first_lost is None:
            self.first_lost = int(row[0])


class UnlistedThread:
    """A daemon thread that :mod:`threading` does not list: scripts count threads, and wait until
    none but their own are left."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._over = threading.Event()
        self._process = self._ident = -1

    def start(self) -> None:
        self._process = os.getpid()
        self._ident = _thread.start_new_thread(self._run, ())

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so many seconds; not from within, nor in a forked child, which
        does not have it."""
        if self._process == os.getpid() and self._ident != threading.get_ident():
            self._over.wait(timeout)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._over.set()


class Writer:
    """Calls ``write`` every :data:`INTERVAL_S` in a thread of its own, until it is stopped."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._stopped = False
        self._wake = threading.Event()
        self._thread = UnlistedThread(self._run)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Write now."""
        self._wake.set()

    def stop(self) -> None:
        """Wait for the thread to end; it may be in a write."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._write()
