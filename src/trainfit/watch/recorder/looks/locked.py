"""The stack of a process in which no other thread of Python can look: code in C that keeps the
interpreter's lock (a regular expression, a library that waits for another process).

Python's :mod:`faulthandler` has a thread of its own in C, which writes the stacks of all threads
when it was not put off for some seconds. Whoever looks puts it off, as long as it can.

Processes that the kernel has stopped: a signal, a debugger or a shell keeps them from running,
and no thread of theirs can say where they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from trainfit.results.runs.locked_stacks import stacks_of_locked
from trainfit.simgpu.patching import PatchSet

#: Seconds until the stacks are written, and until that is put off again: between the two lies how
#: long no thread could look. A collection of 10 million objects or the sorting of as many numbers
#: keeps the lock for some seconds, and the stacks are taken back after it.
_WRITTEN_S: Final = 10.0
_PUT_OFF_S: Final = 3.0

#: As they are before :func:`install`.
_later: Final = faulthandler.dump_traceback_later
_cancel: Final = faulthandler.cancel_dump_traceback_later

_wanted_by_script = True
_forks = 0
_armed: LockedStack | None = None


def install(patches: PatchSet) -> None:
    """See the script's own use of the timer from now on, and let ours give way to it. To be called
    before the script runs: a timer that it has set already cannot be seen."""
    global _wanted_by_script
    _wanted_by_script = False
    _at_forks()
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        patches.hook(faulthandler, name, _giving_way)


def _giving_way(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        global _wanted_by_script
        _wanted_by_script = True
        return original(*args, **kwargs)

    return called


@functools.cache
def _at_forks() -> None:
    """A child has no such thread, and would wait for it at its end: none is there at a fork."""

    def before() -> None:
        global _forks
        _forks += 1
        if _armed is not None:
            _armed.put_away()

    def after() -> None:
        global _forks
        _forks = max(0, _forks - 1)

    def in_child() -> None:
        global _forks, _armed
        _forks, _armed = 0, None

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


class LockedStack:
    """The stacks of a process that is locked, from :meth:`put_off` on, until :meth:`close`;
    ``path`` is there while it may be needed.

    ``tell`` is given the stacks where the process has gone on, or ends, the seconds after which
    they were written, and how many seconds ago that was: next to other programs no thread of ours
    may have come to its turn for so long, and the training went on.
    """

    def __init__(
        self,
        path: Path,
        tell: Callable[[str, float, float], None] = lambda text, seconds, ago: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._tell, self._clock = path, tell, clock
        self._file: Any = None
        self._due = 0.0
        self._pid = os.getpid()

    def put_off(self) -> None:
        """Some thread of Python runs."""
        global _armed
        now = self._clock()
        if now < self._due or _wanted_by_script or _forks or os.getpid() != self._pid:
            return
        self._due = now + _PUT_OFF_S
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if self._file is None:
                self._file = self._path.open("wb", buffering=0)
            # A script that closes descriptors may have another file under this number.
            ours, named = os.fstat(self._file.fileno()), self._path.stat()
            if (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino):
                self._due = float("inf")
                return
            if ours.st_size:  # it went on
                self._tell_of(self._path.read_text(encoding="utf-8", errors="replace"), ours)
                os.ftruncate(self._file.fileno(), 0)
                os.lseek(self._file.fileno(), 0, os.SEEK_SET)
            _armed = self
            _later(_WRITTEN_S, file=self._file)

    def put_away(self) -> None:
        """Nothing is written until it is put off the next time."""
        global _armed
        if _armed is self and not _wanted_by_script:
            _armed, self._due = None, 0.0
            _cancel()

    def close(self) -> None:
        """The process ends as it should, or is recorded no more."""
        if os.getpid() != self._pid:
            return
        self.put_away()
        self._due = float("inf")
        with contextlib.suppress(OSError):
            if self._file is not None:
                text = self._path.read_text(encoding="utf-8", errors="replace")
                self._tell_of(text, self._path.stat())
                self._file.close()
                self._path.unlink(missing_ok=True)

    def _tell_of(self, text: str, file: os.stat_result) -> None:
        if stacks := stacks_of_locked(text):
            self._tell(stacks, _WRITTEN_S, max(0.0, time.time() - file.st_mtime))


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
