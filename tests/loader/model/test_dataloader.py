"""The queueing model of the DataLoader, against recurrences, bounds and closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_cases import slow_but
from helpers_costs import lognormal_costs
from trainfit.loader.measure.events import (
    Cores,
    CoreWork,
    EventSimulation,
    Process,
    Queue,
    Sleep,
    Take,
)
from trainfit.loader.measure.model import BatchCost, Load, Outcome, Transfer, simulate
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

SECONDS = st.floats(0.0, 2.0).map(lambda s: round(s, 3))
COSTS = st.lists(SECONDS, min_size=1, max_size=30)
WORKERS = st.integers(1, 6)
PREFETCH = st.integers(1, 5)


def waits(seconds: Sequence[float]) -> tuple[BatchCost, ...]:
    return tuple(BatchCost(each, 0.0) for each in seconds)


def works(seconds: Sequence[float]) -> tuple[BatchCost, ...]:
    return tuple(BatchCost(0.0, each) for each in seconds)


# --- Events -----------------------------------------------------------------------------------
def test_work_shares_the_cores_and_sleep_does_not() -> None:
    simulation = EventSimulation(Cores((1.0,)))
    ended: dict[str, float] = {}

    def process(name: str, *steps: Sleep | CoreWork):  # type: ignore[no-untyped-def]
        yield from steps
        ended[name] = simulation.now

    simulation.start(process("long", CoreWork(3.0)))
    simulation.start(process("short", CoreWork(1.0)))
    simulation.start(process("asleep", Sleep(1.5)))
    simulation.run()
    # Two share the core until the short one has worked 1 s, at 2 s; 2 s of work are left then.
    assert ended == {"asleep": 1.5, "short": 2.0, "long": 4.0}
    assert simulation.busy_s == pytest.approx(4.0)


_STEPS = st.one_of(
    st.builds(Sleep, st.floats(0.01, 1.0)),
    st.builds(CoreWork, st.floats(0.01, 1.0), st.integers(1, 6).map(float)),
)


@given(st.integers(1, 3), st.lists(st.lists(_STEPS, min_size=1, max_size=4), max_size=5))
def test_all_work_is_done_once(cores: int, programs: list[list[Sleep | CoreWork]]) -> None:
    """Whatever shares the cores, and however many threads it has (more than cores, too)."""
    simulation = EventSimulation(Cores((1.0,) * cores))
    ended = []

    def process(steps: list[Sleep | CoreWork]):  # type: ignore[no-untyped-def]
        yield from steps
        ended.append(steps)

    for steps in programs:
        simulation.start(process(steps))
    simulation.run()
    assert len(ended) == len(programs)
    asked = sum(
        step.seconds * step.width
        for steps in programs
        for step in steps
        if isinstance(step, CoreWork)
    )
    assert simulation.busy_s == pytest.approx(asked)


def test_threads_stay_on_their_core_until_another_is_idle() -> None:
    """Three on two cores: one has a core of its own, and then another's is taken over."""
    simulation, ended = EventSimulation(Cores((1.0, 1.0))), {}

    def process(name: str, work_s: float) -> Process:
        yield CoreWork(work_s)
        ended[name] = simulation.now

    for name in "abc":
        simulation.start(process(name, 1.0))
    simulation.run()
    # A fair share of both cores would end all three at 1.5 s.
    assert ended == {"b": 1.0, "a": 1.5, "c": 1.5}
    assert simulation.busy_s == pytest.approx(3.0)


def test_wide_work_takes_several_cores() -> None:
    simulation, ended = EventSimulation(Cores((1.0,) * 3)), {}

    def process(name: str, work: CoreWork) -> Process:
        yield work
        ended[name] = simulation.now

    simulation.start(process("wide", CoreWork(1.0, 2.0)))
    simulation.start(process("narrow", CoreWork(1.0)))
    simulation.start(process("late", CoreWork(0.5)))
    simulation.run()
    # "late" shares one of the two cores of "wide" until it is done, at 1 s.
    assert ended == {"narrow": 1.0, "late": 1.0, "wide": pytest.approx(1.25)}


