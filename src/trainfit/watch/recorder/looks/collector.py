"""How long Python's garbage collector stops the process.

Threads cannot see it, as it keeps the interpreter's lock: Python itself tells when it begins and
ends (``gc.callbacks``). What is called is made of C functions alone
(:meth:`trainfit.simgpu.patching.PatchSet.see_collections`), that put the time into a queue; it is
read at the next step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from trainfit.results.runs.watched import COLLECTIONS
from trainfit.simgpu.patching import CollectionTimes, PatchSet

#: Seconds from which one is a pause: collections of new objects alone (generations 0 and 1) need
#: some 0.02 to 0.3 ms (Python 3.11, 5,200 and 470 of them).
_PAUSE_S: Final = 0.001
#: Seconds between two events at least, and of the time since the first: events of a long run are
#: some hundred.
_LEAST_S: Final = 1.0
_OF_ALL: Final = 0.02
#: Collections from which they are read without waiting, of the 4,096 that are kept.
_MANY: Final = 1 << 10


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
        self._times = CollectionTimes()
        self.reset()

    def reset(self) -> None:
        """Begin from nothing, as in a forked child."""
        self._pid = os.getpid()
        self._first = self._told = self._clock()
        self._times.starts.clear()
        self._times.stops.clear()
        self._pauses: list[float] = []

    def install(self, patches: PatchSet) -> None:
        """Watch the collector, until ``patches`` are restored."""
        patches.see_collections(self._clock, self._times.starts, self._times.stops)

    def look(self, *, at_end: bool = False) -> None:
        """Tell of the pauses since the last time, if there were any and it is time for it."""
        if not self._times.stops and not self._pauses:
            return
        now = self._clock()
        due = now - self._told >= max(_LEAST_S, _OF_ALL * (now - self._first))
        if os.getpid() != self._pid or not (due or at_end or len(self._times.stops) >= _MANY):
            return
        self._read()
        if self._pauses and (due or at_end):
            pauses, self._pauses, self._told = self._pauses, [], now
            values = {"pauses": float(len(pauses)), "longest_s": max(pauses)}
            self._tell(COLLECTIONS, seconds=sum(pauses), values=values)

    def _read(self) -> None:
        self._pauses += [seconds for seconds in self._times.pauses() if seconds >= _PAUSE_S]
