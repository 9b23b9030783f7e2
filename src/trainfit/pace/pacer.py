"""Keeps the pace of a control loop, and has a call's code and data in the caches at each tick."""

from __future__ import annotations

import collections
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

from trainfit.results.text import duration

#: Seconds of busy-wait at the end of each pause.
HYBRID_S: Final = 2e-3
#: Seconds that a rehearsal call ends before its tick, about: what a timer is late by. Caches cool
#: within milliseconds where other processes use the core.
_SLACK_S: Final = 0.4e-3
#: Of this many rehearsals the time that this share of them needs is what the next is given. Those
#: that were interrupted are longer, and would make all others come too early.
_KEPT, _SHARE = 20, 0.75
#: Calls before the first tick: the very first is like no other.
_FIRST_CALLS: Final = 3


class RehearsalCall:
    """Calls a function so shortly before a tick that it has returned when the tick comes.

    ``made`` and ``skipped`` count the ticks with such a call, and those before which there was no
    time left for one.
    """

    def __init__(self, call: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._call, self._clock = call, clock
        self._took = collections.deque[float](maxlen=_KEPT)
        self.made = self.skipped = 0

    @property
    def needed_s(self) -> float:
        """Seconds that a call is given, by those before; 0 before the first."""
        ordered = sorted(self._took)
        return ordered[int(_SHARE * (len(ordered) - 1))] if ordered else 0.0

    @property
    def lead_s(self) -> float:
        """How long before the tick a call begins."""
        return self.needed_s + _SLACK_S

    def warm_up(self) -> None:
        """The first calls, at once; the very first is not counted on."""
        for _ in range(_FIRST_CALLS):
            self._once()
        self._took.popleft()

    def before(self, due: float) -> None:
        """One call, if it will have returned at ``due``; what it raises is the caller's."""
        if self._clock() + self.needed_s > due:
            self.skipped += 1
            if self._took:  # what made it slow may be over: a faster one is expected in the end
                self._took.append(min(self._took))
            return
        self._once()
        self.made += 1

    def _once(self) -> None:
        began = self._clock()
        self._call()
        self._took.append(self._clock() - began)


class Pacer:
    """Waits for the ticks of a rate; deadlines are absolute, nothing drifts.

    Args:
        hz: ticks a second.
        spin_s: seconds of busy-wait before each tick, or before its rehearsal: the thread is awake
            then, its core's clock and idle states are up. ``math.inf``: the whole wait.
        rehearse: called without arguments right before each tick, so that weights, code and
            branch predictors are in the caches when it comes. It must do the work of the real call
            (the same function, inputs of the same shapes) and change nothing: no state of the
            policy, no random numbers that count, no command to a robot. A policy with state (a
            queue of actions, a hidden state) needs a function of its own, which runs the network
            alone. It is called three times at once, too, before the first tick.
            Cost: a second call for each tick, in CPU and GPU time and in energy.

    Raises :class:`ValueError` for a rate or a busy-wait that cannot be. What a rehearsal raises,
    ``Pacer`` and :meth:`wait` raise. One for which the pause is too short is left out.
    """

    def __init__(
        self,
        hz: float,
        spin_s: float = HYBRID_S,
        *,
        rehearse: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < hz < math.inf or spin_s < 0:
            raise ValueError("a pacer needs a rate above 0 and a busy-wait of 0 seconds or more")
        self.period_s, self.spin_s = 1 / hz, spin_s
        self._clock, self._sleep = clock, sleep
        self._rehearsal = RehearsalCall(rehearse, clock) if rehearse is not None else None
        if self._rehearsal is not None:
            self._rehearsal.warm_up()
            self._warn(self._rehearsal.needed_s)
        self._due = clock() + self.period_s

    def _warn(self, needed_s: float) -> None:
        if 2 * needed_s > self.period_s:
            warnings.warn(
                f"a rehearsal call needs {duration(needed_s)}: with the call itself that is more "
                f"than the {duration(self.period_s)} between two ticks, and it is left out before "
                "each tick that it would delay; lower the rate, or leave rehearse out",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def rehearsed(self) -> int:
        """Ticks before which there was a rehearsal call."""
        return self._rehearsal.made if self._rehearsal is not None else 0

    @property
    def skipped(self) -> int:
        """Ticks before which the pause was too short for a rehearsal call."""
        return self._rehearsal.skipped if self._rehearsal is not None else 0

    def wait(self) -> float:
        """Wait until the next tick; returns the seconds by which it was missed (0: it was not).

        Ticks that have passed already are left out but the last one, which is met at once.
        """
        due, now = self._due, self._clock()
        late = now - due
        if late > 0:
            due += math.floor(late / self.period_s) * self.period_s
            self._due = due + self.period_s
            return late
        rehearsal = self._rehearsal
        begin = due - rehearsal.lead_s if rehearsal is not None else due
        sleep_s = begin - self.spin_s - now
        if sleep_s > 0:
            self._sleep(sleep_s)
        self._spin(begin)
        if rehearsal is not None:
            rehearsal.before(due)
            self._spin(due)
        self._due = due + self.period_s
        return 0.0

    def _spin(self, until: float) -> None:
        while self._clock() < until:
            pass