def test_unlike_cores_quota_and_contention() -> None:
    assert Cores((1.0, 0.5)).rate(1) == 1.0
    assert Cores((0.5, 1.0)).rate(2) == 0.75
    assert Cores((1.0, 1.0)).rate(4) == 1.0
    assert Cores((1.0,) * 4, quota=1.5).rate(3) == pytest.approx(0.5)
    assert Cores((1.0,) * 4, quota=1.5).rate(1) == 1.0
    assert Cores((1.0, 1.0), contention=0.25).rate(2) == pytest.approx(0.8)


@pytest.mark.parametrize("words", [((),), ((1.0, 0.0),), ((1.0,), 0.0), ((1.0,), None, -0.1)])
def test_impossible_machines(words: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):
        Cores(*words)  # type: ignore[arg-type]


def test_a_queue_keeps_its_order() -> None:
    simulation, queue, got = EventSimulation(Cores((1.0,))), Queue(), []

    def taker():  # type: ignore[no-untyped-def]
        while True:
            item = yield Take(queue)
            got.append((simulation.now, item))
            yield Sleep(1.0)

    def putter():  # type: ignore[no-untyped-def]
        for item in "abc":
            simulation.put(queue, item)
        yield Sleep(5.0)
        simulation.put(queue, "d")

    simulation.start(taker())
    simulation.start(putter())
    simulation.run()
    assert got == [(0.0, "a"), (1.0, "b"), (2.0, "c"), (5.0, "d")]


# --- Against a recurrence that was written apart ----------------------------------------------
def recurrence(
    costs: Sequence[float], workers: int, prefetch: int, step: float, batches: int
) -> list[float]:
    """When each batch is handed over, in order, without hand-off costs or contention.

    A batch is asked for when the one `workers x prefetch` before it was handed over; its worker,
    by turns, makes it after the one before; it is handed over when it is made and the user has
    done with the one before.
    """
    finished: list[float] = []
    handed: list[float] = []
    for n in range(batches):
        asked = handed[n - workers * prefetch] if n >= workers * prefetch else 0.0
        free = finished[n - workers] if n >= workers else 0.0
        finished.append(max(asked, free) + costs[n % len(costs)])
        handed.append(max(finished[n], handed[-1] + step if handed else 0.0))
    return handed


@given(COSTS, WORKERS, PREFETCH, SECONDS, st.integers(1, 60), st.booleans())
def test_in_order_it_is_the_recurrence(
    costs: list[float], workers: int, prefetch: int, step: float, batches: int, pin: bool
) -> None:
    load = Load(waits(costs), consumer=Consumer(step))
    found = simulate(load, LoaderSettings(workers, prefetch, pin_memory=pin), batches)
    expected = recurrence(costs, workers, prefetch, step, batches)
    assert found.handed_s == pytest.approx(expected)
    assert found.finished_s >= expected[-1]


