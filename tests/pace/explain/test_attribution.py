"""Which cause is found on machines that have it, alone, in pairs, and with arms missing."""

from __future__ import annotations

import dataclasses

import pytest

from helpers_cases import some_of
from helpers_pace import (
    ACT,
    C_STATES,
    CACHES,
    FREQUENCY,
    GPU_CLOCKS,
    HEALTHY,
    HEAVY,
    LAUNCHES,
    ON_CPU,
    PAIRS,
    SINGLE,
    SOUND,
    WAITING,
    measured,
    without,
)
from helpers_paced_machine import MachineTraits, SimulatedWork
from helpers_report import whole
from trainfit.pace.attribution import PacedSamples, attribute, causes
from trainfit.pace.fixes import advice
from trainfit.pace.host import UNNAMED, Kernels
from trainfit.pace.statistics import Sample
from trainfit.report.sections.pace import pace_subject, verdict_line
from trainfit.results.pace import Arm, HostReadings

SEEDS = some_of(range(3), 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "traits", "work", "found"), SINGLE)
def test_each_cause_alone_is_found(
    name: str, traits: MachineTraits, work: SimulatedWork, found: frozenset[str], seed: int
) -> None:
    result = measured(traits, work, seed)
    assert result.rates[0].is_slower
    assert causes(result.attribution) == tuple(found)
    assert result.attribution is not None
    (finding,) = result.attribution.findings
    assert finding.evidence and finding.share.value > 0.5
    assert not result.attribution.cannot_tell


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("work", [work for _, _, work, _ in SOUND])
def test_a_healthy_machine_has_no_cause(work: SimulatedWork, seed: int) -> None:
    found = measured(HEALTHY, work, seed, hz=(15.0, 30.0, 60.0))
    assert not any(rate.is_slower for rate in found.rates)
    assert found.attribution is None and found.advice == ()


@pytest.mark.parametrize(("name", "traits", "work", "pair"), some_of(PAIRS, 5))
def test_two_causes_are_both_found(
    name: str, traits: MachineTraits, work: SimulatedWork, pair: frozenset[str]
) -> None:
    found = measured(traits, work)
    assert set(causes(found.attribution)) == pair


@pytest.mark.parametrize(
    ("traits", "work", "cause"),
    [(FREQUENCY, ACT, "cpu_frequency"), (C_STATES, WAITING, "c_states")],
)
def test_without_the_right_to_hold_idle_states_the_cpus_own_time_tells(
    traits: MachineTraits, work: SimulatedWork, cause: str
) -> None:
    found = measured(without(traits, can_hold=False), work)
    assert causes(found.attribution) == (cause,)
    assert found.attribution is not None
    (effect,) = [each for each in found.attribution.arms if each.arm == "no_idle_states"]
    assert effect.wall_s is None and "cpu_dma_latency" in effect.why_not


def test_where_the_gpu_cannot_be_kept_awake_it_cannot_be_told() -> None:
    blind = without(LAUNCHES, can_wake=False)
    found = measured(blind, ACT).attribution
    assert found is not None and not found.findings
    assert "the GPU could not be kept awake" in found.cannot_tell
    assert any("GPU" in each for each in found.would_tell)


def test_a_gpu_that_cannot_be_kept_awake_shows_by_its_clock_and_its_kernels() -> None:
    assert causes(measured(without(GPU_CLOCKS, can_wake=False), HEAVY).attribution) == (
        "gpu_clocks",
    )


