"""Stacks of threads that hang, as ``faulthandler`` writes them, and what the threads wait in."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trainfit.loader.inspection.tracebacks import Frame
from trainfit.torch_private.frames import PIN_MEMORY_FILE, PIN_MEMORY_LOOP, WORKER_FILE, WORKER_LOOP

_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME: Final = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Waiting for a lock, in a line of Python.
_LOCK_CALL: Final = re.compile(r"\.(?:acquire|wait|wait_for|join|result|get|recv|put)\s*\(")
_LOCK_NAME: Final = re.compile(r"^(?:async\s+)?with\b.*(?:lock|mutex|cond|sem)", re.IGNORECASE)
_LOCK_MODULES: Final = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/")
Role = Literal["worker", "iterating", "pinning", "other"]


@dataclass(frozen=True)
class ThreadStack:
    """A thread's frames, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def role(self) -> Role:
        """The thread of a worker that makes batches, the one that iterates, or another.

        A forked worker's stack goes on, below ``_worker_loop``, with the fork's.
        """
        for frame in self.frames:
            if _is(frame, WORKER_FILE, WORKER_LOOP):
                return "worker"
            if _is(frame, PIN_MEMORY_FILE, PIN_MEMORY_LOOP):
                return "pinning"
            if _is(frame, "utils/data/dataloader.py"):
                return "iterating"
        return "other"

    @property
    def own(self) -> tuple[Frame, ...]:
        """The frames above the loop that its role has."""
        kept: list[Frame] = []
        for frame in self.frames:
            if self.role == "worker" and frame.function == WORKER_LOOP:
                break
            if self.role == "iterating" and frame.function == "__next__":
                break
            kept.append(frame)
        return tuple(kept)

    def within(self, file: str, function: str = "") -> bool:
        """Does it pass through this function of PyTorch or Python?"""
        return any(_is(frame, file, function) for frame in self.own)

    @property
    def is_idle(self) -> bool:
        """A worker that waits to be asked for a batch."""
        return self.role == "worker" and not self.within("_utils/fetch.py") and self._waits_queue

    @property
    def _waits_queue(self) -> bool:
        return self.within("multiprocessing/queues.py", "get")

    @property
    def user(self) -> Frame | None:
        """The innermost line of the user's code."""
        return next((frame for frame in self.own if frame.is_user), None)

    @property
    def where(self) -> Frame | None:
        """The user's line, or else the innermost of all."""
        return self.user or next(iter(self.own), None)


def parse(text: str) -> tuple[ThreadStack, ...]:
    """The stacks in what processes wrote, in their order."""
    stacks: list[list[Frame]] = []
    for line in text.split("\n"):
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (found := _FRAME.match(line)):
            number = int(found["line"])
            code = linecache.getline(found["path"], number).strip()
            stacks[-1].append(Frame(found["path"], number, found["function"], code))
    return tuple(ThreadStack(tuple(frames)) for frames in stacks if frames)


def library(stack: ThreadStack, known: Mapping[str, object]) -> str:
    """The library of ``known`` that a thread is in, or empty.

    Native code has no frames of its own: where the innermost line is the user's, the names in
    that line tell, by what its file imports them as.
    """
    for frame in stack.own:
        module = _module(frame)
        if module in known:
            return module
        if frame.is_user:
            named = _named(frame)
            return next((name for name in named if name in known), "")
    return ""


def waits_for_lock(stack: ThreadStack) -> bool:
    """Is the innermost line one that waits for a lock, a thread or a queue?"""
    frame = next(iter(stack.own), None)
    if frame is None:
        return False
    if any(part in frame.path for part in _LOCK_MODULES) and not frame.package:
        return True
    return bool(_LOCK_NAME.match(frame.code) or _LOCK_CALL.search(frame.code))


def _module(frame: Frame) -> str:
    """The package of a frame; of Python's own, ``logging``."""
    if frame.package:
        # PyTorch's loader itself is under every worker's stack.
        return "" if "/torch/utils/data/" in frame.path else frame.package
    return "logging" if frame.path.endswith("/logging/__init__.py") else ""


def _named(frame: Frame) -> list[str]:
    """Top-level modules that the names in a line stand for."""
    aliases = _aliases(frame.path)
    words = re.findall(r"[A-Za-z_]\w*", frame.code)
    return [aliases[word] for word in words if word in aliases]


@functools.lru_cache(maxsize=64)
def _aliases(path: str) -> Mapping[str, str]:
    """What a file imports: the name in it → the top-level module."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.split(".")[0]
                found[each.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                found[each.asname or each.name] = node.module.split(".")[0]
    return found


def _is(frame: Frame, file: str, function: str = "") -> bool:
    return frame.path.endswith(file) and function in ("", frame.function)
