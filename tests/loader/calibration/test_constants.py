"""From the runs of a probe to the model's constants: what went in comes out again.

The runs are made up from a model whose constants are known: records of what batches took, and
the rate that this model gives.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from helpers_cases import slow_but
from trainfit.hardware.machine.core_speed import CoreSpeed
from trainfit.loader.measure.constants import fit
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import (
    Costs,
    Fitted,
    alone_costs,
    batch_costs,
    bisect,
    costs_of,
    merged,
    ratio,
    same_rate,
    threaded,
)
from trainfit.loader.measure.model import BatchCost, Transfer
from trainfit.loader.measure.probe_runs import KINDS, PINNED, RUN_NOISE, TIGHT, TWO, Readings
from trainfit.loader.measure.records import WALL, Run, warm_up
from trainfit.results.dataloader import LoaderMachine, LoaderSettings
from trainfit.results.runs.measurement import Consumer

MACHINE = LoaderMachine(2.0, (0, 1), 2, None, (1.0, 1.0), 8 << 30, None, None)
WALLS = 0.02 + 0.004 * np.sin(np.arange(200))
GAP_S, SEND_S = 0.0004, 0.0003
TWO_CORES = Cores((1.0, 1.0))


def records(walls: np.ndarray, cpus: np.ndarray, gap_s: float = GAP_S) -> np.ndarray:
    """A worker's records: began, wall, CPU, and the process' CPU until it began."""
    began = 5 + np.concatenate([[0.0], np.cumsum(walls + gap_s)[:-1]])
    process = np.concatenate([[0.0], np.cumsum(cpus + gap_s + SEND_S)[:-1]])
    return np.stack([began, walls, cpus, process], axis=1)


def run(
    settings: LoaderSettings,
    rate: float,
    *,
    slower: float = 1.0,
    waits_s: float = 0.0,
    step_s: float = 0.0,
    count: int = 60,
) -> Run:
    """A run at this rate whose workers took the common batches in turn, so much slower on
    cores, and waiting so much in addition."""
    workers = settings.num_workers
    handed = 5 + np.arange(warm_up(settings) + count) / rate
    size = len(handed)
    taken = np.stack([np.full(size, 0.0015), np.full(size, 0.001), np.arange(size) * 0.003], 1)
    cpus = [WALLS[worker:150:workers] * slower for worker in range(workers)]
    return Run(
        settings,
        step_s,
        began=4.9,
        handed=handed,
        waited=np.full(size, 0.002),
        next_cpu=np.full(size, 0.0018),
        steps=np.full(size, step_s),
        fetches=tuple(records(cpu + waits_s, cpu) for cpu in cpus),
        received=taken,
        pinned=taken if settings.pin_memory else np.empty((0, 3)),
        started=(5.0,) * workers,
        private_bytes=(100 << 20,) * workers,
    )


def readings(truth: Fitted, **waits: float) -> Readings:
    """A probe's runs at the rates that the truth gives."""
    found = Readings(MACHINE)
    for kind in KINDS:
        settings = found.settings(kind)
        if settings is None or not settings.num_workers:
            continue
        step_s = {"paced": 0.03, "tight": 0.0}.get(kind, 0.0)
        if kind == "tight":
            two = found.rate("two")
            assert two is not None
            step_s = TIGHT / two
        outcome = truth.predict(settings, Consumer(step_s), warm_up(settings) + 60)
        slower = 1 + truth.cores.contention * (settings.num_workers > 1)
        # Of what threads that take turns lose, their clocks tell: it is work of a core.
        threads = max(1.0, settings.num_workers / len(truth.cores.speeds))
        slower *= 1 + truth.cores.sharing * (1 - 1 / threads)
        one = run(settings, 1.0, slower=slower, waits_s=waits.get(kind, 0.0), step_s=step_s)
        one = dataclasses.replace(one, handed=5 + np.array(outcome.handed_s))
        found.runs[kind] = [one]
    return found


def truth(cores: Cores = TWO_CORES, **transfer: float) -> Fitted:
    """A model like the one that is fitted to :func:`readings`."""
    found = Readings(MACHINE)
    found.runs["one"] = [run(LoaderSettings(1, 8), 1 / (WALLS.mean() + GAP_S))]
    fitted = fit(found, cores)
    assert fitted is not None
    changed = dataclasses.replace(fitted.transfer, **transfer)
    costs = tuple(BatchCost(0.0, float(wall) + GAP_S) for wall in WALLS[:150])
    return dataclasses.replace(fitted, costs=costs, transfer=changed, cold_transfer=changed)


