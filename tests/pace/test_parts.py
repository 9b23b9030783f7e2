"""Kinds of calls, percentiles, intervals, misses, doubts, the pacer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.pace.loop import (
    ROUNDS,
    RateSchedule,
    needed_s,
    said_before,
    scheduled,
    settling_s,
    too_short,
)
from trainfit.pace.statistics import (
    CallPattern,
    RateCounts,
    Sample,
    estimate,
    is_slower,
    machine_warnings,
    ratio,
    rhythm,
    spread,
    summary,
    warnings_of,
)
from trainfit.pace.ticks import Pacer
from trainfit.results.pace import CallBlock, Estimate, HostReadings


def block(
    walls: list[float],
    *,
    hz: float | None = 30.0,
    first: int = 0,
    late: float = 0.0,
    readings: HostReadings | None = None,
) -> CallBlock:
    due = np.arange(len(walls)) / (hz or 30.0)
    return CallBlock(
        "sleep" if hz else "back_to_back",
        hz,
        "baseline",
        first,
        tuple(due),
        tuple(due + late),
        tuple(walls),
        tuple(walls),
        readings=readings or HostReadings(),
    )


# --- Kinds --------------------------------------------------------------------------------------
@settings(max_examples=30)
@given(period=st.integers(2, 40), phase=st.integers(0, 39), first=st.integers(0, 100))
def test_a_period_is_found_wherever_the_count_begins(period: int, phase: int, first: int) -> None:
    chance = np.random.default_rng(period)
    numbers = first + np.arange(6 * period)
    work = numbers % period == phase % period
    walls = np.where(work, 0.02, 5e-5) * np.exp(0.2 * chance.standard_normal(len(numbers)))
    split = len(numbers) // 2
    blocks = [
        block(list(walls[:split]), first=first),
        block(list(walls[split:]), first=first + split),
    ]
    assert rhythm(blocks) == CallPattern(period, phase % period)
    assert list(CallPattern(period, phase % period).of(blocks[1])) == list(work[split:])


def test_calls_that_were_not_noted_leave_a_hole() -> None:
    walls = [0.02 if n % 5 == 0 else 5e-5 for n in range(60)]
    assert rhythm([block(walls[:20]), block(walls[33:], first=33)]) == CallPattern(5, 0)


@pytest.mark.parametrize(
    "walls",
    [
        [],
        [0.02] * 50,
        [0.02] * 40 + [0.3, 0.02, 0.3, 0.02, 0.02, 0.02, 0.3],
        [0.01, 0.02] * 20,
        [0.02, 5e-5],
    ],
)
def test_calls_of_one_kind(walls: list[float]) -> None:
    assert rhythm([block(walls)] if walls else []) == CallPattern()


def test_garbage_collections_are_no_period() -> None:
    """They come with every so many new objects: as often as the network of a chunked policy."""
    walls = ([0.002] * 4 + [0.04]) * 6
    assert rhythm([block(walls)]) == CallPattern(5, 4)
    collected = tuple(0.038 if wall > 0.01 else 0.0 for wall in walls)
    assert rhythm([dataclasses.replace(block(walls), collected_s=collected)]) == CallPattern()


# --- Statistics ---------------------------------------------------------------------------------
def sample(*parts: np.ndarray) -> Sample:
    return Sample(tuple(parts), tuple(parts), (), ())


def test_a_ratio_has_an_interval_that_holds_the_truth() -> None:
    chance = np.random.default_rng(3)
    held = 0
    for _ in range(40):
        paced = [0.012 * np.exp(0.1 * chance.standard_normal(30)) for _ in range(5)]
        other = [0.010 * np.exp(0.1 * chance.standard_normal(30)) for _ in range(5)]
        found = ratio(paced, other)
        assert found is not None
        held += found.low <= 1.2 <= found.high
        assert found.low <= found.value <= found.high
    assert held >= 34


def test_blocks_that_differ_widen_the_interval() -> None:
    same = [np.full(30, 0.01)] * 5
    moody = [np.full(30, 0.01 * mood) for mood in (0.8, 1.0, 1.3, 0.9, 1.2)]
    steady, wide = ratio(same, same), ratio(moody, same)
    assert steady is not None and wide is not None
    assert steady.low == steady.high == 1.0
    assert wide.high - wide.low > 0.2


def test_what_is_no_number_has_no_interval() -> None:
    assert estimate(lambda m: float("nan"), [[np.ones(3)]]) is None
    assert ratio([np.ones(3)], [np.zeros(3)]) is None


@pytest.mark.parametrize(
    ("found", "other_s", "slower"),
    [
        (Estimate(1.2, 1.1, 1.3), 0.01, True),
        (Estimate(1.2, 0.9, 1.5), 0.01, False),
        (Estimate(1.03, 1.02, 1.04), 0.01, False),
        (Estimate(1.5, 1.4, 1.6), 50e-6, False),  # 25 µs more are nothing
    ],
)
def test_slower_is_a_share_a_time_and_no_chance(
    found: Estimate, other_s: float, slower: bool
) -> None:
    assert is_slower(found, other_s) is slower


def test_misses_and_what_follows_them() -> None:
    walls = [0.01, 0.05, 0.05, 0.01, 0.05, 0.01, 0.01, 0.01]
    found = summary([block(walls, late=1e-4)], RateCounts(CallPattern(), None))
    assert found is not None
    assert found.misses == 3 and found.missed_share == pytest.approx(3 / 8)
    assert found.consecutive_share == pytest.approx(1 / 3)
    assert found.overrun is not None and found.overrun.count == 3
    assert found.overrun.most == pytest.approx(0.05 + 1e-4 - 1 / 30)
    assert found.late is not None and found.late.p50 == pytest.approx(1e-4)
    assert found.reached_hz == pytest.approx(30)


def test_no_calls_no_summary() -> None:
    assert summary([block([])], RateCounts(CallPattern(), None)) is None
    with pytest.raises(ValueError, match="empty list"):
        spread(np.zeros(0))


# --- Doubts -------------------------------------------------------------------------------------
def test_doubts_are_said() -> None:
    even = np.full(30, 0.01) + np.linspace(0, 1e-5, 30)
    assert warnings_of(sample(even), "30 Hz") == []
    (few,) = warnings_of(sample(even[:5]), "30 Hz", 39.5)
    assert few == "30 Hz: 5 calls with work: too few for p95; --duration 40 gives about 20"
    assert warnings_of(sample(even[:1]), "30 Hz")[0].endswith("too few for p95; 20 are needed")
    odd = even.copy()
    odd[7] = 0.2
    assert "calls are outliers (up to 200 ms)" in warnings_of(sample(odd), "30 Hz")[0]
    collected = np.zeros(30)
    collected[7] = 0.19
    (said,) = warnings_of(dataclasses.replace(sample(odd), collected=(collected,)), "30 Hz")
    assert said.endswith("; garbage collections within them make 1 of these")
    odd[9] = 0.2
    (said,) = warnings_of(dataclasses.replace(sample(odd), collected=(collected,)), "30 Hz")
    assert said.endswith("make 1 of these, other work ran at the same time")
    wide = np.linspace(0.01, 0.03, 60)
    said = " ".join(warnings_of(sample(wide), "30 Hz"))
    assert "calls vary" in said and "slower during the measurement" in said
    assert warnings_of(sample(), "30 Hz") == []


def test_doubts_about_the_machine_are_said() -> None:
    seen = HostReadings(throttled=3, others_cores=1.4, gpu_slowed=True)
    said = " ".join(machine_warnings([block([0.01], readings=seen)], 4.0, 0.01))
    for words in (
        "first call took 4 s",
        "used 1.4 cores",
        "throttled 3 times",
        "the GPU throttled",
    ):
        assert words in said
    assert machine_warnings([block([0.01])], 0.012, 0.01) == []


# --- The pacer ----------------------------------------------------------------------------------
class Clock:
    """Time passes in sleep, and a little in each look."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 3e-4  # a timer is late
        self.slept += seconds


