"""A block of calls: when each is due, how the wait is spent, and its duration.

Deadlines are absolute: the next is a period after the last, whatever the call took, so that
nothing drifts. One that has passed when its call could start is left out, as a control loop does
that has lost a tick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Final

from trainfit.pace.callee import PacedCallee
from trainfit.pace.host import PacedHost
from trainfit.pace.ticks import HYBRID_S, RehearsalCall
from trainfit.results.pace import Arm, CallBlock, CallFailure, FixName, Phase, Unmeasured
from trainfit.results.text import duration
from trainfit.scripts.fault import script_traceback

#: Of a block, the part at its beginning that does not count, in seconds, and its share at most:
#: utilisation averages have a half-life of 32 ms (kernel, schedutil), clocks follow later.
SETTLING_S: Final = 0.4
SETTLING: Final = 0.25
#: Arms in which the GPU is kept busy, the one that is only that first.
OF_THE_GPU: Final[tuple[Arm, ...]] = ("gpu_awake", "awake", "launching")
#: Arms in which something comes right before the call.
_REHEARSING: Final[tuple[Arm, ...]] = ("touch", "rehearse_awake", "rehearse")
#: Seconds between two kernels that keep the driver's path warm: nothing else runs on the core.
_LAUNCHES_EVERY_S: Final = 1e-4


@dataclasses.dataclass(frozen=True)
class Plan:
    """A block to be: how to spend the time, calls a second (``None``: back to back), for how
    long, and at least so many calls. ``spin_s`` is of "hybrid"; ``base`` is how the time is spent
    in an arm in which something comes right before the call."""

    arm: Arm
    hz: float | None
    seconds: float
    phase: Phase = "baseline"
    least: int = 3
    spin_s: float = HYBRID_S
    fix: FixName | None = None
    base: Arm = "sleep"


class CallError(Exception):
    """A call raised."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Caller:
    """Makes blocks of calls, and counts calls through all of them."""

    def __init__(self, callee: PacedCallee, host: PacedHost) -> None:
        self._callee, self._host = callee, host
        self.calls = 0
        self.rehearsals: list[RehearsalCall] = []
        """One for each block that rehearses as a :class:`trainfit.pace.ticks.Pacer` does."""
        self.kept: CallBlock | None = None
        """What there is of a block in which a call raised, or that was interrupted."""

    def once(self) -> float:
        """One call that nothing waits for; its seconds without those of garbage collections."""
        rows, began = _Rows(), self._host.now()
        self._call(rows, began)
        return self._host.now() - began - sum(rows.collected)

    def block(self, plan: Plan) -> CallBlock:
        """Raises :class:`CallError` where a call raises; ``kept`` has those before it then."""
        self.kept = None
        rows, first = _Rows(), self.calls
        begin = self._host.now()
        with self._host.observed() as observed:
            try:
                with self._surroundings(_pausing(plan)):
                    self._calls(plan, begin, rows)
            except (CallError, KeyboardInterrupt):
                self.kept = self._made(plan, rows, first)
                raise
        made = self._made(plan, rows, first)
        return dataclasses.replace(made, readings=observed.readings)

    def _surroundings(self, arm: Arm) -> contextlib.AbstractContextManager[None]:
        if arm in OF_THE_GPU:
            return self._host.device.awake()
        if arm == "no_idle_states":
            return self._host.no_idle_states()
        return contextlib.nullcontext()

    def _calls(self, plan: Plan, begin: float, rows: _Rows) -> None:
        host, wait = self._host, self._waiting(plan)
        period = 1 / plan.hz if plan.hz is not None else 0.0
        due, end = begin + period, begin + plan.seconds
        while len(rows.due) < plan.least or due < end:
            if plan.hz is None:
                due = host.now()
            wait(due)
            started = host.now()
            rows.due.append(due)
            self._call(rows, started)
            due += period
            late = host.now() - due
            if plan.hz is not None and late > 0:
                due += math.ceil(late / period) * period

    def _waiting(self, plan: Plan) -> Callable[[float], None]:
        if plan.hz is None:
            return lambda due: None
        pause = self._pause(_pausing(plan), plan.spin_s)
        if plan.arm not in _REHEARSING:
            return pause
        if plan.arm == "rehearse":
            rehearsal = RehearsalCall(self._rehearse, self._host.now)
            rehearsal.warm_up()
            self.rehearsals.append(rehearsal)

            def rehearsed(due: float) -> None:  # as Pacer.wait() does
                begin = due - rehearsal.lead_s
                pause(begin - plan.spin_s)
                self._host.spin_until(begin)
                rehearsal.before(due)
                self._host.spin_until(due)

            return rehearsed
        call = self._callee.touch if plan.arm == "touch" else self._rehearse

        def warmed(due: float) -> None:
            # The call is late by it: nothing may come in between that cools the caches.
            pause(due)
            call()

        return warmed

    def _rehearse(self) -> None:
        try:
            self._callee.rehearse()
        except (Exception, SystemExit) as error:
            raise CallError(_failure(self.calls + 1, error)) from error

    def _pause(self, arm: Arm, spin_s: float) -> Callable[[float], None]:
        host = self._host
        if arm in ("spin", "awake"):
            return host.spin_until
        if arm == "launching":

            def launching(due: float) -> None:
                while host.now() < due:
                    host.device.launch()
                    host.spin_until(min(due, host.now() + _LAUNCHES_EVERY_S))

            return launching
        if arm == "hybrid":

            def hybrid(due: float) -> None:
                host.sleep_until(due - spin_s)
                host.spin_until(due)

            return hybrid
        return host.sleep_until

    def _call(self, rows: _Rows, started: float) -> None:
        """One call, with all that is noted of it."""
        host, callee, device = self._host, self._callee, self._host.device
        before = host.probe() if callee.is_here else 0.0
        cpu = self._cpu_s()
        first = device.mark()
        host.collections_s()
        began = host.now()
        self.calls += 1
        try:
            callee()
        except (Exception, SystemExit) as error:
            raise CallError(_failure(self.calls, error)) from error
        ended = host.now()
        collected = host.collections_s() if callee.is_here else 0.0
        marks = first, device.mark()
        spent = self._cpu_s() - cpu
        after = host.probe() if callee.is_here else 0.0
        rows.add(started, ended - began, spent, before, after, marks, collected)

    def _cpu_s(self) -> float:
        """CPU time so far, of the command or of this thread."""
        spent = self._callee.cpu_s()
        return self._host.cpu_now() if spent is None else spent

    def _made(self, plan: Plan, rows: _Rows, first: int) -> CallBlock:
        device, count = self._host.device, len(rows.wall)
        settling = settling_s(plan.seconds)
        begin = rows.started[0] if count else 0.0
        settled = sum(value - begin < settling for value in rows.started)
        return CallBlock(
            arm=plan.arm,
            hz=plan.hz,
            phase=plan.phase,
            first_call=first,
            due_s=tuple(rows.due[:count]),
            started_s=tuple(rows.started),
            wall_s=tuple(rows.wall),
            cpu_s=tuple(rows.cpu),
            device_s=tuple(device.seconds(*mark) for mark in rows.marks) if device.is_there else (),
            probe_before_s=tuple(rows.before) if self._callee.is_here else (),
            probe_after_s=tuple(rows.after) if self._callee.is_here else (),
            settled=min(settled, count // 2),
            fix=plan.fix,
            collected_s=tuple(rows.collected) if any(rows.collected) else (),
        )


class _Rows:
    """Columns that grow; nothing is worked out between calls."""

    def __init__(self) -> None:
        self.due: list[float] = []
        self.started: list[float] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.before: list[float] = []
        self.after: list[float] = []
        self.marks: list[tuple[object, object]] = []
        self.collected: list[float] = []

    def add(
        self,
        started: float,
        wall: float,
        cpu: float,
        before: float,
        after: float,
        marks: tuple[object, object],
        collected: float,
    ) -> None:
        self.started.append(started)
        self.wall.append(wall)
        self.cpu.append(cpu)
        self.before.append(before)
        self.after.append(after)
        self.marks.append(marks)
        self.collected.append(collected)


def _pausing(plan: Plan) -> Arm:
    """How the time before a tick is spent, until what comes right before it."""
    return plan.base if plan.arm in _REHEARSING else plan.arm


def settling_s(seconds: float) -> float:
    """The seconds at the beginning of a block of ``seconds`` that do not count."""
    return min(SETTLING_S, SETTLING * seconds)


def _failure(number: int, error: Exception | SystemExit) -> CallFailure:
    return CallFailure(number, type(error).__name__, str(error), script_traceback(error).rstrip())


# ---
# How many blocks of calls each rate gets, and how long they last.
#
# Each block has to hold a call that counts and does the work: a chunked policy (ACT) runs its
# network in every ``period``-th call only, and a block of fewer calls may have none of these.


#: Blocks of each rate, where the time allows it.
ROUNDS: Final = 5
_LEAST_CALLS: Final = 3


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """The schedule of one rate: how many blocks (0: the time does not hold one), seconds of each,
    and its calls at least."""

    hz: float
    blocks: int
    seconds: float
    least: int = _LEAST_CALLS


def scheduled(hz: float, period: int, seconds: float) -> RateSchedule:
    """Blocks of ``hz`` in ``seconds``, the work being done in every ``period``-th call.

    Fewer blocks than :data:`ROUNDS`, and longer ones, where shorter ones may have no call with
    work.
    """
    if period == 1:
        return RateSchedule(hz, ROUNDS, seconds / ROUNDS)
    blocks = min(ROUNDS, int(seconds / needed_s(hz, period) + 1e-9))
    if not blocks:
        return RateSchedule(hz, 0, seconds)
    each = seconds / blocks
    # Of any ``period`` calls in a row one does the work; those at the beginning do not count.
    return RateSchedule(hz, blocks, each, period + math.ceil(settling_s(each) * hz) + 1)


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
    texts = []
    for hz in rates:
        blocks = scheduled(hz, period, seconds).blocks
        if not blocks:
            texts.append(f"{hz:g} Hz: {too_short(hz, period, seconds).text}")
        elif blocks < ROUNDS:
            texts.append(
                f"{hz:g} Hz: {_chunk(hz, period)}; {duration(seconds)} hold {blocks} of {ROUNDS} "
                f"blocks with such a call, --duration {_upwards(ROUNDS * needed_s(hz, period))} all"
            )
    return texts


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