def test_runs_of_one_kind_tell_how_much_runs_differ() -> None:
    """With what is known of other loaders, for a probe repeats a kind only some times."""
    found = Readings(MACHINE)
    found.runs["two"] = [run(TWO, 100.0)]
    assert found.run_noise() == pytest.approx(RUN_NOISE)
    found.runs["two"] = [run(TWO, rate) for rate in (100.0, 110.0, 121.0)]
    step = math.log(1.1)
    assert found.run_noise() == pytest.approx(math.sqrt((4 * RUN_NOISE**2 + 2 * step**2) / 6))
    same = Readings(MACHINE, {"tight": found.runs["two"]})  # the rate of a step, not of the loader
    assert same.run_noise() == pytest.approx(RUN_NOISE)


# --- What is read -----------------------------------------------------------------------------


def test_batches_have_their_place_in_the_order() -> None:
    """Two workers: the first made 0, 2, 4 …; what came before the counted ones is left out."""
    both = run(TWO, 90.0)
    costs, first = costs_of(both), 2 * (warm_up(TWO) // 2)
    assert costs is not None and first > 8
    assert np.isnan(costs.wall_s[:first]).all()
    assert costs.wall_s[first:150] == pytest.approx(WALLS[first:150])
    assert costs.gap_s == pytest.approx(GAP_S)
    assert costs.send_s == pytest.approx(SEND_S)


def test_runs_out_of_order_and_runs_without_workers_tell_no_places() -> None:
    assert (
        costs_of(dataclasses.replace(run(TWO, 90.0), settings=LoaderSettings(2, in_order=False)))
        is None
    )
    assert costs_of(run(LoaderSettings(1), 50.0, count=5)) is not None
    assert (
        costs_of(dataclasses.replace(run(LoaderSettings(1), 50.0), fetches=(np.empty((0, 4)),)))
        is None
    )


def test_runs_of_another_pace_are_brought_to_the_first_ones() -> None:
    def costs(times: float, upto: int) -> Costs:
        return Costs(times * WALLS[:upto], times * WALLS[:upto], GAP_S, SEND_S)

    together = merged([costs(1.0, 50), costs(1.3, 120)])
    assert len(together.wall_s) == 120
    assert together.wall_s == pytest.approx(WALLS[:120])
    assert ratio(costs(1.3, 120).wall_s, costs(1.0, 50).wall_s) == pytest.approx(1.3)
    nowhere = np.full(10, np.nan)
    assert ratio(nowhere, nowhere) == 1.0


def test_waiting_is_what_is_no_cpu_time_and_more_cpu_than_time_is_several_cores() -> None:
    made = batch_costs(
        Costs(np.array([0.01, np.nan, 0.01]), np.array([0.004, 0.1, 0.03]), 0.0, 0.0)
    )
    assert made[0] == BatchCost(pytest.approx(0.006), 0.004)
    assert made[1] == BatchCost(0.0, 0.01, pytest.approx(1.7))  # not seen: the others' mean
    assert made[2] == BatchCost(0.0, 0.01, pytest.approx(3.0))


def test_without_workers_next_is_part_of_the_cost() -> None:
    settings = LoaderSettings(0)
    alone = Run(
        settings,
        0.0,
        handed=np.arange(11) / 50,
        waited=np.full(11, 0.02),
        next_cpu=np.full(11, 0.012),
        steps=np.zeros(11),
        fetches=(records(np.full(11, 0.01), np.full(11, 0.01)),),
    )
    assert [cost.work_s for cost in alone_costs([alone])] == pytest.approx([0.012] * 6)
    assert alone_costs([dataclasses.replace(alone, fetches=())]) == ()


def test_a_worker_that_has_not_settled_costs_nothing() -> None:
    """The ACT example's workers: 33, 23, 23, 20 ms and then 18.5, once memory was touched."""
    settings = LoaderSettings(1)
    walls = np.concatenate([[0.04, 0.033, 0.023, 0.023, 0.02], np.full(60, 0.0185)])
    cold = dataclasses.replace(run(settings, 50.0), fetches=(records(walls, walls),))
    costs = costs_of(cold)
    assert costs is not None
    assert costs.wall_s[costs.seen] == pytest.approx(0.0185)
    assert cold.fetched[:, WALL] == pytest.approx(0.0185)
    short = dataclasses.replace(cold, fetches=(records(walls[:3], walls[:3]),))
    assert len(short.fetched) == 2  # the first never counts, others do where there are no more


@pytest.mark.parametrize("later_s", slow_but([0.0, 0.004], 0.004))
def test_what_takes_longer_to_arrive_while_cores_are_crowded_is_read(later_s: float) -> None:
    """Of batches that the main thread waited for: from their end to the taking over."""
    over = LoaderSettings(4, 2)

    def arriving(settings: LoaderSettings, lag_s: float) -> Run:
        made = run(settings, 50.0)
        workers = settings.num_workers
        period = 0.02
        places = np.arange(len(made.handed))
        ends = 5 + period * places
        fetches = tuple(
            np.stack([ends[w::workers] - 0.015, *[np.full(len(ends[w::workers]), 0.015)] * 3], 1)
            for w in range(workers)
        )
        took = np.full(len(ends), 0.001)
        receipts = np.stack([took, took, took, ends + lag_s + took, places], 1)
        return dataclasses.replace(made, fetches=fetches, received=receipts)

    found = Readings(MACHINE)
    found.runs["turn"] = [arriving(LoaderSettings(1, 1), 0.001)]
    found.runs["over"] = [arriving(over, 0.001 + later_s)]
    found.runs["one"] = [run(LoaderSettings(1, 4), 50.0)]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None
    assert fitted.transfer.crowded_latency_s == pytest.approx(later_s, abs=1e-9)


# --- What is fitted ---------------------------------------------------------------------------


def test_nothing_came_through() -> None:
    assert fit(Readings(MACHINE), Cores((1.0,))) is None


def test_costs_and_hand_off_are_read() -> None:
    fitted = fit(readings(truth()), Cores((1.0, 1.0)))
    assert fitted is not None
    works = [cost.work_s for cost in fitted.costs]
    assert np.mean(works) == pytest.approx(WALLS[1:150].mean() + GAP_S, rel=0.01)
    assert fitted.transfer.receive_s == pytest.approx(0.001)
    assert fitted.transfer.next_s == pytest.approx(0.0008)
    assert fitted.transfer.receive_wait_s == pytest.approx(0.0005)
    assert fitted.start_s == pytest.approx(0.1, rel=0.6)


@pytest.mark.parametrize("contention", slow_but([0.0, 0.1, 0.4], 0.1))
def test_contention_comes_out(contention: float) -> None:
    cores = Cores((1.0, 1.0), contention=contention)
    fitted = fit(readings(truth(cores).with_contention(contention)), Cores((1.0, 1.0)))
    assert fitted is not None
    assert fitted.cores.contention == pytest.approx(contention, abs=0.03)
    assert fitted.locked_share == 0


@pytest.mark.slow
@pytest.mark.parametrize("sharing", slow_but([0.0, 0.2], 0.2))
def test_what_taking_turns_costs_comes_out(sharing: float) -> None:
    fitted = fit(readings(truth(Cores((1.0, 1.0), sharing=sharing))), Cores((1.0, 1.0)))
    assert fitted is not None
    rates = [
        model.predict(LoaderSettings(6), Consumer(0.0)).batches_per_s
        for model in (fitted, truth(Cores((1.0, 1.0), sharing=sharing)))
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.04)


def test_a_short_rate_alone_is_no_loss_from_taking_turns() -> None:
    """Four workers whose batches took no more work than two workers': they waited."""
    found = readings(truth())
    found.runs["over"] = [
        dataclasses.replace(each, handed=5 + (each.handed - 5) * 1.3) for each in found.of("over")
    ]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None
    assert fitted.cores.sharing < 0.21  # what the comparison may overlook
    # What the cores were seen to do counts, where that was watched.
    for kind, busy in (("two", 1.6), ("over", 1.6)):
        found.runs[kind] = [
            dataclasses.replace(each, core_speed=CoreSpeed(1.0, busy)) for each in found.of(kind)
        ]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None
    assert fitted.cores.sharing > 0.3


def test_without_workers_nothing_contends() -> None:
    """What a process takes that has all threads was measured with all of them busy."""
    model = dataclasses.replace(
        truth().with_contention(0.4), alone=(BatchCost(0.0, 0.01, 2.0),), transfer=Transfer()
    )
    alone = model.predict(LoaderSettings(0), Consumer(0.0)).batches_per_s
    assert alone == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("others", "threads", "batches_per_s"), [(2.0, 2, 50), (0.0, 2, 20), (2.0, 1, 20)]
)
def test_threads_that_wait_for_one_another_without_a_core_are_no_work(
    monkeypatch: pytest.MonkeyPatch, others: float, threads: int, batches_per_s: float
) -> None:
    """Without workers, next to others: a worker's one thread makes the same batch in 20 ms."""
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    found = readings(truth())
    alone = run(LoaderSettings(0), 20.0)
    fetches = (records(np.full(len(alone.handed), 0.05), np.full(len(alone.handed), 0.05)),)
    found.runs["alone"] = [
        dataclasses.replace(
            alone, fetches=fetches, next_cpu=np.full(len(alone.handed), 0.05), others_cores=others
        )
    ]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None
    rate = fitted.predict(LoaderSettings(0), Consumer(0.0)).batches_per_s
    assert rate == pytest.approx(batches_per_s, rel=0.1)


