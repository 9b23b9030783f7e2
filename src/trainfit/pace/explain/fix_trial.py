"""Trial of a fix: the same measurement without and with it, interleaved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from trainfit.pace.calls.callee import CalleeError
from trainfit.pace.calls.loop import HYBRID_S, Plan
from trainfit.pace.explain.statistics import RateCounts, Sample, median, ratio, summary, taken_away
from trainfit.pace.machine.fixes import FIX_TEXTS, Fixer
from trainfit.results.format import duration, percent
from trainfit.results.machine.pace import Arm, Block, Estimate, Fix, FixTrial

ROUNDS: Final = 4
#: Least share of the excess that a fix must remove to count as one.
_LEAST_RECOVERED: Final = 0.7
_SURELY: Final = 0.4
#: Seconds of busy-wait that are tried, the shortest first; the whole pause is tried last.
_MARGINS: Final = (HYBRID_S, 5e-3, 10e-3, 20e-3)


@dataclasses.dataclass(frozen=True)
class Proof:
    """A fix (``None``: there is nothing to compare), and notes about it."""

    fix_trial: FixTrial | None
    notes: tuple[str, ...] = ()


Make = Callable[[Plan], Block]


def prove(
    fix: Fix, hz: float, seconds: float, fixer: Fixer, make: Make, counted: RateCounts
) -> Proof:
    """Blocks without and with the fix, interleaved; what it changes permanently, it changes only if
    it helped.

    Raises :class:`CalleeError` where it cannot be carried out.
    """
    why = fixer.why_not(fix)
    if why:
        raise CalleeError(f"--fix {fix}: {why}")
    spin_s = _margin(hz, seconds, make, counted) if fix == "spin" else HYBRID_S
    arm = _arm(fix, hz, spin_s)
    before, after = [], []
    for _ in range(ROUNDS):
        before.append(make(Plan("sleep", hz, seconds, "fix")))
        with fixer.applied(fix):
            after.append(make(Plan(arm, hz, seconds, "fix", spin_s=spin_s, fix=fix)))
    proof = _judged(fix, before, after, counted, spin_s)
    if proof.fix_trial is not None and proof.fix_trial.is_fixed:
        fixer.apply(fix)
    return proof


def _arm(fix: Fix, hz: float, spin_s: float) -> Arm:
    if fix == "spin":
        return "spin" if spin_s >= 1 / hz else "hybrid"
    return "no_idle_states" if fix == "qos" else "sleep"


def _margin(hz: float, seconds: float, make: Make, counted: RateCounts) -> float:
    """The shortest busy-wait that makes paced calls about as fast as back-to-back calls."""
    before = Sample.of([make(Plan("sleep", hz, seconds, "fix"))], counted.rhythm)
    for spin_s in (each for each in _MARGINS if each < 1 / hz):
        plan = Plan("hybrid", hz, seconds, "fix", spin_s=spin_s, fix="spin")
        tried = Sample.of([make(plan)], counted.rhythm)
        gone = _recovered(before, tried, counted)
        if gone is not None and gone.value >= _LEAST_RECOVERED:
            return spin_s
    return 1 / hz


def _recovered(before: Sample, after: Sample, counted: RateCounts) -> Estimate | None:
    """Which part of the excess over calls back to back is gone; ``None``: there was none."""
    if counted.reference is None or not before.count or not after.count:
        return None
    return taken_away(before.wall, counted.reference.wall, (after.wall,))


def _judged(
    fix: Fix, before: list[Block], after: list[Block], counted: RateCounts, spin_s: float
) -> Proof:
    first, last = summary(before, counted), summary(after, counted)
    samples = [Sample.of(blocks, counted.rhythm) for blocks in (before, after)]
    if first is None or last is None or counted.reference is None:
        return Proof(None, ("too few calls to measure the fix; give a longer --duration",))
    remedy, notes = FIX_TEXTS[fix], []
    recovered = _recovered(samples[0], samples[1], counted)
    if not first.is_slower:
        notes.append(f"calls at {first.hz:g} Hz are not slower than back to back: nothing to fix")
    is_fixed = (
        first.is_slower
        and recovered is not None
        and recovered.value >= _LEAST_RECOVERED
        and recovered.low >= _SURELY
    )
    what, cost = remedy.what, remedy.cost
    if fix == "spin" and first.hz is not None:
        idle = max(0.0, 1 / first.hz - (median(samples[1].wall) or 0.0))
        spent = min(spin_s, idle)
        what += f": {duration(spent)} of the {duration(idle)} between two calls"
        cost = f"{percent(spent * first.hz)} of a core's time and power"
    change = ratio(samples[1].wall, samples[0].wall)
    trial = FixTrial(fix, what, remedy.undo, cost, first, last, change, recovered, is_fixed)
    if not is_fixed and fix == "governor":
        notes.append("the previous governor was restored: this one did not help")
    return Proof(trial, tuple(notes))
