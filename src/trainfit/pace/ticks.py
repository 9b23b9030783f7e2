"""Measures the iterations of a user's own control loop, and keeps its pace.

    while True:
        with trainfit.pace.tick(30):
            robot.send(policy.select_action(robot.observe()))

The loop keeps its own pace. What was seen is said once, on standard error, when the process
ends, and written to the file that ``TRAINFIT_PACE_OUTPUT`` names. Nothing here raises, waits, or
touches a GPU.

Keeps the pace of a control loop, and has a call's code and data in the caches at each tick.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import math
import os
import sys
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from trainfit.pace.statistics import RateCounts, Sample, rhythm, summary, warnings_of
from trainfit.results.files.writing import is_replaceable
from trainfit.results.pace import CallBlock, PaceResult, RateSummary
from trainfit.results.text import duration, percent, rate
from trainfit.simgpu.patching import CollectionTimes, PatchSet

#: Turns that are kept of a loop, the last ones: 9 hours at 30 Hz, 32 bytes each.
_MOST: Final = 1 << 20
#: Turns before the loop has found its pace.
_SETTLING: Final = 5
OUTPUT: Final = "TRAINFIT_PACE_OUTPUT"


class TickLoop:
    """The turns of one loop."""

    def __init__(self, hz: float, name: str) -> None:
        self.hz, self.name = hz, name
        self._started, self._wall, self._cpu = array("d"), array("d"), array("d")
        self._collected = array("d")
        self._first = 0
        seen = self._collections = CollectionTimes()
        self.patches = PatchSet()
        self.patches.see_collections(time.perf_counter, seen.starts, seen.stops)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One turn of it, however it ends."""
        self._collections.take()  # those between two turns
        cpu, began = time.thread_time(), time.monotonic()
        try:
            yield
        finally:
            ended, spent = time.monotonic(), time.thread_time()
            self._started.append(began)
            self._wall.append(ended - began)
            self._cpu.append(spent - cpu)
            self._collected.append(self._collections.take())
            if len(self._wall) >= 2 * _MOST:
                self._forget()

    def _forget(self) -> None:
        for column in (self._started, self._wall, self._cpu, self._collected):
            del column[:_MOST]
        self._first += _MOST

    def result(self) -> PaceResult | None:
        """The result so far; ``None`` where there were too few turns to say anything."""
        count = len(self._wall)
        if count <= _SETTLING + 1:
            return None
        started = list(self._started[:count])
        # A turn is due a period after the last one began: the loop has no deadlines of ours.
        due = [started[0], *(at + 1 / self.hz for at in started[:-1])]
        block = CallBlock(
            "sleep",
            self.hz,
            "baseline",
            self._first,
            tuple(due),
            tuple(started),
            tuple(self._wall[:count]),
            tuple(self._cpu[:count]),
            settled=_SETTLING,
            collected_s=tuple(self._collected[:count]),
        )
        pattern = rhythm([block])
        made = summary([block], RateCounts(pattern, None))
        said = warnings_of(Sample.of([block], pattern), f"{self.hz:g} Hz")
        return PaceResult(
            target=self.name,
            hz=(self.hz,),
            duration_s=started[-1] - started[0],
            blocks=(block,),
            first_call_s=None,
            period=pattern.period,
            phase=pattern.phase,
            probe_fast_s=None,
            back_to_back=None,
            rates=(made,) if made is not None else (),
            attribution=None,
            advice=(),
            fix_trial=None,
            warnings=tuple(said),
            notes=(),
            ended="finished",
        )


_loops: dict[tuple[float, str], TickLoop] = {}
_lock = threading.Lock()


def tick(hz: float, name: str = "loop") -> contextlib.AbstractContextManager[None]:
    """A turn of a loop that should come ``hz`` times a second; ``name`` tells loops apart."""
    loop = _loops.get((hz, name))
    if loop is None:
        try:
            loop = _new(float(hz), str(name))
        except (TypeError, ValueError):
            return contextlib.nullcontext()
    return loop.turn()


def _new(hz: float, name: str) -> TickLoop:
    if not 0 < hz < float("inf"):
        raise ValueError("expected a rate above 0")
    with _lock:
        if not _loops:
            atexit.register(_say)
        return _loops.setdefault((hz, name), TickLoop(hz, name))


def seen() -> tuple[PaceResult, ...]:
    """What the loops of this process did so far."""
    made = [loop.result() for loop in _loops.values()]
    return tuple(pace_result for pace_result in made if pace_result is not None)


def _say() -> None:
    """Print and save the results at the process' end."""
    with contextlib.suppress(Exception):
        output = os.environ.get(OUTPUT, "")
        for number, result in enumerate(seen()):
            for each in result.rates:
                print(f"trainfit: {_line(result.target, each)}", file=sys.stderr)
            if output and is_replaceable(Path(output)):
                path = Path(output)
                result.save(path if not number else path.with_stem(f"{path.stem}-{number + 1}"))


def _line(name: str, summary: RateSummary) -> str:
    calls, wanted = summary.calls, summary.hz or 0.0
    collects = ""
    if summary.is_collecting:
        share = percent(summary.collected_share)
        collects = f"; garbage collections of Python make {share} of their time"
        if summary.misses_collecting:
            collects += f", and {summary.misses_collecting} of the {summary.misses} missed"
        collects += ": gc.freeze() before the loop, gc.collect() between turns"
    shown = "".join(each if each.isprintable() else "?" for each in name)
    pops = (
        f", every iteration that does the work ({calls.count})" if summary.pops is not None else ""
    )
    return (
        f"{shown} at {wanted:g} Hz: {rate(summary.reached_hz)} iterations/s{pops}, "
        f"{duration(calls.p50)} each (p99 {duration(calls.p99)}, max {duration(calls.most)}), "
        f"{summary.misses} missed the next deadline ({percent(summary.missed_share, decimals=2)})"
        f"{collects}"
    )


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