# --- Rules on evidence made by hand -------------------------------------------------------------
def evidence(
    walls: dict[Arm, float],
    *,
    cpu: tuple[float, float] = (10.0, 10.0),
    before: tuple[float, float] = (10.0, 10.0),
    why_not: dict[Arm, str] | None = None,
    gpu: tuple[float, float] | None = None,
    threads: dict[str, float] | None = None,
    others: float = 0.0,
    varies: float = 0.02,
) -> PacedSamples:
    """Medians in ms; CPU times, probes and kernels' times are (paced, back to back)."""
    import numpy as np

    def sample(arm: Arm) -> Sample:
        paced = arm != "back_to_back"

        def times(value: float) -> tuple[np.ndarray, ...]:
            return tuple(value * 1e-3 * np.linspace(1 - varies, 1 + varies, 21) for _ in range(4))

        pick = 0 if paced else 1
        return Sample(times(walls[arm]), times(cpu[pick]), (), times(before[pick]))

    kernels: dict[Arm, Kernels] = {}
    if gpu is not None:
        kernels = {
            "sleep": Kernels(100, gpu[0] * 1e-3),
            "back_to_back": Kernels(100, gpu[1] * 1e-3),
        }
    return PacedSamples(
        30.0,
        {arm: sample(arm) for arm in walls},
        why_not or {},
        has_gpu=gpu is not None,
        kernels=kernels,
        readings={"sleep": [HostReadings(threads_cores=threads or {}, others_cores=others)] * 2},
        fast_s=before[1] * 1e-3,
    )


def test_a_slow_core_without_slow_work_is_neither_clock_nor_idle_state_for_sure() -> None:
    """Half of the excess is CPU time, but the fixed loop is not slower: both are possible."""
    found = attribute(
        evidence({"sleep": 20, "back_to_back": 10, "spin": 10}, cpu=(14.0, 10.0),
                 why_not={"no_idle_states": "no right"})
    )  # fmt: skip
    assert not found.findings
    assert "could not be determined" in found.cannot_tell
    assert found.would_tell == ("disabling deep idle states meanwhile: no right",)


def test_what_forbidding_idle_states_does_not_fix_is_the_clock() -> None:
    found = attribute(evidence({"sleep": 20, "back_to_back": 10, "spin": 10, "no_idle_states": 20}))
    assert causes(found) == ("cpu_frequency",)
    assert "not the wake-up" in found.findings[0].evidence[1]


def test_a_keep_alive_that_helps_while_kernels_take_as_long_is_not_the_gpus_clock() -> None:
    """The thread that keeps the GPU busy may keep a core awake, too."""
    found = attribute(
        evidence(
            {"sleep": 20, "back_to_back": 10, "spin": 10, "gpu_awake": 11}, gpu=(5.0, 5.0),
            cpu=(20.0, 10.0), before=(20.0, 10.0), why_not={"no_idle_states": "no right"},
        )
    )  # fmt: skip
    assert causes(found) == ("cpu_frequency",)


def test_without_kernels_own_times_the_arm_decides_unless_the_core_may_be_it() -> None:
    walls: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 20, "gpu_awake": 10}
    seen = dataclasses.replace(evidence(walls), has_gpu=True)
    assert causes(attribute(seen)) == ("gpu_clocks",)
    both = evidence({**walls, "spin": 10}, cpu=(20.0, 10.0), before=(20.0, 10.0))
    assert causes(attribute(dataclasses.replace(both, has_gpu=True))) == ("cpu_frequency",)


def test_launches_are_what_launching_takes_away_beyond_core_and_gpu_at_work() -> None:
    walls: dict[Arm, float] = {
        "sleep": 20, "back_to_back": 10, "spin": 20, "gpu_awake": 20, "awake": 20, "launching": 10,
    }  # fmt: skip
    found = attribute(evidence(walls, gpu=(5.0, 5.0)))
    assert causes(found) == ("launch_overhead",)
    words = found.findings[0].evidence
    assert "launching small kernels" in words[0] and "launches 100 kernels" in words[1]


def test_calls_that_are_bound_by_launches_may_be_slow_for_their_caches() -> None:
    walls: dict[Arm, float] = {
        "sleep": 20, "back_to_back": 10, "spin": 20, "gpu_awake": 20, "awake": 20, "launching": 20,
    }  # fmt: skip
    assert causes(attribute(evidence(walls, gpu=(2.0, 2.0), cpu=(20.0, 10.0)))) == (
        "cache_or_contention",
    )
    waits = attribute(evidence(walls, gpu=(2.0, 2.0)))  # no CPU time: nobody knows
    assert not waits.findings and "remains when" in waits.cannot_tell


