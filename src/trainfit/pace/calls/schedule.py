"""How many blocks of calls each rate gets, and how long they last.

Each block has to hold a call that counts and does the work: a chunked policy (ACT) runs its
network in every ``period``-th call only, and a block of fewer calls may have none of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Final

from trainfit.pace.calls.loop import SETTLING, SETTLING_S, settling_s
from trainfit.results.format import duration
from trainfit.results.machine.pace import Unmeasured

#: Blocks of each rate, where the time allows it.
ROUNDS: Final = 5
_LEAST_CALLS: Final = 3


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Of one rate: how many blocks (0: the time does not hold one), seconds of each, and its
    calls at least."""

    hz: float
    blocks: int
    seconds: float
    least: int = _LEAST_CALLS


def scheduled(hz: float, period: int, seconds: float) -> Schedule:
    """Blocks of ``hz`` in ``seconds``, the work being done in every ``period``-th call.

    Fewer blocks than :data:`ROUNDS`, and longer ones, where shorter ones may have no call with
    work.
    """
    if period == 1:
        return Schedule(hz, ROUNDS, seconds / ROUNDS)
    blocks = min(ROUNDS, int(seconds / needed_s(hz, period) + 1e-9))
    if not blocks:
        return Schedule(hz, 0, seconds)
    each = seconds / blocks
    # Of any ``period`` calls in a row one does the work; those at the beginning do not count.
    return Schedule(hz, blocks, each, period + math.ceil(settling_s(each) * hz) + 1)


def needed_s(hz: float, period: int) -> float:
    """Seconds of a block whose calls that count are ``period`` or more."""
    chunk = period / hz
    return min(chunk / (1 - SETTLING), chunk + SETTLING_S)


def enough_s(calls: int, hz: float, period: int) -> float:
    """The duration that has so many calls with work at ``hz``, as many in each block."""
    each = math.ceil(calls / ROUNDS)
    return ROUNDS * (each * period / hz + SETTLING_S)


def said_before(rates: Iterable[float], period: int, seconds: float) -> list[str]:
    """What ``seconds`` are too short for, a line for each rate that this is true of."""
    said = []
    for hz in rates:
        blocks = scheduled(hz, period, seconds).blocks
        if not blocks:
            said.append(f"{hz:g} Hz: {too_short(hz, period, seconds).text}")
        elif blocks < ROUNDS:
            said.append(
                f"{hz:g} Hz: {_chunk(hz, period)}; {duration(seconds)} hold {blocks} of {ROUNDS} "
                f"blocks with such a call, --duration {_upwards(ROUNDS * needed_s(hz, period))} all"
            )
    return said


def too_short(hz: float, period: int, seconds: float) -> Unmeasured:
    """Why ``hz`` is not measured in ``seconds``, and what would do."""
    why = f"{_chunk(hz, period)}, and --duration {seconds:g} is too short for one that counts"
    return with_durations(hz, period, why)


def with_durations(hz: float, period: int, why: str) -> Unmeasured:
    """``why``, with the durations that surely have a call with work, and one in each block."""
    one = needed_s(hz, period)
    return Unmeasured(hz, why, float(_upwards(one)), float(_upwards(ROUNDS * one)))


def _chunk(hz: float, period: int) -> str:
    return f"every {period}th call does the work, every {duration(period / hz)} at this rate"


def _upwards(seconds: float) -> str:
    """Rounded up: to a whole second from 10 on, to a tenth below."""
    return f"{math.ceil(seconds - 1e-9)}" if seconds > 9 else f"{math.ceil(10 * seconds) / 10:g}"
