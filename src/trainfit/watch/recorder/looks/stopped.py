"""Processes that the kernel has stopped: a signal, a debugger or a shell keeps them from running,
and no thread of theirs can say where they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: States of /proc/PID/stat (proc(5)): stopped by a signal, or by who traces it.
_STOPPED: Final = (b"T", b"t")
#: Threads of a parent whose children are asked for, and processes that are looked at.
_MOST: Final = 256


def stopped_process(root: Path = Path("/proc")) -> int | None:
    """The PID of a process that is stopped, of those that this one has started, and of those that
    its parent has (the other ranks of a job); ``None``: none is, or the kernel does not tell."""
    for parent in (os.getpid(), os.getppid()):
        for pid in _children(root / str(parent)):
            with contextlib.suppress(OSError):
                content = (root / str(pid) / "stat").read_bytes()
                if content[content.rfind(b")") + 1 :].split(None, 1)[0] in _STOPPED:
                    return pid
    return None


def _children(process: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for thread in sorted((process / "task").iterdir())[:_MOST]:
            with contextlib.suppress(OSError, ValueError):
                yield from map(int, (thread / "children").read_bytes().split()[:_MOST])