def test_a_virtual_machine_has_two_causes_with_their_shares() -> None:
    """As it was measured on two cores of one (µs as ms): neither busy-wait nor forbidding idle
    states recovers more than a third, and a fixed loop is slow before each call, too."""
    walls: dict[Arm, float] = {
        "sleep": 79.0, "back_to_back": 15.9, "spin": 60.0, "no_idle_states": 59.0, "touch": 43.0,
        "rehearse_awake": 20.0,
    }  # fmt: skip
    found = attribute(evidence(walls, cpu=(79.0, 15.9), before=(20.0, 10.0)))
    assert causes(found) == ("cold_caches", "c_states") and not found.cannot_tell
    caches, idle = found.findings
    assert caches.share.value == pytest.approx(40 / 63.1, abs=0.01)
    assert idle.share.value == pytest.approx(20 / 63.1, abs=0.01)
    assert "reading the parameters right before" in caches.evidence[2]
    assert "removes 27% of the excess" in caches.evidence[2]


def test_what_a_rehearsal_call_does_not_remove_is_not_the_caches() -> None:
    walls: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 20, "rehearse_awake": 20}
    found = attribute(evidence(walls, cpu=(20.0, 10.0)))
    assert not found.findings and "it is not cold caches" in found.cannot_tell
    half = attribute(evidence({**walls, "rehearse_awake": 15}, cpu=(20.0, 10.0)))
    assert causes(half) == ("cold_caches",)
    assert half.cannot_tell == ("50% of the excess remains also with a rehearsal call right before")


#: What cold caches look like: all of the excess is the call's own time, a rehearsal removes it.
COLD: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 20, "rehearse_awake": 10}


def test_next_to_a_thread_of_the_process_nothing_is_called_cold_caches() -> None:
    """The call before keeps the thread away as well: a camera thread of pure Python was missed."""
    found = attribute(evidence(COLD, cpu=(20.0, 10.0), threads={"camera": 1.0}))
    assert not found.findings and found.threads == ("camera",)
    assert "100% of the excess is due to the pause" in found.cannot_tell
    assert "other threads of this process (camera: 1 core, also between calls)" in found.cannot_tell
    assert found.would_tell == (
        "the same measurement without these threads of this process: camera",
    )
    assert [each.title for each in advice(found, {})] == [
        "a process of its own for what the other thread does"
    ]
    no_rehearsal = {arm: ms for arm, ms in COLD.items() if arm != "rehearse_awake"}
    for walls in (no_rehearsal, {**no_rehearsal, "spin": 10.0}):
        other = attribute(evidence(walls, cpu=(20.0, 10.0), threads={"camera": 1.0}))
        assert not other.findings and "camera" in other.cannot_tell


@pytest.mark.parametrize("threads", [{}, {"logs": 0.05}, {UNNAMED: 0.6}])
def test_threads_that_work_little_or_for_the_call_leave_cold_caches(
    threads: dict[str, float],
) -> None:
    """Calls of 20 ms at 30 Hz have a pool's threads at work for 0.6 of the time."""
    found = attribute(evidence(COLD, cpu=(20.0, 10.0), threads=threads))
    assert causes(found) == ("cold_caches",) and not found.threads and not found.cannot_tell


def test_a_thread_that_fills_a_short_pause_competes() -> None:
    """Calls of 30 ms at 30 Hz leave 3 ms."""
    walls = {arm: ms + 10 for arm, ms in COLD.items()}
    busy = attribute(evidence(walls, cpu=(30.0, 20.0), threads={"camera": 0.99}))
    assert busy.threads == ("camera",) and not busy.findings
    pool = attribute(evidence(walls, cpu=(30.0, 20.0), threads={UNNAMED: 0.93}))
    assert causes(pool) == ("cold_caches",)