def test_a_lock_is_no_contention() -> None:
    """Two workers that wait for one another, on cores that are free."""
    cores = Cores((1.0,) * 8)
    locked = dataclasses.replace(truth(cores), locked_share=0.8)
    fitted = fit(readings(locked, two=0.009, over=0.02, tight=0.009), cores)
    assert fitted is not None
    assert fitted.locked_share == pytest.approx(0.8, abs=0.05)
    assert fitted.cores.contention < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("crowded", [pytest.param(0.0, marks=pytest.mark.slow), 0.002])
def test_who_waits_for_a_lock_may_slow_who_has_it(crowded: float) -> None:
    """Four workers are slower than two: both come out, whatever crowded cores do in addition."""
    locked = dataclasses.replace(truth(crowded_wait_s=crowded), locked_share=0.7)
    found = readings(locked, two=0.009, over=0.03, tight=0.009)
    two = found.rate("two")
    assert two is not None
    found.runs["over"] = [
        dataclasses.replace(each, handed=5 + np.arange(len(each.handed)) / (0.93 * two))
        for each in found.of("over")
    ]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None and fitted.locked_share == pytest.approx(0.7, abs=0.05)
    assert 0.02 < fitted.convoy < 0.2
    for kind in ("two", "over"):
        each = found.of(kind)[0]
        assert same_rate(fitted, each, Consumer(0.0)) == pytest.approx(found.rate(kind), rel=0.02)


