"""Looks at the training process's other Python threads: which of them computes, and where.

A thread that runs Python code holds the interpreter's lock for 5 ms at a time
(``sys.getswitchinterval()``), and the training gives that lock back at each operator of PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

from trainfit.results.runs.watched import ThreadLooks
from trainfit.simgpu.device.user_location import is_library
from trainfit.watch.recorder.looks.stacks import StackCounts, stack_text, users_stack

#: Nanoseconds that a thread was on a core, and that it waited for one, of the kernel.
_SCHEDULED: Final = "/proc/{}/task/{}/schedstat"
#: Of the time between two looks, what a thread is on a core for that computes.
_COMPUTES: Final = 0.05
#: Threads that are looked at each time, in turns, and of how many: a pool may have hundreds.
_MOST: Final = 8
_OF: Final = 64
#: Where PyTorch's own thread is, which pins batches.
_OF_TORCH: Final = "torch/utils/data/"


class OtherThreadLooks:
    """CPU time of the Python threads next to the one that trains, and lines they were found at."""

    def __init__(self) -> None:
        self._counts = StackCounts()
        self._last: dict[int, tuple[float, float]] = {}
        self._cpu_s: dict[int, float] = {}
        self._open_cpu_s: dict[int, float] = {}
        self._began = self._ended = self._looked = 0.0
        self._turn = self._of = 0

    def settle(self, step: int) -> None:
        """What was seen in the steps before that one counts."""
        if step == self._of:
            return
        self._of, self._ended = step, self._looked
        self._counts.settle(step)
        for thread, seconds in self._open_cpu_s.items():
            self._cpu_s[thread] = self._cpu_s.get(thread, 0.0) + seconds
        self._open_cpu_s.clear()

    def look(self, training: int, now: float, step: int) -> None:
        """Look at all but the thread ``training``, at ``now`` in seconds, in this step."""
        others = [each for each in threading.enumerate() if each.ident != training]
        if len(others) > _OF or not others:
            return
        if len(others) > _MOST:
            self._turn = (self._turn + _MOST) % len(others)
            others = (others + others)[self._turn : self._turn + _MOST]
        self.settle(step)
        self._began, self._looked = self._began or now, now
        self._counts.look(step)
        for each in others:
            used = cpu_s_of(each.native_id)
            if used is None or each.native_id is None or each.ident is None:
                continue
            before = self._last.get(each.native_id)
            self._last[each.native_id] = used, now
            if before is None or used - before[0] < _COMPUTES * (now - before[1]):
                continue
            stack = users_stack(each.ident)
            if not stack or any(_OF_TORCH in code.co_filename for code, _, _ in stack):
                continue
            spent = self._open_cpu_s.get(each.native_id, 0.0) + used - before[0]
            self._open_cpu_s[each.native_id] = spent
            self._counts.count(stack)

    def summary(self) -> ThreadLooks:
        """What they were found to do."""
        seconds = self._ended - self._began
        cores = [value / seconds for value in list(self._cpu_s.values())] if seconds > 0 else []
        code = self._counts.summary()
        return ThreadLooks(code, max(cores, default=0.0), len(cores), sum(cores))


def stacks_of_script(training: int) -> list[str]:
    """What threads of the script stand at next to the one that trains, as :mod:`faulthandler`
    writes it; first those that Python waits for at its end."""
    threads = sorted(threading.enumerate(), key=lambda each: each.daemon)
    others = [thread.ident for thread in threads if thread.ident not in (training, None)]
    stacks = [users_stack(ident) for ident in others[:_OF] if ident is not None]
    own = [
        stack for stack in stacks if not all(is_library(code.co_filename) for code, _, _ in stack)
    ]
    return [stack_text(stack) for stack in own[:_MOST]]


def cpu_s_of(thread: int | None, process: int | str = "self") -> float | None:
    """Seconds on a core, of a thread of a process by the kernel's numbers; ``None``: the kernel
    does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        path = _SCHEDULED.format(process, thread)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return int(os.read(descriptor, 100).split()[0]) / 1e9
        finally:
            os.close(descriptor)
    return None