def test_a_call_that_waits_longer_while_a_thread_works_competes_with_it() -> None:
    walls: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 20, "rehearse_awake": 10}
    found = attribute(evidence(walls, threads={"camera": 0.9}))
    assert causes(found) == ("competing_thread",) and not found.cannot_tell
    assert found.findings[0].share.value == pytest.approx(1.0)
    assert "camera: 0.9 cores" in found.findings[0].evidence[1]
    # Other processes make calls wait, too.
    busy = attribute(evidence(walls, threads={"camera": 0.9}, others=1.9))
    assert not busy.findings and "camera" in busy.cannot_tell


def test_what_a_thread_cannot_cause_stays_found_next_to_one() -> None:
    idle: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 10, "no_idle_states": 10}
    assert causes(attribute(evidence(idle, threads={"camera": 0.9}))) == ("c_states",)
    launches: dict[Arm, float] = {
        "sleep": 20, "back_to_back": 10, "spin": 20, "gpu_awake": 20, "awake": 20, "launching": 10,
    }  # fmt: skip
    seen = evidence(launches, gpu=(5.0, 5.0), threads={"camera": 0.9})
    assert causes(attribute(seen)) == ("launch_overhead",)


def test_the_answer_names_the_thread() -> None:
    found = measured(dataclasses.replace(CACHES, threads={"camera": 1.0}), ON_CPU)
    text = pace_subject(found).headline.text
    assert "another thread of this process works meanwhile (camera)" in text
    assert "COLD CACHES" not in whole(pace_subject(found))
    assert "COLD CACHES" in whole(pace_subject(measured(CACHES, ON_CPU)))


def test_a_slower_arm_is_nobodys_part() -> None:
    """A governor may find another balance while idle states are forbidden: calls twice as long."""
    found = attribute(evidence({"sleep": 20, "back_to_back": 10, "spin": 10, "no_idle_states": 40}))
    assert causes(found) == ("cpu_frequency",)
    assert found.findings[0].share.value == pytest.approx(1.0)


def test_calls_without_a_gpu_have_no_arms_of_it() -> None:
    found = measured(FREQUENCY, ON_CPU).attribution
    assert found is not None
    ran = {each.arm for each in found.arms if each.wall_s is not None}
    assert ran == {
        "back_to_back", "sleep", "spin", "no_idle_states", "touch", "rehearse_awake"
    }  # fmt: skip


def test_what_nothing_explains_cannot_be_told() -> None:
    found = attribute(evidence({"sleep": 20, "back_to_back": 10, "spin": 20}, cpu=(10.0, 10.0)))
    assert not found.findings and "remains when" in found.cannot_tell


def test_calls_that_vary_by_more_than_the_excess_are_told_so() -> None:
    """What a call does at any rate (a log to a disk) is no cause, and neither is anything else."""
    walls: dict[Arm, float] = {"sleep": 20, "back_to_back": 10, "spin": 20, "rehearse_awake": 20}
    wide = attribute(evidence(walls, varies=0.9))
    assert not wide.findings and wide.is_spread
    assert (
        "half of them within 11 ms to 29 ms, back to back within 5.5 ms to 14.5 ms"
        in wide.cannot_tell
    )
    even = attribute(evidence(walls))
    assert not even.is_spread and "vary" not in even.cannot_tell
    found = measured(CACHES, ON_CPU)
    for seen, words in ((wide, "calls vary by more than that"), (even, "the cause is not known")):
        text = verdict_line(dataclasses.replace(found, attribution=seen))
        assert text.endswith(words)


def test_without_the_arm_that_works_nothing_is_claimed() -> None:
    found = attribute(evidence({"sleep": 20, "back_to_back": 10}, cpu=(20.0, 10.0)))
    assert not found.findings and "is missing" in found.cannot_tell
