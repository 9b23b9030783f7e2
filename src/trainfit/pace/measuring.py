"""The whole of it: calls back to back and at each rate, interleaved; why, where paced ones are
slower; a cure, and the proof of it.

A machine's speed drifts within seconds, so that every arm comes in several blocks, between blocks
of what it is compared with (A/B/A).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np

from trainfit.pace.advising import advice
from trainfit.pace.attribution import TRIED, Evidence, attribute
from trainfit.pace.callee import Callee
from trainfit.pace.cures import Fixer
from trainfit.pace.device import Kernels
from trainfit.pace.host import Host
from trainfit.pace.kinds import rhythm
from trainfit.pace.loop import OF_THE_GPU, Caller, CallError, Plan
from trainfit.pace.proving import Proof, prove
from trainfit.pace.statistics import Counted, Sample, summary
from trainfit.pace.trust import machine_warnings, warnings_of
from trainfit.results.errors import TrainfitError
from trainfit.results.pace import (
    Arm,
    Attribution,
    Block,
    CallFailure,
    Fix,
    PaceResult,
    Phase,
    RateSummary,
    Readings,
)

#: Blocks of each arm, of the base measurement and of the attribution.
ROUNDS: Final = 5
_ATTRIBUTION_ROUNDS: Final = 4
#: Of a paced block's seconds, those of one back to back, and the least calls of it.
_BACK_TO_BACK: Final = 0.5
_LEAST_BACK_TO_BACK: Final = 10
#: Calls of a paced block in an attribution, at least.
_LEAST_CALLS: Final = 12
#: Calls before anything counts, at least, and seconds for more of them at most.
_WARM_UP_CALLS, _WARM_UP_S = 3, 1.0
#: Calls whose kernels are looked at.
_PROFILED: Final = 6
#: Time on the GPU over that of a call, above which the call did not wait for it.
_ASYNC: Final = 1.1
#: Of all probes, the share that is at least as fast as the full speed is taken to be.
_FAST: Final = 0.02

Progress = Callable[[str, float], None]
"""What is done now, and which share of everything is done."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure: calls a second, seconds for each rate, and a cure to prove."""

    hz: tuple[float, ...] = (15.0, 30.0, 60.0)
    seconds: float = 10.0
    attributes: bool = True
    fix: Fix | None = None


def measure(
    callee: Callee,
    host: Host,
    options: Options,
    *,
    target: str = "",
    fixer: Fixer | None = None,
    progress: Progress | None = None,
    machine: Mapping[str, str] | None = None,
) -> PaceResult:
    """Measure, and say what it means. What a call raises ends it, as Ctrl-C does: the result has
    what there is by then (``ended``)."""
    session = Session(callee, host, options, fixer or Fixer(), progress or _silent)
    failure: CallFailure | None = None
    ended: Literal["finished", "failed", "interrupted"] = "finished"
    try:
        session.run()
    except CallError as error:
        failure, ended = error.failure, "failed"
    except KeyboardInterrupt:
        ended = "interrupted"
    if ended != "finished":
        session.keep_unfinished()
    made = session.result(target, machine or {})
    return dataclasses.replace(made, ended=ended, failure=failure)


