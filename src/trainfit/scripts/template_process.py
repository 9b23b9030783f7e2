"""A template process: a simulated run paused where its script first reads its arguments.

What a script does before that, its imports mostly, is the same for every batch size. So one
process does it, the *stem*, and forks a child for each run when the arguments are first looked
at. The child goes on with arguments of its own, as a fresh process would.

A stem is a speculation. Where a fork would not be what a fresh process is (threads, children,
open files, something simulated already), or the script never looks at its arguments, it ends,
and the runs are made without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

import psutil

from trainfit.simgpu.patching import inherited

#: What a stem writes to its server when it is ready to be forked.
READY = b"ready\n"
#: Memory in bytes above which a process is not forked: each child may come to copy it.
_MOST_BYTES = 4 << 30

#: Threads by the name that the kernel has of them, whose library prepares for a fork itself
#: (pthread_atfork): jemalloc's, which comes with Apache Arrow and so with pandas.
_FORKABLE = ("jemalloc_bg_thd",)

#: What of a list tells or changes its content. The script's own name is known before.
_METHODS = (
    *("__iter__", "__len__", "__contains__", "__reversed__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__"),
    *("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "copy", "count"),
    *("extend", "index", "insert", "pop", "remove", "reverse", "sort"),
)


class Arguments(list[str]):
    """``sys.argv`` that calls ``looked`` before anything but the script's name is told."""

    def __init__(self, words: Iterable[str], looked: Callable[[], None]) -> None:
        super().__init__(words)
        self._looked: Callable[[], None] | None = looked

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) or _number(index) != 0:
            self.look()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """A process that is started afresh gets a list."""
        return list, (list(self),)

    def look(self) -> None:
        """The content is needed now."""
        looked, self._looked = self._looked, None
        if looked is not None:
            looked()

    def fill(self, words: Iterable[str]) -> None:
        """Have this content from now on."""
        super().__setitem__(slice(None), words)


def _number(index: SupportsIndex) -> int:
    try:
        return index.__index__()
    except AttributeError:
        return -1


def _watched(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def watched(arguments: Arguments, *args: Any, **kwargs: Any) -> Any:
        arguments.look()
        return method(arguments, *args, **kwargs)

    watched.__name__ = watched.__qualname__ = name
    return watched


for _name in _METHODS:
    setattr(Arguments, _name, _watched(_name))


class ForkableRun(Protocol):
    """The run that a stem is grown from."""

    def hold(self) -> str:
        """Stop its own threads; why it cannot be forked, empty if it can."""

    def become(self, folder: str) -> list[str]:
        """Be the run that ``folder`` asks for, in a child; returns its ``sys.argv``."""


class Stem:
    """A stem: the process that grows, which decides at the arguments whether it can be forked.

    ``serve`` waits for runs; it returns in each child with its folder, and in the stem at the
    end with ``None``. ``status`` is the descriptor that the server of runs listens to.
    """

    def __init__(self, serve: Callable[[], str | None], status: int) -> None:
        self._serve, self._status = serve, status
        self._open: Mapping[int, str] = {}
        self._run: ForkableRun | None = None
        self._arguments = Arguments((), self._looked)
        self.waits = True

    def arguments(self, run: ForkableRun, words: Iterable[str]) -> list[str]:
        """``sys.argv`` for the script of ``run``."""
        self._run, self._open = run, _descriptors()
        self._arguments.fill(words)
        return self._arguments

    def give_up(self, reason: str) -> None:
        """End this process, if it is still a stem: its runs are made in another way."""
        if self.waits:
            os.write(self._status, f"{reason}\n".encode())
            os._exit(0)

    def _looked(self) -> None:
        if not self.waits:
            return
        assert self._run is not None
        if reason := self._run.hold() or unfit(self._open):
            self.give_up(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(self._status, READY)
        with inherited():
            folder = self._serve()
            if folder is None:
                os._exit(0)
            self.waits = False
            os.close(self._status)
            words = self._run.become(folder)
        self._arguments.fill(words)


def unfit(already_open: Mapping[int, str]) -> str:
    """Why this process must not be forked; empty if it may.

    ``already_open`` are descriptors that do not count.
    """
    if threading.current_thread() is not threading.main_thread():
        return "another thread reads the arguments"
    # Libraries of BLAS end their threads before a fork; whatever is left then does not.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if others := _other_threads():
        return f"there are other threads ({', '.join(others)})"
    process = psutil.Process()
    if process.children():
        return "there are child processes"
    if process.memory_info().rss > _MOST_BYTES:
        return "the process is large"
    if any(signal.getitimer(timer)[0] for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)):
        return "a timer is active"
    opened = dict(_descriptors().items() - already_open.items())
    if not all(map(_is_device, opened)):
        return f"{', '.join(opened.values())} is open"
    return ""


def _other_threads() -> list[str]:
    """Names of the process's threads but the main one that would be missed after a fork."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            if thread != str(os.getpid()) and name not in _FORKABLE:
                names.append(name)
    return sorted(names)


def _descriptors() -> dict[int, str]:
    """What is open, by descriptor."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return descriptors


def _is_device(descriptor: int) -> bool:
    """Is it a device (/dev/urandom), which has no position to share? Or closed by now?"""
    try:
        return stat.S_ISCHR(os.fstat(descriptor).st_mode)
    except OSError:
        return True