# --- Bounds -----------------------------------------------------------------------------------
@given(
    COSTS, COSTS, st.integers(0, 6), PREFETCH, SECONDS, st.integers(1, 4), st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(deadline=None)
def test_no_run_beats_its_bounds(
    wait: list[float],
    work: list[float],
    workers: int,
    prefetch: int,
    step: float,
    cores: int,
    in_order: bool,
    pin: bool,
) -> None:
    costs = tuple(BatchCost(a, b) for a, b in zip(wait, work, strict=False))
    transfer = Transfer(receive_s=0.01, pin_s=0.02, next_s=0.005)
    load = Load(costs, transfer, Consumer(step, step / 2), Cores((1.0,) * cores))
    batches = 40
    run = simulate(load, LoaderSettings(workers, prefetch, pin, in_order), batches)
    assert len(run.handed_s) == batches
    assert list(run.handed_s) == sorted(run.handed_s)
    assert all(waited >= -1e-9 for waited in run.waited_s)
    each = [costs[n % len(costs)] for n in range(batches)]
    work_s = sum(c.work_s for c in each) + batches * (step / 2 + 0.005)
    assert run.finished_s >= work_s / cores - 1e-6  # the cores
    assert run.finished_s >= sum(c.wait_s + c.work_s for c in each) / max(workers, 1) - 1e-6
    assert run.finished_s >= batches * step - 1e-6  # the user
    assert run.busy_cores <= cores + 1e-9
    # All that the user did not wait for, the user worked or was handed a batch.
    assert sum(run.waited_s) + batches * step <= run.finished_s * (1 + 1e-9) + 1e-6 or cores < 9


@given(COSTS, WORKERS, PREFETCH, SECONDS)
def test_more_prefetching_is_never_slower_in_order(
    costs: list[float], workers: int, prefetch: int, step: float
) -> None:
    def finished(factor: int) -> float:
        load = Load(waits(costs), consumer=Consumer(step))
        return simulate(load, LoaderSettings(workers, factor), 50).finished_s

    assert finished(prefetch + 1) <= finished(prefetch) + 1e-9


@given(st.floats(0.001, 1.0), st.integers(1, 8), st.floats(0.0, 1.0))
def test_equal_costs_give_the_smaller_of_two_rates(cost: float, workers: int, step: float) -> None:
    load = Load(waits([cost]), consumer=Consumer(step))
    for in_order in (True, False):
        rate = simulate(load, LoaderSettings(workers, 2, in_order=in_order), 400).batches_per_s
        expected = min(workers / cost, 1 / step if step > 0 else math.inf)
        # A run ends in the middle of a round of the workers.
        assert rate == pytest.approx(expected, rel=0.1)


def test_without_workers_the_main_thread_does_everything() -> None:
    load = Load(
        (BatchCost(0.1, 0.2),), Transfer(9.0, 0.3, 0.05), Consumer(0.5), Cores((1.0,))
    )  # nothing is received from anybody
    assert simulate(load, LoaderSettings(0), 20).batches_per_s == pytest.approx(1 / 0.85)
    pinned = simulate(load, LoaderSettings(0, pin_memory=True), 20)
    assert pinned.batches_per_s == pytest.approx(1 / 1.15)
    assert pinned.waiting_share == pytest.approx(0.65 / 1.15, rel=1e-6)


# --- Cores ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        (Cores((1.0, 1.0)), 1, 10.0),
        (Cores((1.0, 1.0)), 2, 20.0),
        (Cores((1.0, 1.0)), 4, 20.0),
        (Cores((1.0,) * 4, quota=1.5), 4, 15.0),
        (Cores((1.0, 0.5)), 4, 15.0),
        (Cores((1.0, 1.0), contention=0.25), 2, 16.0),
    ],
)
def test_workers_beyond_the_cores_add_nothing(cores: Cores, workers: int, expected: float) -> None:
    load = Load(works([0.1]), cores=cores)
    rate = simulate(load, LoaderSettings(workers, 2), 400).batches_per_s
    assert rate == pytest.approx(expected, rel=0.02)


def test_a_step_that_works_takes_a_core_from_the_workers() -> None:
    def rate(work_s: float) -> float:
        load = Load(works([0.1]), consumer=Consumer(0.05, work_s), cores=Cores((1.0, 1.0)))
        return simulate(load, LoaderSettings(2, 4), 400).batches_per_s

    assert rate(0.0) == pytest.approx(20.0, rel=0.02)
    # Each batch takes 0.15 s of work of the two cores' 2 s each second.
    assert rate(0.05) == pytest.approx(2 / 0.15, rel=0.02)


# --- Hand-off ---------------------------------------------------------------------------------
def test_the_pinning_thread_is_a_station_of_its_own() -> None:
    costs, step = waits([0.01]), Consumer(0.06)
    transfer = Transfer(receive_s=0.03, pin_s=0.02)
    load = Load(costs, transfer, step)
    # In the main thread receiving adds to the step; in the pinning thread it overlaps with it.
    assert simulate(load, LoaderSettings(4), 200).batches_per_s == pytest.approx(1 / 0.09, rel=0.02)
    pinned = simulate(load, LoaderSettings(4, pin_memory=True), 200).batches_per_s
    assert pinned == pytest.approx(1 / 0.06, rel=0.02)
    slow = Load(costs, Transfer(receive_s=0.03, pin_s=0.07), step)
    assert simulate(slow, LoaderSettings(4, pin_memory=True), 200).batches_per_s == pytest.approx(
        10.0, rel=0.02
    )


