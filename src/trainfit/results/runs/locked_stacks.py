"""Stacks of a process in which no thread of Python can run, as :mod:`faulthandler` leaves them.

It imports next to nothing: every Python process of a watched command does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

#: Where a thread of the recorder begins.
_OUR_THREAD: Final = re.compile(r"/trainfit/watch/[^\n]*\Z")
_THREAD: Final = re.compile(r"^(?=Thread 0x)", re.MULTILINE)
#: What is written of a thread in which no Python runs (CPython, Python/traceback.c).
_NO_FRAME: Final = "<no Python frame>"


def locked_path(stem: Path, pid: int) -> Path:
    """The path at which they are left; ``stem`` is of the rank's files."""
    return stem.with_name(f"{stem.name}.locked.{pid}")


def stacks_of_locked(text: str) -> str:
    """Stacks of all threads in what was written, the main one first, and without the recorder's;
    empty: nothing was written, or no thread runs Python: the process is at its end."""
    threads = [part.rstrip() for part in _THREAD.split(text)]
    own = [
        thread
        for thread in threads
        if thread.startswith("Thread") and not _OUR_THREAD.search(thread)
    ]
    own = [each for each in own if not each.endswith(_NO_FRAME)]
    own.sort(key=lambda each: each.endswith(" in _bootstrap"))  # as all of threading do
    return "\n\n".join(own)
