"""The whole of it on simulated machines: rates, kinds of calls, fixes, failures, interrupts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_pace import (
    ACT,
    C_STATES,
    CACHES,
    FREQUENCY,
    GPU_CLOCKS,
    HEALTHY,
    HEAVY,
    ON_CPU,
    WAITING,
    measured,
    without,
)
from helpers_paced_machine import (
    MachineTraits,
    SimulatedCallee,
    SimulatedFixer,
    SimulatedMachine,
    SimulatedWork,
)
from helpers_report import on_one_line, screen, whole
from trainfit.pace.attribution import causes
from trainfit.pace.fixes import Proof, with_skipped
from trainfit.pace.host import Kernels
from trainfit.pace.measuring import PaceOptions, measure
from trainfit.pace.ticks import RehearsalCall
from trainfit.report.sections.pace import merged, pace_subject, verdict_line
from trainfit.results.pace import OTHERS, Estimate, PaceResult
from trainfit.results.text import WIDTH

#: A call that leaves time for another before the next tick, cold as it may be.
SHORT = dataclasses.replace(ON_CPU, prepare_s=5e-3)


def test_the_seeds_case() -> None:
    """30 Hz takes 7 to 8 ms more than 60 Hz and than 14.4 ms offline; performance fixes it."""
    found = measured(FREQUENCY, ACT, hz=(30.0, 60.0), fix="governor")
    assert found.back_to_back is not None
    slow, fast = found.rates
    assert found.back_to_back.calls.p50 == pytest.approx(14.4e-3, rel=0.03)
    assert fast.calls.p50 == pytest.approx(found.back_to_back.calls.p50, rel=0.03)
    assert 7e-3 <= slow.calls.p50 - fast.calls.p50 <= 8e-3
    assert slow.is_slower and not fast.is_slower
    assert found.fix_trial is not None and found.fix_trial.is_fixed
    assert found.fix_trial.after.calls.p50 == pytest.approx(14.4e-3, rel=0.03)
    text = whole(pace_subject(found))
    assert text.startswith("At 30 Hz a call needs 7") and "CPU FREQUENCY" in text
    assert "--fix governor fixes it" in on_one_line(text)


def test_columns_never_touch() -> None:
    """Wide intervals are as they come of calls of microseconds."""
    found = measured(FREQUENCY, ACT, hz=(30.0,))
    (rate,), seen = found.rates, found.attribution
    assert seen is not None
    wide = Estimate(114.93, 104.09, 118.26)
    none = Estimate(-0.15, -0.32, -0.0004)
    arms = tuple(
        dataclasses.replace(arm, recovered=none) if arm.recovered is not None else arm
        for arm in seen.arms
    )
    shown = whole(
        pace_subject(
            dataclasses.replace(
                found,
                rates=(dataclasses.replace(rate, ratio=wide),),
                attribution=dataclasses.replace(seen, arms=arms),
            )
        )
    )
    assert " 114.93 (104.09-118.26) " in shown and " -15% (-32% to 0%)" in shown


def test_a_rate_that_cannot_be_reached_is_said_with_what_can() -> None:
    found = measured(HEALTHY, ACT, hz=(30.0, 120.0))
    slow = found.rates[1]
    assert not slow.is_reached and found.rates[0].is_reached
    assert slow.missed_share == 1.0 and slow.consecutive_share == 1.0
    assert whole(pace_subject(found)).startswith("120 Hz cannot be held: a call needs ")


def test_that_a_rate_cannot_be_held_is_the_headline() -> None:
    """Also where the call is as fast as back to back, and does the work once in many calls."""
    slow = SimulatedWork(prepare_s=0.2, launches=10, launch_s=1e-6, gpu_s=5e-3, waits=1)
    found = measured(HEALTHY, slow, hz=(30.0,))
    (line, *_) = screen(pace_subject(found)).splitlines()
    assert line.startswith("30 Hz cannot be held: a call needs 20")
    assert "as fast as" not in whole(pace_subject(found))
    assert pace_subject(found).headline.tone == "bad"
    assert [hz for hz, _ in found.unheld] == [30.0]
    # In every tenth call it has a third of a second, in every third 100 ms.
    assert not dataclasses.replace(found, period=10).unheld
    (often, *_) = screen(pace_subject(dataclasses.replace(found, period=3))).splitlines()
    assert often.startswith("30 Hz cannot be held: one call in 3 needs 20")


def test_late_calls_are_told_from_garbage_collections_within_them() -> None:
    """In every seventh call, as often as a chunked policy works: no period of its own."""
    traits = dataclasses.replace(HEALTHY, collects=(7, 40e-3))
    found = measured(traits, SHORT)
    (rate,) = found.rates
    assert found.period == 1 and rate.misses_collecting == rate.misses > 3
    assert "; garbage collections within them make 100% of these late" in verdict_line(found)
    assert [each.title for each in found.advice] == [
        "garbage collections between ticks, none within a call"
    ]
    busy = dataclasses.replace(found, warnings=(f"{OTHERS} 1.88 cores during the measurement",))
    assert OTHERS not in verdict_line(busy)
    quick = measured(dataclasses.replace(HEALTHY, collects=(7, 1e-4)), SHORT)
    assert not quick.advice and "garbage" not in whole(pace_subject(quick))
    other = dataclasses.replace(rate, misses_collecting=0, collected_share=0.0)
    assert "garbage" not in verdict_line(dataclasses.replace(found, rates=(other,)))


def test_calls_that_are_too_long_back_to_back_as_well_are_not_late_for_the_rate() -> None:
    """A log that is written to the disk in the call."""
    late = measured(dataclasses.replace(HEALTHY, hiccups=0.0), ACT)
    (rate,) = late.rates
    late = dataclasses.replace(late, rates=(dataclasses.replace(rate, missed_share=0.3),))
    assert "the rate is not why" not in verdict_line(late)
    blocks = tuple(
        dataclasses.replace(each, wall_s=tuple(0.05 if n % 4 == 0 else wall
                                               for n, wall in enumerate(each.wall_s)))
        if each.arm == "back_to_back" else each
        for each in late.blocks
    )  # fmt: skip
    text = verdict_line(dataclasses.replace(late, blocks=blocks))
    assert re.search(r"; back to back 2\d% need more than 33.3 ms, too: the rate is not why", text)


def test_a_call_that_collects_garbage_itself_is_told_so() -> None:
    found = measured(dataclasses.replace(HEALTHY, collects=(1, 0.1)), SHORT)
    assert verdict_line(found).startswith("30 Hz cannot be held: a call needs 10")
    assert "ms (95% of it garbage collections of Python), and the next" in verdict_line(found)
    assert found.attribution is None and len(found.advice) == 1


def test_calls_that_end_too_late_are_said_though_most_do_not() -> None:
    """Other programs hold some up; the median, which is compared, tells nothing of these."""
    found = measured(HEALTHY, ACT, hz=(30.0,))
    (rate,) = found.rates
    late = dataclasses.replace(found, rates=(dataclasses.replace(rate, missed_share=0.47),))
    headline = pace_subject(late).headline
    assert headline.text.startswith("At 30 Hz 47% of the calls end after the next one is due")
    assert headline.tone == "warn" and pace_subject(found).headline.tone == "good"
    assert "other processes" not in headline.text
    said = f"{OTHERS} 1.88 cores during the measurement"
    busy = pace_subject(dataclasses.replace(late, warnings=(said,))).headline
    assert f"; {said}." in busy.text


class Chunked(SimulatedCallee):
    """Runs the network in every ``period``-th call, and takes from a queue in the others."""

    def __init__(self, machine: SimulatedMachine, period: int = 5) -> None:
        super().__init__(machine)
        self.machine, self.number, self.period = machine, 0, period

    def __call__(self) -> None:
        if self.number % self.period == 0:
            super().__call__()
        else:
            self.machine.spin_until(self.machine.now() + 30e-6)
        self.number += 1


def chunked(traits: MachineTraits) -> PaceResult:
    machine = SimulatedMachine(traits, ACT)
    return measure(Chunked(machine), machine, PaceOptions((30.0,), 20.0), target="chunked")


def test_calls_that_only_pop_a_queue_are_told_apart() -> None:
    found = chunked(HEALTHY)
    (rate,) = found.rates
    assert found.period == 5
    assert rate.calls.p50 == pytest.approx(14.4e-3, rel=0.05)
    assert rate.pops is not None and rate.pops.p50 < 1e-4
    assert rate.pops.count == pytest.approx(4 * rate.calls.count, rel=0.1)
    text = whole(pace_subject(found))
    assert "every 5th call does the work" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())


def of_chunks(period: int, hz: tuple[float, ...], seconds: float, said: list[str]) -> PaceResult:
    machine = SimulatedMachine(HEALTHY, ACT)
    callee = Chunked(machine, period)
    return measure(callee, machine, PaceOptions(hz, seconds), say=said.append)


def test_each_rate_has_its_row_though_the_work_is_rare() -> None:
    """ACT's chunk of 30 at 30 Hz: a fifth of 4 s has 24 calls, none of which may do the work."""
    said: list[str] = []
    found = of_chunks(30, (30.0, 60.0), 4.0, said)
    assert [rate.hz for rate in found.rates] == [30.0, 60.0] and not found.unmeasured
    assert [rate.calls.count for rate in found.rates] == [3, 5]
    assert found.rates[0].ratio is not None and not found.rates[0].is_slower
    (before,) = said
    assert "every 30th call does the work, every 1 s at this rate; 4 s hold 3 of 5 blocks" in before
    assert "--duration 6.7 all" in before
    text = whole(pace_subject(found))
    assert "\n    30 Hz " in text and "\n    60 Hz " in text
    assert "30 Hz: 3 calls with work: too few for p95; --duration 22 gives about 20" in text
    full: list[str] = []
    longer = of_chunks(30, (30.0,), 6.7, full)
    assert not full and longer.rates[0].calls.count >= 5
    assert of_chunks(30, (30.0,), 22.0, full).rates[0].calls.count >= 20


