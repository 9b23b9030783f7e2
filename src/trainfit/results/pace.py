"""Calls at a fixed rate: what each took, whether pauses make them slower, why, and the fix.

A call that comes every 33 ms may take longer than the same call back to back: while nothing
happens, clocks fall and idle states deepen. What is measured comes in blocks, each of which
spends the time between two calls in one way (its arm).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Fix

Arm = Literal[
    "back_to_back",
    "sleep",
    "spin",
    "hybrid",
    "gpu_awake",
    "awake",
    "launching",
    "no_idle_states",
    "touch",
    "rehearse_awake",
    "rehearse",
]
"""How the time until the next call is spent: not at all; sleep; busy-wait on a core; sleep, then
busy-wait; sleep with the GPU kept busy; core and GPU kept busy; the same, and small kernels
launched by the calling thread; sleep with deep idle states forbidden. The last three end with
something right before the tick: as awake as can be, then reading the parameters, or a rehearsal
call; sleep, then a rehearsal call."""

Phase = Literal["baseline", "attribution", "profile", "fix"]
"""What a block is for; one that was profiled is slower for it, and counts for nothing."""

Cause = Literal[
    "cpu_frequency",
    "c_states",
    "gpu_clocks",
    "launch_overhead",
    "cold_caches",
    "cache_or_contention",
    "competing_thread",
]
"""The last but one where no rehearsal call could tell the two apart; the last is another thread of
the process."""
FixName = Literal["spin", "rehearse", "qos", "governor"]


#: How a warning begins that other programs had cores while calls were measured.
OTHERS: Final = "other processes used"


@dataclasses.dataclass(frozen=True)
class HostReadings:
    """What the machine said around a block; ``None`` is not readable here.

    ``cpu_hz`` is the clock of the CPU that the process was on at the block's end, ``idle_shares``
    how much of the block its CPUs were in each C-state, ``throttled`` how often they were slowed
    for heat. ``gpu_hz`` is the SM clock. ``others_cores`` are the cores that
    other processes kept busy, ``threads_cores`` those that other threads of this process were on
    or waited for, by thread.
    """

    cpu_hz: float | None = None
    idle_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    throttled: int | None = None
    gpu_hz: float | None = None
    gpu_pstate: int | None = None
    gpu_slowed: bool | None = None
    others_cores: float | None = None
    threads_cores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CallBlock:
    """Calls in one go, spent in one way; a value a call, in seconds.

    Calls are counted through all blocks, the block's first is number ``first_call``. ``due_s``
    and ``started_s`` are on one monotonic clock (back to back a call is due when it starts).
    ``cpu_s`` is CPU time of the thread that called (of the process, for a command), ``device_s``
    what the GPU's events say (empty: no GPU), ``probe_before_s`` and ``probe_after_s`` CPU time
    of a small fixed loop (empty: it would have run on another core than the call).
    """

    arm: Arm
    hz: float | None
    phase: Phase
    first_call: int
    due_s: tuple[float, ...]
    started_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    device_s: tuple[float, ...] = ()
    probe_before_s: tuple[float, ...] = ()
    probe_after_s: tuple[float, ...] = ()
    settled: int = 0
    """The first call that counts: those before found the machine as the last block left it."""
    readings: HostReadings = dataclasses.field(default_factory=HostReadings)
    fix: FixName | None = None
    """The fix that was in effect."""
    collected_s: tuple[float, ...] = ()
    """Garbage collections of Python within each call (empty: there were none)."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with the interval that holds it in 95 of 100 cases (bootstrap)."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """Percentiles of times in seconds."""

    count: int
    p50: float
    p95: float
    p99: float
    most: float


@dataclasses.dataclass(frozen=True)
class RateSummary:
    """All that counts of one rate (``None``: back to back).

    ``calls`` are those that do the work, ``pops`` those that only take something from a queue
    (an action of a chunk), where there are such. ``speed`` is how fast the core was right before
    the calls, as a share of the fastest that was seen. ``ratio`` is the median over that back to
    back. ``late`` is by how much calls start after they are due. ``misses`` ended after the next
    one was due; ``consecutive_share`` is the share of misses that follow a miss,
    ``overrun`` by how much they ended too late.
    """

    hz: float | None
    arm: Arm
    calls: Spread
    pops: Spread | None
    cpu_s: float
    device_s: float | None
    speed: float | None
    ratio: Estimate | None
    is_slower: bool
    late: Spread | None
    misses: int
    missed_share: float
    consecutive_share: float | None
    overrun: Spread | None
    reached_hz: float
    """Calls a second that were made, or could be where the rate is too high."""
    is_reached: bool
    collected_share: float = 0.0
    """Of the calls' time, that of garbage collections within them."""
    misses_collecting: int = 0
    """Misses that would have ended in time without the garbage collections within."""

    @property
    def is_collecting(self) -> bool:
        """Do garbage collections make a fifth of the calls' time, or of the misses?"""
        late = self.misses > 0 and self.misses_collecting >= 0.2 * self.misses
        return late or self.collected_share >= 0.2


