"""The whole measurement: calls back to back and at each rate, interleaved; the cause of slower
paced calls; a fix, and its proof.

A machine's speed drifts within seconds, so that every arm comes in several blocks, between blocks
of what it is compared with (A/B/A).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np

from trainfit.pace.attribution import MOST_AWAKE, TRIED, PacedSamples, attribute
from trainfit.pace.callee import PacedCallee, why_no_rehearsal
from trainfit.pace.fixes import Fixer, Proof, advice, prove, with_skipped
from trainfit.pace.host import Kernels, PacedHost
from trainfit.pace.loop import (
    OF_THE_GPU,
    ROUNDS,
    Caller,
    CallError,
    Plan,
    enough_s,
    needed_s,
    said_before,
    scheduled,
    too_short,
    with_durations,
)
from trainfit.pace.statistics import (
    FEW,
    CallPattern,
    RateCounts,
    Sample,
    are_mixed,
    machine_warnings,
    rhythm,
    summary,
    warnings_of,
)
from trainfit.results.files.errors import TrainfitError
from trainfit.results.pace import (
    Arm,
    Attribution,
    CallBlock,
    CallFailure,
    FixName,
    HostReadings,
    PaceResult,
    Phase,
    RateSummary,
    Unmeasured,
)

#: Blocks of each arm of the attribution.
_ATTRIBUTION_ROUNDS: Final = 4
#: Of a paced block's seconds, those of one back to back, and the least calls of it.
_BACK_TO_BACK: Final = 0.5
_LEAST_BACK_TO_BACK: Final = 10
#: Calls of a paced block in an attribution, at least.
_LEAST_CALLS: Final = 12
#: Calls before anything counts, at least and at most, and seconds for more of them: 400 calls
#: have three with work of a policy that makes chunks of 100 actions (ACT's default).
_WARM_UP_CALLS, _WARM_UP_MOST, _WARM_UP_S = 3, 400, 1.0
#: Where some calls took a multiple of the others, as many times the slowest are waited for more
#: of these at most: three show their period.
_WARM_UP_SLOW: Final = 5
#: Calls whose kernels are looked at.
_PROFILED: Final = 6
#: Time on the GPU over that of a call, above which the call did not wait for it.
_ASYNC: Final = 1.1
#: Of all probes, the share that is at least as fast as the full speed is taken to be.
_FAST: Final = 0.02

Progress = Callable[[str, float], None]
"""What is done now, and which share of everything is done."""
Ended = Literal["finished", "failed", "interrupted"]


@dataclasses.dataclass(frozen=True)
class PaceOptions:
    """What to measure: calls a second, seconds for each rate, and a fix to try."""

    hz: tuple[float, ...] = (15.0, 30.0, 60.0)
    seconds: float = 10.0
    attributes: bool = True
    fix: FixName | None = None


def measure(
    callee: PacedCallee,
    host: PacedHost,
    options: PaceOptions,
    *,
    target: str = "",
    fixer: Fixer | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    machine: Mapping[str, str] | None = None,
) -> PaceResult:
    """Measure, and say what it means. What a call raises ends it, as Ctrl-C does: the result has
    what there is by then (``ended``). ``say`` is called before the measurement with what the time
    is too short for."""
    session = Session(callee, host, options, fixer or Fixer(), progress or _silent)
    failure: CallFailure | None = None
    ended: Ended = "finished"
    try:
        session.run(say or _unheard)
    except CallError as error:
        failure, ended = error.failure, "failed"
    except KeyboardInterrupt:
        ended = "interrupted"
    if ended != "finished":
        session.keep_unfinished()
    made = session.result(target, machine or {}, ended)
    return dataclasses.replace(made, failure=failure)


class Session:
    """One measurement while it is made."""

    def __init__(
        self,
        callee: PacedCallee,
        host: PacedHost,
        options: PaceOptions,
        fixer: Fixer,
        progress: Progress,
    ) -> None:
        self._host, self._options, self._fixer = host, options, fixer
        self._callee = callee
        self._progress = progress
        self._caller = Caller(callee, host)
        self._blocks: list[CallBlock] = []
        self._first_calls: CallBlock | None = None
        self._kernels: dict[Arm, Kernels] = {}
        self._why_not: dict[Arm, str] = {}
        self._first_call_s: float | None = None
        self._attribution: Attribution | None = None
        self._proof: Proof | None = None

    def keep_unfinished(self) -> None:
        """What there is of a block that did not come to its end."""
        block = self._caller.kept
        if block is not None and block.wall_s:
            self._blocks.append(block)

    # --- Making blocks --------------------------------------------------------------------------
    def run(self, say: Callable[[str], None]) -> None:
        """All of it; raises :class:`CallError` where a call raises."""
        self._warm_up()
        for words in said_before(self._options.hz, self._rhythm().period, self._options.seconds):
            say(words)
        self._baseline()
        slow = self._slowest()
        if slow is not None and self._options.attributes:
            self._attribute(slow)
        if self._options.fix is not None:
            hz = slow if slow is not None else min(self._options.hz)
            self._prove(self._options.fix, hz)

    def _prove(self, fix: FixName, hz: float) -> None:
        """What does not let itself be changed is said; what was measured stays."""
        self._progress(f"--fix {fix}, before and after", 0.9)
        counted, seconds = self._counted(), self._block_s(hz)
        why = why_no_rehearsal(self._callee, counted.rhythm.period) if fix == "rehearse" else ""
        try:
            proof = prove(fix, hz, seconds, self._fixer, self._block, counted, why)
            self._proof = with_skipped(proof, self._caller.rehearsals)
        except TrainfitError as error:
            self._proof = Proof(None, (str(error),))

    def _warm_up(self) -> None:
        self._progress("first calls", 0.0)
        self._first_call_s = self._caller.once()
        self._host.look_for_device()
        begin, first, walls = self._host.now(), self._caller.calls, list[float]()
        with self._host.observed():
            while _goes_on(walls, self._host.now() - begin):
                walls.append(self._caller.once())
        times, none = tuple(walls), (0.0,) * len(walls)
        self._first_calls = CallBlock(
            "back_to_back", None, "profile", first, none, none, times, none
        )

    def _rhythm(self) -> CallPattern:
        """The pattern of all calls so far but the very first, which is like no other."""
        first = [self._first_calls] if self._first_calls is not None else []
        return rhythm([*first, *self._blocks])

    def _baseline(self) -> None:
        rates = list(self._options.hz)
        text = f"back to back and at {', '.join(f'{hz:g}' for hz in rates)} Hz, interleaved"
        for number in range(ROUNDS):
            self._progress(text, 0.05 + 0.4 * number / ROUNDS)
            period = self._rhythm().period
            for hz in rates if number % 2 == 0 else rates[::-1]:
                each = scheduled(hz, period, self._options.seconds)
                if number < each.blocks:
                    self._block(self._back_to_back(each.seconds, "baseline"))
                    self._block(Plan("sleep", hz, each.seconds, least=each.least))

    def _back_to_back(self, seconds: float, phase: Phase) -> Plan:
        # Half of the calls count at least, and of any ``period`` in a row one does the work.
        least = max(_LEAST_BACK_TO_BACK, 2 * self._rhythm().period)
        return Plan("back_to_back", None, _BACK_TO_BACK * seconds, phase, least)

    def _block_s(self, hz: float) -> float:
        period = self._rhythm().period
        # One call more: the clock of a block begins a period before its first call.
        chunk = needed_s(hz, period + 1) if period > 1 else 0.0
        return max(self._options.seconds / ROUNDS, _LEAST_CALLS / hz, chunk)

    def _attribute(self, hz: float) -> None:
        arms = [arm for arm in TRIED if self._can(arm)]
        base = next(arm for arm in MOST_AWAKE if arm in arms)
        seconds = self._block_s(hz)
        for number in range(_ATTRIBUTION_ROUNDS):
            share = 0.45 + 0.4 * number / _ATTRIBUTION_ROUNDS
            self._progress(f"why {hz:g} Hz is slower", share)
            self._block(self._back_to_back(seconds, "attribution"))
            for arm in arms:
                self._block(Plan("sleep", hz, seconds, "attribution"))
                self._block(Plan(arm, hz, seconds, "attribution", base=base))
            self._block(Plan("sleep", hz, seconds, "attribution"))
        self._profile(hz)
        self._attribution = self._attributed(hz)

    def _can(self, arm: Arm) -> bool:
        """May this arm be run? If not, why is noted."""
        why = ""
        if arm in OF_THE_GPU:
            why = self._host.device.why_not_awake()
        elif arm == "no_idle_states":
            why = self._host.why_no_latency_hold()
        elif arm == "touch":
            why = self._callee.why_no_touch()
        elif arm == "rehearse_awake":
            why = why_no_rehearsal(self._callee, self._rhythm().period)
        if why and arm not in OF_THE_GPU[1:]:  # said once
            self._why_not[arm] = why
        return not why

    def _profile(self, hz: float) -> None:
        """Kernels of paced calls and of those back to back; these blocks do not count."""
        if not self._host.device.is_there:
            return
        pattern = self._rhythm()
        count = _PROFILED * pattern.period
        for plan in (
            Plan("sleep", hz, 0.0, "profile", least=count),
            Plan("back_to_back", None, 0.0, "profile", least=count),
        ):
            with self._host.device.profiled() as kernels:
                first = self._caller.calls
                self._caller.block(plan)
            numbers = np.arange(first, self._caller.calls)
            self._kernels[plan.arm] = kernels.of_one(int(pattern.has(numbers).sum()))

    def _block(self, plan: Plan) -> CallBlock:
        made = self._caller.block(plan)
        self._blocks.append(made)
        return made

    # --- What it amounts to ---------------------------------------------------------------------
    def _of(self, arm: Arm, hz: float | None, phase: Phase) -> list[CallBlock]:
        return [b for b in self._blocks if b.arm == arm and b.hz == hz and b.phase == phase]

    def _counted(self) -> RateCounts:
        pattern = self._rhythm()
        reference = Sample.of(self._of("back_to_back", None, "baseline"), pattern)
        return RateCounts(pattern, fast_probe(self._blocks), reference if reference.count else None)

    def _summaries(self, counted: RateCounts) -> tuple[RateSummary, ...]:
        made = [summary(self._of("sleep", hz, "baseline"), counted) for hz in self._options.hz]
        return tuple(each for each in made if each is not None)

    def _slowest(self) -> float | None:
        """The rate whose calls take the longest, of those that are slower than back to back."""
        rates = [
            rate_summary
            for rate_summary in self._summaries(self._counted())
            if rate_summary.is_slower
        ]
        return max(rates, key=lambda each: each.calls.p50).hz if rates else None

    def _attributed(self, hz: float) -> Attribution | None:
        counted = self._counted()
        samples: dict[Arm, Sample] = {}
        readings: dict[Arm, list[HostReadings]] = {}
        for arm in ("back_to_back", "sleep", *TRIED):
            blocks = self._of(arm, None if arm == "back_to_back" else hz, "attribution")
            sample = Sample.of(blocks, counted.rhythm)
            if sample.count:
                samples[arm] = sample
            readings[arm] = [block.readings for block in blocks]
        if "sleep" not in samples or "back_to_back" not in samples:
            return None
        evidence = PacedSamples(
            hz,
            samples,
            self._why_not,
            self._host.device.is_there,
            self._kernels,
            readings,
            counted.fast_s,
        )
        return attribute(evidence)

    def result(self, target: str, machine: Mapping[str, str], ended: Ended) -> PaceResult:
        """The result of all blocks that there are."""
        counted = self._counted()
        back = summary(self._of("back_to_back", None, "baseline"), counted)
        rates = self._summaries(counted)
        warnings = [
            words
            for rate in rates
            for words in warnings_of(
                Sample.of(self._of("sleep", rate.hz, "baseline"), counted.rhythm),
                f"{rate.hz:g} Hz",
                self._enough_s(rate, counted.rhythm.period),
            )
        ]
        usual = back.calls.p50 if back is not None else None
        warnings += machine_warnings(self._blocks, self._first_call_s, usual)
        return PaceResult(
            target=target,
            hz=self._options.hz,
            duration_s=self._options.seconds,
            blocks=tuple(self._blocks),
            first_call_s=self._first_call_s,
            period=counted.rhythm.period,
            phase=counted.rhythm.phase,
            probe_fast_s=counted.fast_s,
            back_to_back=back,
            rates=rates,
            attribution=self._attribution,
            advice=advice(self._attribution, machine, rates),
            fix_trial=self._proof.fix_trial if self._proof is not None else None,
            warnings=tuple(warnings),
            notes=tuple(self._notes(rates)),
            ended=ended,
            machine=machine,
            unmeasured=self._unmeasured(rates, counted.rhythm.period, ended),
        )

    def _enough_s(self, row: RateSummary, period: int) -> float:
        """A duration that has calls enough of this rate."""
        if period > 1 and row.hz is not None:
            return enough_s(FEW, row.hz, period)
        return self._options.seconds * FEW / row.calls.count

    def _unmeasured(
        self, rates: Sequence[RateSummary], period: int, ended: Ended
    ) -> tuple[Unmeasured, ...]:
        """Every rate that was asked for and has no row, with the reason."""
        seconds, found = self._options.seconds, []
        for hz in sorted(set(self._options.hz) - {rate.hz for rate in rates}):
            if ended != "finished":
                found.append(
                    Unmeasured(hz, "the measurement ended before one of its calls counted")
                )
            elif not scheduled(hz, period, seconds).blocks:
                found.append(too_short(hz, period, seconds))
            else:  # the period showed only when most blocks had been made
                why = f"none of its counted calls did the work, as every {period}th call does"
                found.append(with_durations(hz, period, why))
        return tuple(found)

    def _notes(self, rates: Sequence[RateSummary]) -> list[str]:
        notes = list(self._proof.notes) if self._proof is not None else []
        late = [rate.hz for rate in rates if (rate.device_s or 0.0) > _ASYNC * rate.calls.p50]
        if late:
            notes.append(
                "calls return before the GPU has finished: only launch time is measured; "
                "end them with .cpu() or torch.cuda.synchronize(), as a robot must"
            )
        slower = [rate for rate in rates if rate.is_slower]
        if len(slower) > 1 and self._attribution is not None:
            notes.append(
                f"the cause was determined at {self._attribution.hz:g} Hz, "
                "where calls are slowest; other slow rates were not analyzed"
            )
        return notes


def fast_probe(blocks: Sequence[CallBlock]) -> float | None:
    """What the fixed loop takes at the highest speed that was seen."""
    took = [*(b.probe_before_s for b in blocks), *(b.probe_after_s for b in blocks)]
    values = np.concatenate([np.zeros(0), *(np.asarray(probe) for probe in took)])
    return float(np.quantile(values, _FAST)) if len(values) else None


def _goes_on(walls: Sequence[float], elapsed_s: float) -> bool:
    """Are more first calls needed, after these?"""
    if len(walls) < _WARM_UP_CALLS:
        return True
    if len(walls) >= _WARM_UP_MOST:
        return False
    if elapsed_s <= _WARM_UP_S:
        return True
    return are_mixed(walls) and elapsed_s < _WARM_UP_S + _WARM_UP_SLOW * max(walls)


def _silent(text: str, share: float) -> None:
    pass


def _unheard(text: str) -> None:
    pass