def test_a_busy_worker_answers_late() -> None:
    # The worker makes its next batch while the main thread takes the one before from it.
    transfer = Transfer(receive_s=0.01, busy_wait_s=0.04)
    busy = Load(waits([0.2]), transfer, Consumer(0.16))
    # 0.16 s of the step, 0.04 s until the worker answers, 0.01 s to take the batch.
    assert simulate(busy, LoaderSettings(1, 8), 200).batches_per_s == pytest.approx(
        1 / 0.21, rel=0.02
    )
    # It answers once its batch is made, whatever else it would have waited for.
    short = Load(waits([0.03]), transfer)
    assert simulate(short, LoaderSettings(1, 8), 400).batches_per_s > 1 / 0.05
    # A worker that waits for its turn answers at once.
    idle = Load(waits([0.03]), transfer, Consumer(0.5))
    assert simulate(idle, LoaderSettings(1, 2), 50).batches_per_s == pytest.approx(
        1 / 0.51, rel=0.02
    )


# --- Published curves -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variation", "losses"),
    slow_but(
        [
            (0.1, (-1.5, -0.3, -0.1)),
            (0.3, (-10, -2, -0.8)),
            (0.6, (-27, -7, -2.7)),
            (1.0, (-44, -17, -5.6)),
        ],
        (0.6, (-27, -7, -2.7)),
    ),
)
def test_what_uneven_batches_cost(variation: float, losses: tuple[float, ...]) -> None:
    """8 workers and a user who are equally fast: per cent below the smaller of their rates."""
    kinds = (LoaderSettings(8, 2), LoaderSettings(8, 8), LoaderSettings(8, 2, in_order=False))
    load = Load(lognormal_costs(0.8, variation, 20_011, seed=0), consumer=Consumer(0.1))
    mean_s = sum(cost.wait_s for cost in load.costs) / len(load.costs)
    naive = min(10, 8 / mean_s)
    for kind, loss in zip(kinds, losses, strict=True):
        found = simulate(load, kind, 20_000).batches_per_s / naive - 1
        assert 100 * found == pytest.approx(loss, abs=1.6)


def test_one_slow_worker_holds_all_up_in_order_only() -> None:
    load = Load(waits([0.8]), worker_speeds=(0.5, 1, 1, 1, 1, 1, 1, 1))
    assert simulate(load, LoaderSettings(8), 2000).batches_per_s == pytest.approx(5.0, rel=0.02)
    out_of_order = simulate(load, LoaderSettings(8, in_order=False), 2000).batches_per_s
    assert out_of_order == pytest.approx(9.375, rel=0.02)


# --- Epochs -----------------------------------------------------------------------------------
def test_workers_that_persist_start_once() -> None:
    load = Load(waits([0.1]), start_s=0.5)

    def run(persistent: bool) -> Outcome:
        return simulate(load, LoaderSettings(2, persistent_workers=persistent), 10, epochs=3)

    anew, kept = run(False), run(True)
    # Two workers start one after the other, in each of three epochs or in the first.
    assert anew.finished_s - kept.finished_s == pytest.approx(2 * 2 * 0.5)
    assert len(anew.handed_s) == len(kept.handed_s) == 30
    assert kept.waited_s[0] == pytest.approx(1.1)
    assert kept.waited_s[10] == pytest.approx(0.1)


def test_bad_settings_are_refused() -> None:
    for words in ({"num_workers": -1}, {"num_workers": 1, "prefetch_factor": 0}):
        with pytest.raises(ValueError):
            LoaderSettings(**words)
    with pytest.raises(ValueError):
        Consumer(1.0, 2.0)
    with pytest.raises(ValueError):
        Load(())
    with pytest.raises(ValueError):
        simulate(Load(waits([1.0])), LoaderSettings(1), 0)