def test_a_rate_that_the_time_is_too_short_for_is_said_before_and_after() -> None:
    said: list[str] = []
    found = of_chunks(100, (15.0, 60.0), 4.0, said)
    assert [rate.hz for rate in found.rates] == [60.0]
    (missing,) = found.unmeasured
    assert (missing.hz, missing.least_s, missing.wanted_s) == (15.0, 7.1, 36.0)
    assert said[0] == f"15 Hz: {missing.text}"
    text = whole(pace_subject(found))
    asked = "15 Hz was not measured: every 100th call does the work, every 6.67 s"
    assert asked in on_one_line(text)
    assert "--duration 7.1 has one, --duration 36 one in each" in on_one_line(text)
    assert "60 Hz: too few calls to compare" in text
    assert "15 Hz was not measured." in on_one_line(text)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert of_chunks(100, (15.0,), 7.1, []).rates[0].calls.count == 1
    assert PaceResult.from_json(found.to_json(), Path("again")) == found


def test_nothing_that_was_asked_for_can_be_measured() -> None:
    found = of_chunks(100, (15.0,), 1.0, [])
    assert not found.rates and not found.blocks
    assert whole(pace_subject(found)).startswith("Nothing was measured: give --duration 36")


def test_a_period_that_shows_late_leaves_no_rate_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls may be too few to see it: blocks are made longer when it is known."""
    monkeypatch.setattr("trainfit.pace.measuring._WARM_UP_MOST", 5)
    found = of_chunks(30, (30.0, 60.0), 4.0, [])
    assert [rate.hz for rate in found.rates] == [30.0, 60.0]
    found = of_chunks(300, (30.0, 60.0), 4.0, [])
    assert {rate.hz for rate in (*found.rates, *found.unmeasured)} == {30.0, 60.0}


def test_a_chunked_policy_needs_a_rehearsal_of_its_own() -> None:
    """One more call would take an action from the queue, and calls would be counted wrongly."""
    machine = SimulatedMachine(CACHES, SHORT)
    callee = Chunked(machine)
    options = PaceOptions((30.0,), 20.0, fix="rehearse")
    found = measure(callee, machine, options, fixer=SimulatedFixer(machine))
    assert causes(found.attribution) == ("cache_or_contention",)
    assert found.attribution is not None and found.fix_trial is None
    (arm,) = [each for each in found.attribution.arms if each.arm == "rehearse_awake"]
    assert "every 5th call does the work" in arm.why_not and "--rehearse MODULE:FN" in arm.why_not
    assert any(note.startswith("--fix rehearse: every 5th call") for note in found.notes)

    class Rehearsed(Chunked):
        has_rehearsal = True

    machine = SimulatedMachine(CACHES, SHORT)
    found = measure(Rehearsed(machine), machine, options, fixer=SimulatedFixer(machine))
    assert causes(found.attribution) == ("cold_caches",)
    assert found.fix_trial is not None and found.fix_trial.is_fixed
    assert "of a core's time" in found.fix_trial.cost


def test_a_rehearsal_that_does_not_fit_is_left_out_and_that_is_said() -> None:
    """18 ms for a cold call, twice, of 33."""
    found = measured(CACHES, ON_CPU, fix="rehearse")
    assert found.fix_trial is not None and not found.fix_trial.is_fixed
    # What has just been tried in vain is not advised.
    tried = f"--fix {found.fix_trial.fix}"
    assert not any(tried in each.text for each in pace_subject(found).headline.commands)
    assert any("of the ticks had no rehearsal call" in note for note in found.notes)


def test_rehearsals_that_were_left_out_are_said() -> None:
    proof = Proof(None, ("a note",))
    made = RehearsalCall(lambda: None, lambda: 0.0)
    made.made, made.skipped = 60, 40
    first, last = with_skipped(proof, [made]).notes
    assert first == "a note" and last.startswith("40% of the ticks had no rehearsal call")
    made.skipped = 1
    assert with_skipped(proof, [made]) == proof == with_skipped(proof, [])


def test_a_rehearsal_that_raises_is_the_failure() -> None:
    class Broken(SimulatedCallee):
        def rehearse(self) -> None:
            raise RuntimeError("a command to the robot")

    machine = SimulatedMachine(CACHES, ON_CPU)
    found = measure(Broken(machine), machine, PaceOptions((30.0,), 6.0))
    assert found.ended == "failed" and found.failure is not None
    assert found.failure.message == "a command to the robot" and found.rates[0].is_slower


def test_slow_calls_by_chance_are_no_kind() -> None:
    found = measured(MachineTraits(hiccups=0.2), HEAVY)
    assert found.period == 1


@pytest.mark.parametrize(
    ("traits", "work", "fix"),
    [(FREQUENCY, ACT, "spin"), (C_STATES, WAITING, "qos"), (CACHES, SHORT, "rehearse")],
)
def test_fixes_are_proved(traits: MachineTraits, work: object, fix: str) -> None:
    found = measured(traits, work, fix=fix)  # type: ignore[arg-type]
    assert found.fix_trial is not None and found.fix_trial.is_fixed
    assert found.fix_trial.change.high < 1 and found.fix_trial.recovered.value > 0.7
    assert found.fix_trial.before.is_slower and found.fix_trial.cost and found.fix_trial.undo


def test_a_fix_of_something_else_does_not_help_and_is_undone() -> None:
    machine = SimulatedMachine(GPU_CLOCKS, HEAVY)
    options = PaceOptions((30.0,), 6.0, fix="governor")
    found = measure(SimulatedCallee(machine), machine, options, fixer=SimulatedFixer(machine))
    assert found.fix_trial is not None and not found.fix_trial.is_fixed
    assert any("did not help" in note for note in found.notes)
    assert machine.traits == GPU_CLOCKS


def test_nothing_to_fix() -> None:
    found = measured(HEALTHY, ACT, fix="spin")
    assert found.fix_trial is not None and not found.fix_trial.is_fixed
    assert any("nothing to fix" in note for note in found.notes)


def test_a_fix_that_is_not_allowed_says_why_and_loses_nothing() -> None:
    found = measured(without(C_STATES, can_hold=False), WAITING, fix="qos")
    assert found.fix_trial is None and found.attribution is not None
    assert "--fix qos: /dev/cpu_dma_latency cannot be written by this user" in found.notes


def test_paced_calls_that_are_as_fast_when_looked_into_have_no_cause() -> None:
    """Something slowed the base measurement, and was over then."""

    class Passing(SimulatedCallee):
        def __init__(self, machine: SimulatedMachine) -> None:
            super().__init__(machine)
            self.machine, self.last = machine, 0.0

        def __call__(self) -> None:
            now = self.machine.now()
            if now - self.last > 5e-3 and now < 10.2:
                self.machine.spin_until(now + 4e-3)
            super().__call__()
            self.last = self.machine.now()

    machine = SimulatedMachine(HEALTHY, ACT)
    found = measure(Passing(machine), machine, PaceOptions((30.0,), 6.0))
    assert found.rates[0].is_slower and found.attribution is not None
    assert found.attribution.findings == ()
    assert found.attribution.cannot_tell
    assert PaceResult.from_json(found.to_json(), Path("again")) == found


class Failing(SimulatedCallee):
    def __init__(self, machine: SimulatedMachine, at: int, error: BaseException) -> None:
        super().__init__(machine)
        self.left, self.error = at, error

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.error
        super().__call__()


def failing(at: int, error: BaseException) -> PaceResult:
    machine = SimulatedMachine(HEALTHY, ACT)
    return measure(
        Failing(machine, at, error), machine, PaceOptions((30.0,), 6.0), target="failing"
    )


def test_a_call_that_raises_keeps_what_was_measured() -> None:
    found = failing(100, RuntimeError("the arm is gone\x1b[31m"))
    assert found.ended == "failed" and found.failure is not None
    assert found.failure.call == 100 and found.failure.error_type == "RuntimeError"
    assert "the arm is gone" in found.failure.traceback
    first = found.blocks[0].first_call
    assert first + sum(len(block.wall_s) for block in found.blocks) == 99
    assert all(len(block.due_s) == len(block.wall_s) for block in found.blocks)
    text = whole(pace_subject(found))
    assert "Call 100 raised RuntimeError" in text and "\x1b" not in text
    assert "below are the results so far" in " ".join(text.split())


def test_a_call_that_exits_is_one_that_failed() -> None:
    found = failing(3, SystemExit(4))
    assert found.ended == "failed" and found.failure is not None
    assert (found.failure.error_type, found.failure.message) == ("SystemExit", "4")


@pytest.mark.parametrize("at", [1, 3])
def test_a_call_that_raises_at_once(at: int) -> None:
    found = failing(at, ValueError("no weights"))
    assert found.ended == "failed" and found.failure is not None and found.failure.call == at
    assert found.rates == () and found.back_to_back is None
    text = whole(pace_subject(found))
    assert text.startswith(f"The call failed: call {at} raised ValueError: no weights")
    assert "results so far" not in text and "was not measured" not in text


@pytest.mark.parametrize("at", [1, 30, 100, 300])
def test_an_interrupt_keeps_what_was_measured(at: int) -> None:
    found = failing(at, KeyboardInterrupt())
    assert found.ended == "interrupted" and found.failure is None
    noted = sum(len(block.wall_s) for block in found.blocks)
    assert noted == 0 or noted + found.blocks[0].first_call == at - 1
    assert "Interrupted" in whole(pace_subject(found))


def test_an_interrupt_while_calls_are_profiled_leaves_no_baseline() -> None:
    """The profiler makes calls slower: the block is kept, and counts for nothing."""
    machine = SimulatedMachine(FREQUENCY, ACT)
    callee = Failing(machine, 10**9, KeyboardInterrupt())

    @contextlib.contextmanager
    def profiled() -> Iterator[Kernels]:
        callee.left = 3
        yield Kernels()

    machine.device.profiled = profiled  # type: ignore[method-assign]
    found = measure(callee, machine, PaceOptions((30.0,), 6.0), target="profiled")
    assert found.ended == "interrupted"
    assert [block.phase for block in found.blocks].count("profile") == 1
    assert found.blocks[-1].phase == "profile" and len(found.blocks[-1].wall_s) == 2
    assert found.rates[0].calls.count == sum(
        len(block.wall_s) - block.settled
        for block in found.blocks
        if (block.arm, block.phase) == ("sleep", "baseline")
    )


def test_the_file_holds_all_of_it(tmp_path: Path) -> None:
    found = measured(C_STATES, WAITING, fix="qos")
    path = tmp_path / "pace.json"
    found.save(path)
    again = PaceResult.load(path)
    assert again == found
    assert whole(pace_subject(again)) == whole(pace_subject(found))


def test_deadlines_do_not_drift() -> None:
    found = measured(HEALTHY, ACT, hz=(40.0,))
    block = next(each for each in found.blocks if each.hz == 40.0)
    steps = [(b - a) * 40 for a, b in zip(block.due_s, block.due_s[1:], strict=False)]
    assert all(math.isclose(step, round(step), abs_tol=1e-6) and round(step) for step in steps)


@pytest.mark.parametrize("traits", [FREQUENCY, C_STATES, HEALTHY])
def test_the_screen_has_the_answer_the_arms_and_the_fix(traits: MachineTraits) -> None:
    found = measured(traits, ACT, hz=(15.0, 30.0, 60.0))
    doubts = [f"{hz} Hz: calls vary (half of them within 1 ms to 2 ms)" for hz in (15, 30, 60)]
    doubts += [f"{hz} Hz: 3 calls with work: too few for p95; --duration {hz} gives about 20"
               for hz in (15, 30)]  # fmt: skip
    doubts += ["other processes used 1.3 cores during the measurement"]
    found = dataclasses.replace(found, warnings=tuple(doubts))
    text = screen(pace_subject(found))
    assert len(text.splitlines()) <= 25, text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert text.startswith(whole(pace_subject(found)).partition("\n")[0])
    assert "Distribution" not in text and "--explain" in text.splitlines()[-1]
    assert "other processes used" in text
    if found.attribution is not None and found.attribution.findings:
        assert "Recovers" in text and "What helps" in text


def test_warnings_of_one_kind_are_one() -> None:
    assert merged(
        (
            "15 Hz: 3 calls with work: too few for p95; --duration 22 gives about 20",
            "30 Hz: 4 calls with work: too few for p95; --duration 12 gives about 20",
            "30 Hz: calls vary (half of them within 1 ms to 2 ms)",
            "the GPU throttled for heat or power during the measurement",
        )
    ) == [
        "the GPU throttled for heat or power during the measurement",
        "30 Hz: calls vary (half of them within 1 ms to 2 ms)",
        "15 Hz, 30 Hz: too few calls with work for p95; --duration 22 is enough for all",
    ]


def test_an_interval_that_says_nothing_is_not_a_figure() -> None:
    found = measured(HEALTHY, ACT, hz=(30.0,))
    wild = dataclasses.replace(found.rates[0], ratio=Estimate(0.9, 0.01, 208.74))
    text = whole(pace_subject(dataclasses.replace(found, rates=(wild,))))
    assert text.startswith("Cannot tell whether calls are slower: they vary from ")
    assert "idle machine" in text and "208" not in text and "20774%" not in text
    assert re.search(r"\n    30 Hz .*cannot tell", text)