def test_a_pacer_keeps_its_ticks_and_works_at_last() -> None:
    clock = Clock()
    pacer = Pacer(50, 2e-3, clock=clock, sleep=clock.sleep)
    ticks = []
    for _ in range(20):
        assert pacer.wait() == 0.0
        ticks.append(clock.now)
    assert np.diff(ticks) == pytest.approx(0.02, abs=5e-5)
    assert clock.slept == pytest.approx(20 * (0.02 - 2e-3), rel=0.02)


def test_a_tick_that_was_missed_is_met_at_once_and_those_before_are_left_out() -> None:
    clock = Clock()
    pacer = Pacer(50, clock=clock, sleep=clock.sleep)
    pacer.wait()
    clock.now += 0.075  # three ticks pass
    late = pacer.wait()
    assert late == pytest.approx(0.055, abs=1e-3)
    before = clock.now
    assert pacer.wait() == 0.0
    assert clock.now - before == pytest.approx(0.005, abs=1e-3)


@pytest.mark.parametrize(("hz", "spin_s"), [(0, 0.0), (-1, 0.0), (float("inf"), 0.0), (30, -1)])
def test_impossible_rates(hz: float, spin_s: float) -> None:
    with pytest.raises(ValueError, match="rate above 0"):
        Pacer(hz, spin_s)


# --- Blocks of each rate ------------------------------------------------------------------------
@given(
    hz=st.floats(1, 500),
    period=st.integers(2, 300),
    seconds=st.floats(0.1, 100),
)
def test_each_block_has_a_call_with_work_that_counts(
    hz: float, period: int, seconds: float
) -> None:
    plan = scheduled(hz, period, seconds)
    assert 0 <= plan.blocks <= ROUNDS
    assert (plan.blocks > 0) == (needed_s(hz, period) <= seconds * (1 + 1e-6))
    # Calls are due a period after the block's begin, and every period from there on.
    calls = max(plan.least, math.ceil(plan.seconds * hz) - 1)
    settled = min(math.ceil(settling_s(plan.seconds) * hz), calls // 2)
    if plan.blocks:
        assert calls - settled >= period
        assert plan.blocks * calls / hz <= seconds + 3 * plan.blocks / hz
    assert bool(said_before([hz], period, seconds)) == (plan.blocks < ROUNDS)


@given(hz=st.floats(1, 500), period=st.integers(2, 300), seconds=st.floats(0.01, 10))
def test_the_duration_that_is_named_is_long_enough(hz: float, period: int, seconds: float) -> None:
    missing = too_short(hz, period, seconds)
    assert missing.least_s is not None and missing.wanted_s is not None
    assert scheduled(hz, period, missing.least_s).blocks >= 1
    assert scheduled(hz, period, missing.wanted_s).blocks == ROUNDS


def test_calls_that_all_do_the_work_need_no_longer_blocks() -> None:
    assert scheduled(30.0, 1, 4.0) == RateSchedule(30.0, ROUNDS, 0.8)
    assert said_before([30.0], 1, 0.1) == []