@dataclasses.dataclass(frozen=True)
class ArmEffect:
    """One arm of the attribution at one rate.

    ``recovered`` is the share of the excess over calls back to back that it removes: 0 nothing, 1
    all of it. Where it could not be run, ``why_not`` says why.
    """

    arm: Arm
    wall_s: float | None = None
    cpu_s: float | None = None
    device_s: float | None = None
    speed: float | None = None
    recovered: Estimate | None = None
    why_not: str = ""


@dataclasses.dataclass(frozen=True)
class CauseShare:
    """The share of the excess that a cause explains, with its interval, and what decided it."""

    cause: Cause
    share: Estimate
    evidence: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Why paced calls are slower. ``cannot_tell`` says what is left unexplained ("": nothing),
    ``would_tell`` what would decide more, ``threads`` which other threads of the process worked
    while no call ran."""

    hz: float
    excess_s: Estimate
    arms: tuple[ArmEffect, ...]
    findings: tuple[CauseShare, ...]
    cannot_tell: str = ""
    would_tell: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    middle_half_s: float = 0.0
    """How far the middle half of the paced calls is apart."""

    @property
    def is_spread(self) -> bool:
        """Do paced calls vary by more than they are slower?"""
        return self.middle_half_s > self.excess_s.value


@dataclasses.dataclass(frozen=True)
class FixTrial:
    """The trial of a fix: what ``--fix`` did, and the same measurement before and after."""

    fix: FixName
    what: str
    undo: str
    cost: str
    before: RateSummary
    after: RateSummary
    change: Estimate | None
    """The median after over that before, at this rate."""
    recovered: Estimate | None
    is_fixed: bool


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """The call that raised: its number from 1 on."""

    call: int
    error_type: str
    message: str
    traceback: str


@dataclasses.dataclass(frozen=True)
class Unmeasured:
    """A rate that was asked for and of which no call counts.

    ``least_s`` is the duration that surely has a call with work at this rate, ``wanted_s`` one
    with as many as there are blocks (``None``: a longer duration is not what it needs).
    """

    hz: float
    why: str
    least_s: float | None = None
    wanted_s: float | None = None

    @property
    def text(self) -> str:
        """Why, and what to give instead."""
        if self.least_s is None or self.wanted_s is None:
            return self.why
        return (
            f"{self.why}; --duration {self.least_s:g} has one, --duration {self.wanted_s:g} one in "
            "each block"
        )


@dataclasses.dataclass(frozen=True)
class PaceResult(ResultFile):
    """All of a measurement.

    ``period``: the work is done in every so many calls (1: in each), in those whose numbers leave
    the rest ``phase``.
    ``probe_fast_s`` is the time of the fixed loop at the highest observed speed.
    ``ended``: "finished", "failed" (a call raised), "interrupted" (by the user).
    """

    FILE: ClassVar = Format.of("trainfit-pace", "trainfit pace --output")
    METRICS: ClassVar = {
        "back_to_back_ms": "median call, back to back",
        "call_ms": "median call at the rate where it is longest",
        "p99_ms": "99th percentile of calls at the rate where it is longest",
        "missed_share": "share of calls that ended after the next was due, at the worst rate",
        "slowdown": "median call at the worst rate divided by the median back to back",
        "reached_hz": "calls a second that were reached at the highest rate",
    }

    target: str
    hz: tuple[float, ...]
    duration_s: float
    blocks: tuple[CallBlock, ...]
    first_call_s: float | None
    period: int
    phase: int
    probe_fast_s: float | None
    back_to_back: RateSummary | None
    rates: tuple[RateSummary, ...]
    attribution: Attribution | None
    advice: tuple[Fix, ...]
    fix_trial: FixTrial | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    ended: Literal["finished", "failed", "interrupted"]
    failure: CallFailure | None = None
    machine: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What holds clocks and idle states here, in words, by subject."""
    unmeasured: tuple[Unmeasured, ...] = ()
    """Those of ``hz`` that ``rates`` lacks."""

    @property
    def unheld(self) -> tuple[tuple[float, float], ...]:
        """Rates that cannot be held, each with the seconds that a call with work needs: at that
        rate, or back to back where it was not measured.

        A call has until the next one with work: ``period`` calls later.
        """
        needed = {row.hz: row.calls.p50 for row in self.rates}
        back = self.back_to_back.calls.p50 if self.back_to_back is not None else 0.0
        times = ((hz, needed.get(hz, back)) for hz in self.hz)
        return tuple((hz, seconds) for hz, seconds in times if seconds > self.period / hz)

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`; of several rates the worst, of which nothing is known
        unless all were measured."""
        rates = () if self.unmeasured else self.rates
        ratios = [rate.ratio.value for rate in rates if rate.ratio is not None]
        back = self.back_to_back
        return {
            "back_to_back_ms": back.calls.p50 if back is not None else None,
            "call_ms": max((rate.calls.p50 for rate in rates), default=None),
            "p99_ms": max((rate.calls.p99 for rate in rates), default=None),
            "missed_share": max((rate.missed_share for rate in rates), default=None),
            "slowdown": max(ratios, default=None) if len(ratios) == len(rates) else None,
            "reached_hz": max(rates, key=lambda each: each.hz or 0.0).reached_hz if rates else None,
        }

    def is_held(self, row: RateSummary) -> bool:
        """Is it back to back, or at a rate that can be held?"""
        return all(hz != row.hz for hz, _ in self.unheld)