def test_pinning_takes_what_the_pinned_run_lost() -> None:
    costly = truth(pin_s=0.004, pinned_next_s=0.0002)
    fitted = fit(readings(costly), Cores((1.0, 1.0)))
    assert fitted is not None
    rates = [model.predict(PINNED, Consumer(0.0)).batches_per_s for model in (fitted, costly)]
    assert rates[0] == pytest.approx(rates[1], rel=0.03)


def test_a_run_with_more_workers_than_cores_keeps_to_the_ram() -> None:
    found = Readings(dataclasses.replace(MACHINE, available_bytes=1 << 30))
    assert found.settings("over") == LoaderSettings(4)
    found.runs["one"] = [
        dataclasses.replace(run(LoaderSettings(1), 50.0), private_bytes=(180 << 20,))
    ]
    assert found.settings("over") is None  # 2 of 180 MiB are half of the free RAM


def test_bisection_of_a_falling_function() -> None:
    assert bisect(lambda x: 10 - x, 7.0, 5.0) == pytest.approx(3.0, abs=0.01)
    assert bisect(lambda x: 10 - x, 12.0, 5.0) == 0.0
    assert bisect(lambda x: 10 - x, 1.0, 5.0) == pytest.approx(5.0, abs=0.01)


# --- Threads of a worker ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "share"),
    [
        (1.0, 0.0),
        pytest.param(1.6, 0.5, marks=pytest.mark.slow),
        pytest.param(4.0, 1.0, marks=pytest.mark.slow),
    ],
)
def test_what_threads_share_is_told_from_a_process_that_has_them(
    monkeypatch: pytest.MonkeyPatch, busy: float, share: float
) -> None:
    """Four threads: half of the work shared keeps 1 / (0.5 + 0.5 / 4) = 1.6 cores busy."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    found = readings(truth())
    alone = run(LoaderSettings(1), 50.0)
    quick = records(WALLS[:60] / busy, WALLS[:60])
    found.runs["alone"] = [dataclasses.replace(alone, settings=LoaderSettings(0), fetches=(quick,))]
    fitted = fit(found, Cores((1.0,) * 4))
    assert fitted is not None
    assert fitted.parallel_share == pytest.approx(share, abs=0.01)
    free = dataclasses.replace(fitted, cores=Cores((1.0,) * 4))
    one = free.predict(LoaderSettings(1), Consumer(0.0)).batches_per_s
    four = free.predict(LoaderSettings(1, worker_threads=4), Consumer(0.0)).batches_per_s
    assert four / one == pytest.approx(1 / (1 - share + share / 4), rel=0.15)


def test_threads_of_another_library_are_not_made_more() -> None:
    wide = (BatchCost(0.001, 0.01, 3.0),)
    assert threaded(wide, 0.8, 4) == wide
    narrow = (BatchCost(0.001, 0.01),)
    assert threaded(narrow, 0.8, 1) == narrow
    (shared,) = threaded(narrow, 0.5, 2)
    assert (shared.wait_s, shared.work_s, shared.width) == pytest.approx((0.001, 0.0075, 4 / 3))
