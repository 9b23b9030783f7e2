"""The stacks of a run that hangs: of its own threads, and of the workers that it forked.

Workers inherit the handler and the file. A script that has a handler of its own for the signal
keeps it: its processes tell nothing then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Final, TextIO

#: Of the user's, the least likely to be in use where one can be waited for.
_SIGNAL: Final = signal.SIGUSR2
#: Seconds that workers get to write, and characters that are kept.
_WRITE_S: Final = 0.3
_MOST: Final = 200_000


class HangStacks:
    """``path`` is the file that they are written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        with contextlib.suppress(OSError, ValueError):  # no file: no stacks
            self._file = path.open("w", encoding="utf-8")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)

    def text(self) -> str:
        """The stacks now; empty where there are none to be had."""
        if self._file is None:
            return ""
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                if child.pid is not None and child.is_alive() and _takes(child.pid):
                    os.kill(child.pid, _SIGNAL)
        time.sleep(_WRITE_S)
        try:
            return self._path.read_text(encoding="utf-8", errors="replace")[:_MOST]
        except OSError:
            return ""


def _takes(process: int) -> bool:
    """Has the process a handler for the signal, which would end it otherwise?"""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (_SIGNAL - 1) & 1)
