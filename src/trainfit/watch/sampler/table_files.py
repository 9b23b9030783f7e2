"""Tables that are appended to while they are sampled; a full disk costs rows, nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.watch.row_file import RowFile, Write
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
        write: Write | None = None,
    ) -> None:
        self._file = RowFile(path, kind.itemsize, write)
        self._file.open()
        self._lock = threading.Lock()
        self._waiting: list[Table] = []
        self._bytes = 0
        self.lost = 0
        """Rows that could not be written, or that waited for too long."""

    def lock(self) -> bool:
        """Keep other samplers of this run from it; ``False``: there is one already."""
        return self._file.lock()

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
        self.lost += self._file.append(rows.tobytes())

    def close(self) -> None:
        self._file.close()
