"""Measures the iterations of a user's own control loop.

    while True:
        with trainfit.pace.tick(30):
            robot.send(policy.select_action(robot.observe()))

The loop keeps its own pace. What was seen is said once, on standard error, when the process
ends, and written to the file that ``TRAINFIT_PACE_OUTPUT`` names. Nothing here raises, waits, or
touches a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
        found = rhythm([block])
        made = summary([block], RateCounts(found, None))
        said = warnings_of(Sample.of([block], found), f"{self.hz:g} Hz")
        return PaceResult(
            target=self.name,
            hz=(self.hz,),
            duration_s=started[-1] - started[0],
            blocks=(block,),
            first_call_s=None,
            period=found.period,
            phase=found.phase,
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
    return tuple(each for each in made if each is not None)


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