class Session:
    """One measurement while it is made."""

    def __init__(
        self, callee: Callee, host: Host, options: Options, fixer: Fixer, progress: Progress
    ) -> None:
        self._host, self._options, self._fixer = host, options, fixer
        self._progress = progress
        self._caller = Caller(callee, host)
        self._blocks: list[Block] = []
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
    def run(self) -> None:
        """All of it; raises :class:`CallError` where a call raises."""
        self._warm_up()
        self._baseline()
        slow = self._slowest()
        if slow is not None and self._options.attributes:
            self._attribute(slow)
        if self._options.fix is not None:
            hz = slow if slow is not None else min(self._options.hz)
            self._prove(self._options.fix, hz)

    def _prove(self, fix: Fix, hz: float) -> None:
        """What does not let itself be changed is said; what was measured stays."""
        self._progress(f"--fix {fix}, before and after", 0.9)
        counted, seconds = self._counted(), self._block_s(hz)
        try:
            self._proof = prove(fix, hz, seconds, self._fixer, self._block, counted)
        except TrainfitError as error:
            self._proof = Proof(None, (str(error),))

    def _warm_up(self) -> None:
        self._progress("first calls", 0.0)
        self._first_call_s = self._caller.once()
        self._host.look_for_device()
        begin = self._host.now()
        for number in range(_WARM_UP_CALLS * 20):
            if number >= _WARM_UP_CALLS and self._host.now() - begin > _WARM_UP_S:
                break
            self._caller.once()

    def _baseline(self) -> None:
        rates = list(self._options.hz)
        text = f"back to back and at {', '.join(f'{hz:g}' for hz in rates)} Hz, in turns"
        for number in range(ROUNDS):
            self._progress(text, 0.05 + 0.4 * number / ROUNDS)
            for hz in rates if number % 2 == 0 else rates[::-1]:
                self._block(self._back_to_back(self._options.seconds / ROUNDS, "baseline"))
                self._block(Plan("sleep", hz, self._options.seconds / ROUNDS))

    def _back_to_back(self, seconds: float, phase: Phase) -> Plan:
        return Plan("back_to_back", None, _BACK_TO_BACK * seconds, phase, _LEAST_BACK_TO_BACK)

    def _block_s(self, hz: float) -> float:
        return max(self._options.seconds / ROUNDS, _LEAST_CALLS / hz)

    def _attribute(self, hz: float) -> None:
        arms = [arm for arm in TRIED if self._can(arm)]
        seconds = self._block_s(hz)
        for number in range(_ATTRIBUTION_ROUNDS):
            share = 0.45 + 0.4 * number / _ATTRIBUTION_ROUNDS
            self._progress(f"why {hz:g} Hz is slower", share)
            self._block(self._back_to_back(seconds, "attribution"))
            for arm in arms:
                self._block(Plan("sleep", hz, seconds, "attribution"))
                self._block(Plan(arm, hz, seconds, "attribution"))
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
        if why and arm not in OF_THE_GPU[1:]:  # said once
            self._why_not[arm] = why
        return not why

    def _profile(self, hz: float) -> None:
        """Kernels of paced calls and of those back to back; these blocks do not count."""
        if not self._host.device.is_there:
            return
        found = rhythm(self._blocks)
        count = _PROFILED * found.period
        for plan in (
            Plan("sleep", hz, 0.0, "profile", least=count),
            Plan("back_to_back", None, 0.0, "profile", least=count),
        ):
            with self._host.device.profiled() as kernels:
                first = self._caller.calls
                self._caller.block(plan)
            numbers = np.arange(first, self._caller.calls)
            self._kernels[plan.arm] = kernels.of_one(int(found.has(numbers).sum()))

    def _block(self, plan: Plan) -> Block:
        made = self._caller.block(plan)
        self._blocks.append(made)
        return made

    # --- What it amounts to ---------------------------------------------------------------------
    def _of(self, arm: Arm, hz: float | None, phase: Phase) -> list[Block]:
        return [b for b in self._blocks if b.arm == arm and b.hz == hz and b.phase == phase]

    def _counted(self) -> Counted:
        found = rhythm(self._blocks)
        reference = Sample.of(self._of("back_to_back", None, "baseline"), found)
        return Counted(found, fast_probe(self._blocks), reference if reference.count else None)

    def _summaries(self, counted: Counted) -> tuple[RateSummary, ...]:
        made = [summary(self._of("sleep", hz, "baseline"), counted) for hz in self._options.hz]
        return tuple(each for each in made if each is not None)

    def _slowest(self) -> float | None:
        """The rate whose calls take the longest, of those that are slower than back to back."""
        rates = [each for each in self._summaries(self._counted()) if each.is_slower]
        return max(rates, key=lambda each: each.calls.p50).hz if rates else None

    def _attributed(self, hz: float) -> Attribution | None:
        counted = self._counted()
        samples: dict[Arm, Sample] = {}
        readings: dict[Arm, list[Readings]] = {}
        for arm in ("back_to_back", "sleep", *TRIED):
            blocks = self._of(arm, None if arm == "back_to_back" else hz, "attribution")
            sample = Sample.of(blocks, counted.rhythm)
            if sample.count:
                samples[arm] = sample
            readings[arm] = [block.readings for block in blocks]
        if "sleep" not in samples or "back_to_back" not in samples:
            return None
        evidence = Evidence(
            hz,
            samples,
            self._why_not,
            self._host.device.is_there,
            self._kernels,
            readings,
            counted.fast_s,
        )
        return attribute(evidence)

    def result(self, target: str, machine: Mapping[str, str]) -> PaceResult:
        """Of all blocks that there are."""
        counted = self._counted()
        back = summary(self._of("back_to_back", None, "baseline"), counted)
        rates = self._summaries(counted)
        said = [
            words
            for each in rates
            for words in warnings_of(
                Sample.of(self._of("sleep", each.hz, "baseline"), counted.rhythm),
                f"{each.hz:g} Hz",
            )
        ]
        usual = back.calls.p50 if back is not None else None
        said += machine_warnings(self._blocks, self._first_call_s, usual)
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
            advice=advice(self._attribution, machine),
            cure=self._proof.cure if self._proof is not None else None,
            warnings=tuple(said),
            notes=tuple(self._notes(rates)),
            ended="finished",
            machine=machine,
        )

    def _notes(self, rates: Sequence[RateSummary]) -> list[str]:
        said = list(self._proof.notes) if self._proof is not None else []
        late = [each.hz for each in rates if (each.device_s or 0.0) > _ASYNC * each.calls.p50]
        if late:
            said.append(
                "calls return before the GPU is done: their times are of launching; end them with "
                ".cpu() or torch.cuda.synchronize(), as a robot has to"
            )
        slower = [each for each in rates if each.is_slower]
        if len(slower) > 1 and self._attribution is not None:
            said.append(
                f"the cause was looked for at {self._attribution.hz:g} Hz, where calls take the "
                "longest; other rates that are slower, too, were not looked into"
            )
        return said


def fast_probe(blocks: Sequence[Block]) -> float | None:
    """What the fixed loop takes at the highest speed that was seen."""
    took = [*(b.probe_before_s for b in blocks), *(b.probe_after_s for b in blocks)]
    values = np.concatenate([np.zeros(0), *(np.asarray(each) for each in took)])
    return float(np.quantile(values, _FAST)) if len(values) else None


def _silent(text: str, share: float) -> None:
    pass
