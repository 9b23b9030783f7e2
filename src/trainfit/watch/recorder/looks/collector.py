"""How long Python's garbage collector stops the process.

Threads cannot see it, as it keeps the interpreter's lock: Python itself tells when it begins and
ends (``gc.callbacks``). What is told of at once is a number; files are written later, as a
collection may begin anywhere.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from trainfit.results.runs.watched import COLLECTIONS
from trainfit.simgpu.patching import PatchSet

#: Seconds from which one is a pause: collections of new objects alone (generations 0 and 1) need
#: some 0.02 to 0.3 ms (Python 3.11, 5,200 and 470 of them).
_PAUSE_S: Final = 0.001
#: Seconds between two events at least, and of the time since the first: events of a long run are
#: some hundred.
_LEAST_S: Final = 1.0
_OF_ALL: Final = 0.02


class CollectorPauses:
    """Pauses from :meth:`install` on.

    Args:
        tell: makes an event: kind, ``seconds`` of the pauses, ``values`` with their number and the
            longest one.
        clock: seconds, monotonic.
    """

    def __init__(
        self, tell: Callable[..., None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tell, self._clock = tell, clock
        self.reset()

    def reset(self) -> None:
        """Begin from nothing, as in a forked child."""
        self._pid = os.getpid()
        self._began = self._clock()
        self._first = self._told = self._began
        self._pauses: collections.deque[float] = collections.deque()

    def install(self, patches: PatchSet) -> None:
        """Watch the collector, until ``patches`` are restored."""
        called = self._collecting
        gc.callbacks.append(called)

        def leave() -> None:
            with contextlib.suppress(ValueError):  # the script may have emptied the list
                gc.callbacks.remove(called)

        patches.on_restore(leave)

    def _collecting(self, phase: str, _: Mapping[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock()
        elif (seconds := self._clock() - self._began) >= _PAUSE_S:
            self._pauses.append(seconds)

    def look(self, *, at_end: bool = False) -> None:
        """Tell of the pauses since the last time, if there were any and it is time for it."""
        if not self._pauses:
            return
        now = self._clock()
        due = now - self._told >= max(_LEAST_S, _OF_ALL * (now - self._first))
        if not (due or at_end) or os.getpid() != self._pid:
            return
        self._told = now
        found = [self._pauses.popleft() for _ in range(len(self._pauses))]
        values = {"pauses": float(len(found)), "longest_s": max(found)}
        self._tell(COLLECTIONS, seconds=sum(found), values=values)
