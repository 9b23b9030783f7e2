"""Keeps a loop's pace: sleep for most of the wait, then busy-wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from trainfit.pace.calls.loop import HYBRID_S


class Pacer:
    """Waits for the ticks of a rate; deadlines are absolute, nothing drifts.

    Args:
        hz: ticks a second.
        spin_s: seconds of busy-wait before each tick: the thread is awake when the
            tick comes, its core's clock and idle states are up. ``math.inf``: the whole wait.
    """

    def __init__(
        self,
        hz: float,
        spin_s: float = HYBRID_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < hz < math.inf or spin_s < 0:
            raise ValueError("a pacer needs a rate above 0 and a busy-wait of 0 seconds or more")
        self.period_s, self.spin_s = 1 / hz, spin_s
        self._clock, self._sleep = clock, sleep
        self._due = clock() + self.period_s

    def wait(self) -> float:
        """Until the next tick; by how many seconds it was missed (0: it was not).

        Ticks that have passed already are left out but the last one, which is met at once.
        """
        due, now = self._due, self._clock()
        late = now - due
        if late > 0:
            due += math.floor(late / self.period_s) * self.period_s
            self._due = due + self.period_s
            return late
        sleep_s = due - self.spin_s - now
        if sleep_s > 0:
            self._sleep(sleep_s)
        while self._clock() < due:
            pass
        self._due = due + self.period_s
        return 0.0
