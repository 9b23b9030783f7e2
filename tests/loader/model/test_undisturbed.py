"""Runs on slowed cores, brought to full speed: they must say what undisturbed ones do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.machine.core_speed import CoreSpeed, WorkPieces
from trainfit.loader.measure.noise_correction import (
    SENSITIVITY,
    Slowing,
    quietest,
    span,
    working_share,
)
from trainfit.loader.measure.probe_runs import Readings
from trainfit.loader.measure.records import BEGAN, CPU, PROCESS_CPU, WALL, Run
from trainfit.results.dataloader import LoaderMachine, LoaderSettings

MACHINE = LoaderMachine(2.0, (0, 1), 2, None, (1.0, 1.0), 8 << 30, None, None)


def run(
    period_s: float = 0.02, *, waits: float = 0.0, slow: float = 1.0, step_s: float = 0.0
) -> Run:
    """One worker that works, but for the share in which it waits; all of its work takes
    ``slow`` times as long."""
    cpu, count = period_s * (1 - waits) * slow, 60
    wall = cpu + period_s * waits
    period = max(wall, step_s)
    handed = 50 + period * np.arange(count)
    began = 50 + period * np.arange(count)
    columns = {BEGAN: began, WALL: np.full(count, wall), CPU: np.full(count, cpu)}
    columns[PROCESS_CPU] = cpu * np.arange(count)
    received = np.stack([np.full(count, 1e-3 * slow)] * 2 + [1e-3 * slow * np.arange(count)], 1)
    return Run(
        LoaderSettings(1, 2),
        step_s,
        began=49.0,
        handed=handed,
        waited=np.full(count, period - step_s),
        next_cpu=np.full(count, 2e-3 * slow),
        steps=np.full(count - 1, step_s),
        fetches=(np.stack([columns[key] for key in sorted(columns)], 1),),
        received=received,
        started=(49.5,),
        core_speed=CoreSpeed(slow ** (-1 / SENSITIVITY), 1.0 - waits),
    )


@given(slow=st.floats(1.0, 2.0))
def test_a_slowed_run_of_work_becomes_the_quick_one(slow: float) -> None:
    disturbed, quick = run(slow=slow), run()
    found = Slowing(working_share([disturbed]), 2.0).undisturbed(disturbed)
    assert found.batches_per_s == pytest.approx(quick.batches_per_s)
    assert found.next_cpu == pytest.approx(quick.next_cpu)
    assert found.received == pytest.approx(quick.received)
    for ours, theirs in zip(found.fetches, quick.fetches, strict=True):
        assert ours[:, [WALL, CPU, PROCESS_CPU]] == pytest.approx(
            theirs[:, [WALL, CPU, PROCESS_CPU]]
        )


def test_what_a_worker_waits_for_takes_as_long_at_any_speed() -> None:
    disturbed = run(waits=1.0, slow=1.6)
    found = Slowing(working_share([disturbed]), 2.0).undisturbed(disturbed)
    assert found.batches_per_s == pytest.approx(disturbed.batches_per_s)
    # Half of it is work, on one of two cores: the clock's times lie between.
    _, wall = Slowing(0.5, 2.0).slower(CoreSpeed(0.5, 1.0))
    assert wall == pytest.approx(1 - 0.5 * (1 - 0.5**SENSITIVITY))
    # Unless nearly all cores are busy, none waits for them.
    assert Slowing(0.1, 2.0).slower(CoreSpeed(0.5, 1.4))[1] == pytest.approx(
        1 - 0.1 * (1 - 0.5**SENSITIVITY)
    )
    # With all cores busy the waiting is hidden, and the cores bound the rate.
    cpu, wall = Slowing(0.1, 2.0).slower(CoreSpeed(0.5, 2.0))
    assert wall == pytest.approx(cpu)


def test_a_run_that_nobody_watched_is_as_it_was() -> None:
    unseen = dataclasses.replace(run(), core_speed=None)
    assert Slowing(1.0, 2.0).undisturbed(unseen) is unseen
    found = Slowing(1.0, 2.0).with_full_speed_rate(unseen)
    assert found.full_speed_batches_per_s == pytest.approx(unseen.batches_per_s)


def test_a_loader_hidden_behind_the_step_would_not_have_been_faster() -> None:
    hidden = run(slow=1.5, step_s=0.05)
    found = Slowing(1.0, 2.0).with_full_speed_rate(hidden)
    assert found.full_speed_batches_per_s == pytest.approx(1 / 0.05)
    # Slowed it takes 30 ms, undisturbed 20 ms, and the step 25 ms.
    shown = Slowing(1.0, 2.0).with_full_speed_rate(run(slow=1.5, step_s=0.025))
    assert shown.batches_per_s == pytest.approx(1 / 0.03)
    assert shown.full_speed_batches_per_s == pytest.approx(1 / 0.025)


def test_without_workers_the_step_is_no_faster() -> None:
    """30 ms for a batch, slowed, and 20 ms for a step, in turn."""
    turns = run(slow=1.5, step_s=0.02)
    count = len(turns.handed)
    turns = dataclasses.replace(
        turns, settings=LoaderSettings(0), handed=50 + 0.05 * np.arange(count)
    )
    found = Slowing(1.0, 1.0).with_full_speed_rate(turns)
    assert found.full_speed_batches_per_s == pytest.approx(1 / (0.02 + 0.02))


def test_runs_that_failed_have_no_span_and_no_rate() -> None:
    failed = Run(LoaderSettings(1), 0.0, began=3.0)
    assert span(failed) == (3.0, 3.0)
    assert Slowing(1.0, 2.0).with_full_speed_rate(failed).full_speed_batches_per_s is None
    assert working_share([failed]) == 1.0


def test_a_probes_readings_are_brought_to_full_speed_together() -> None:
    """Two runs of a kind, one of them on slowed cores: afterwards they agree."""
    quick, slowed = run(), run(slow=1.5)
    later = {
        "began": slowed.began + 10,
        "handed": slowed.handed + 10,
        "fetches": (slowed.fetches[0] + [10, 0, 0, 0],),
    }
    slowed = dataclasses.replace(slowed, **later)  # type: ignore[arg-type]
    at = np.arange(49.0, 63.0, 0.02)
    took = np.where(at < 58, 50_000.0, 50_000.0 * 1.5 ** (1 / SENSITIVITY))
    seen = WorkPieces(at, np.zeros(len(at)), took, np.zeros(len(at)))
    readings = Readings(MACHINE, {"one": [quick], "turn": [slowed]}).with_speeds(seen)
    slowing = readings.slowing(seen)
    assert slowing.sensitivity == SENSITIVITY  # the batches do not say on which core they were
    rates = [each.batches_per_s for each in readings.at_full_speed(slowing).of("one", "turn")]
    assert rates == pytest.approx([quick.batches_per_s] * 2, rel=1e-3)
    assert readings.of("turn")[0].batches_per_s == pytest.approx(slowed.batches_per_s)


def test_of_a_kind_the_quietest_runs_count() -> None:
    runs = [
        dataclasses.replace(run(), core_speed=CoreSpeed(each, 1.0)) for each in (0.6, 0.97, 0.92)
    ]
    assert quietest(runs) == runs[1:]
    assert quietest(runs[:1]) == runs[:1] and quietest([]) == []
    assert quietest([*runs[1:], runs[0]]) == [runs[2]]  # the very first of several does not
    unseen = dataclasses.replace(run(), core_speed=None)
    assert quietest([unseen]) == [unseen]


def test_runs_beside_other_processes_count_where_there_are_no_others() -> None:
    runs = [
        dataclasses.replace(run(), core_speed=CoreSpeed(speed, 1.0), others_cores=others)
        for speed, others in ((0.9, 0.0), (0.92, 0.1), (1.0, 1.0))
    ]
    assert quietest(runs) == [runs[1]]
    assert quietest(runs[2:]) == runs[2:]


def test_of_batches_that_differ_wildly_more_runs_count() -> None:
    """Sixty batches, some of which take fifty times as long: slower cores matter less."""
    wild = np.where(np.arange(60) % 20 == 0, 0.5, 0.01)
    runs = []
    for speed in (0.7, 0.97, 0.75):
        records = run().fetches[0].copy()
        records[:, [WALL, CPU]] = wild[:, None]
        changed = dataclasses.replace(run(), fetches=(records,), core_speed=CoreSpeed(speed, 1.0))
        runs.append(changed)
    assert quietest(runs) == runs[1:]
    alike = [dataclasses.replace(each, fetches=run().fetches) for each in runs]
    assert quietest(alike) == [alike[1]]
