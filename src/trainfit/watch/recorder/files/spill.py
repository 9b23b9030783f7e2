"""Rows on their way to a file: a ring of fixed size, emptied by a thread of its own.

The training thread only copies a row into the ring. A thread writes them twice a second, so that
a slow disk or a step of minutes holds up neither the training nor the file: what a killed process
leaves behind is at most a second old. A ring that is full (the disk hangs) drops rows and counts
them; so does a disk that is full, whose file keeps whole rows only.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.watch.row_file import RowFile

#: Rows that a ring holds: at 0.5 s between writes, of steps of 0.1 ms.
_ROWS: Final = 4096
#: Seconds between writes.
INTERVAL_S: Final = 0.5
#: ``struct``'s letters of the columns' types.
_LETTERS: Final = {"i8": "q", "i4": "i", "i2": "h", "u2": "H", "f8": "d", "f4": "f"}


def packer(kind: np.dtype[Any]) -> struct.Struct:
    """Packs a tuple as a row of ``kind``, several times faster than an assignment to an array."""
    names = kind.names or ()
    return struct.Struct("=" + "".join(_LETTERS[kind[name].str[1:]] for name in names))


class Ring:
    """The rows of one table that are not written yet. One thread appends, one writes: the counts
    are each changed by one of them only, so there is no lock (a fork could leave it locked).

    ``hurry`` is called when the ring is half full.
    """

    def __init__(
        self,
        path: Path,
        kind: np.dtype[Any],
        rows: int = _ROWS,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self._hurry, self._half = hurry, rows // 2
        self._packer = packer(kind)
        self._size, self._rows = kind.itemsize, rows
        self._data = bytearray(rows * kind.itemsize)
        self._file = RowFile(path, kind.itemsize)
        self._appended = self._written = 0
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
        return self._appended - self._written

    def append(self, row: tuple[float, ...]) -> None:
        """Keep a row, its values in the columns' order. Raises ``struct.error`` for a value that
        its column cannot hold."""
        if self._appended - self._written >= self._rows:
            self._dropped += 1
            if self.first_lost is None:
                self.first_lost = int(row[0])
            return
        self._packer.pack_into(self._data, self._appended % self._rows * self._size, *row)
        self._appended += 1
        if self._appended - self._written == self._half:
            self._hurry()

    def write(self) -> None:
        """Write what waits."""
        last = self._appended
        while self._written < last:
            first = self._written % self._rows
            count = min(last - self._written, self._rows - first)
            part = memoryview(self._data)[first * self._size : (first + count) * self._size]
            lost = self._file.append(part)
            if lost and self.first_lost is None:
                at = (first + count - lost) * self._size
                self.first_lost = int(self._packer.unpack_from(self._data, at)[0])
            self.refused += lost
            self._written += count

    def close(self) -> None:
        self.write()
        self._file.close()


class Writer:
    """Calls ``write`` every :data:`INTERVAL_S` in a thread of its own, until it is stopped."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainfit watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Write now."""
        self._wake.set()

    def stop(self) -> None:
        """Wait for the thread to end; it may be in a write."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._write()
