"""Garbage collections that come every so many batches of a worker."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.loader.measure.constants import receive_waits
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import Fitted, alone_costs, costs_of, pauses_of
from trainfit.loader.measure.model import BatchCost, Load, Pauses, Transfer, simulate
from trainfit.loader.measure.records import (
    BEGAN,
    COLLECTED,
    COLUMNS,
    CPU,
    WALL,
    Records,
    Run,
    collected,
)
from trainfit.loader.probe import Measured
from trainfit.results.dataloader import LoaderSettings, Probe
from trainfit.results.runs.measurement import Consumer

BATCH_S, PAUSE_S = 0.01, 0.08


def records(
    count: int, *, first: int = 10, every: int = 12, pause_s: float = PAUSE_S, small_s: float = 0.0
) -> Records:
    """A worker's, with a full collection every so many batches."""
    made = np.zeros((count, COLUMNS))
    made[:, COLLECTED] = small_s
    made[first::every, COLLECTED] = pause_s
    made[:, WALL] = made[:, CPU] = BATCH_S + made[:, COLLECTED]
    return made


@given(
    first=st.integers(0, 15),
    every=st.integers(2, 15),
    count=st.integers(50, 80),
    small_s=st.floats(0, 0.01),
)
def test_what_is_far_beyond_what_was_seen_goes_on_alike(
    first: int, every: int, count: int, small_s: float
) -> None:
    shape = {"first": first, "every": every, "small_s": small_s}
    found = pauses_of([records(count, **shape), records(count // 2, **shape)])
    expected = records(1000, **shape)[:, COLLECTED]
    assert [found.of(number) for number in range(1000)] == pytest.approx(list(expected))
    assert found.mean == pytest.approx(((every - 1) * small_s + PAUSE_S) / every)


def test_full_collections_of_all_workers_count_and_shift_by_one() -> None:
    """The count of objects does not divide by that of a batch: some come a batch later."""
    one, other = records(60), records(50, first=11, pause_s=0.06)
    found = pauses_of([one, other])
    assert found.of(10) == pytest.approx((5 * 0.08 + 4 * 0.06) / 9)
    assert [n for n in range(60) if found.of(n)] == [10, 22, 34, 46, 58]


def test_no_collections() -> None:
    assert pauses_of([]) == Pauses()
    assert pauses_of([records(20, pause_s=0.0)]) == Pauses()
    assert pauses_of([records(20)[:, :COLLECTED]]) == Pauses()
    assert Pauses().of(3) == Pauses().mean == 0.0


def test_one_collection_has_no_period_but_what_was_seen() -> None:
    found = pauses_of([records(20)])
    assert found.mean == pytest.approx(PAUSE_S / 20)
    assert found.of(10) == found.of(30) == PAUSE_S


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_prediction_is_of_no_more_collections_than_there_are_in_the_long_run(
    workers: int,
) -> None:
    """Of 20 counted batches a collection of 8 batches' time hits one or two, by where the process
    stood before: that is not known, and what is predicted does not hang on it."""
    costs = (BatchCost(0.0, BATCH_S),)
    settings, each_s = LoaderSettings(workers, 1), BATCH_S + PAUSE_S / 12

    def predicted(first: int) -> float:
        pauses = pauses_of([records(70, first=first)])
        cores = Cores((1.0,) * workers)
        fitted = Fitted(costs, (), Transfer(), Transfer(), cores, 0.0, pauses=pauses)
        measured = Measured(cast(Probe, None), fitted)
        return measured.predict(settings, Consumer(0.0), 20 / workers * each_s).batches_per_s

    found = [predicted(first) for first in range(12)]
    assert found == pytest.approx([workers / each_s] * 12, rel=0.06)


def test_pauses_of_nothing_cannot_come_again() -> None:
    with pytest.raises(ValueError, match="expected a period"):
        Pauses((1.0, 2.0), 3)
    with pytest.raises(ValueError, match="expected a period"):
        Pauses((1.0,), 0)


def test_a_workers_batches_cost_what_they_cost_without_collections() -> None:
    run = Run(LoaderSettings(1, 4), 0.0, fetches=(records(40),))
    costs = costs_of(run)
    assert costs is not None
    assert costs.wall_s[costs.seen] == pytest.approx(BATCH_S)
    assert costs.cpu_s[costs.seen] == pytest.approx(BATCH_S)


def test_alone_collections_are_a_part_of_what_a_batch_costs() -> None:
    """Two runs of one process: the count goes on between them."""
    made = records(60)
    runs = [
        Run(LoaderSettings(0), 0.0, fetches=(part,), next_cpu=part[:, CPU])
        for part in (made[:25], made[25:])
    ]
    found = np.array([cost.work_s for cost in alone_costs(runs)])
    assert found == pytest.approx(BATCH_S + PAUSE_S / 12)
    assert alone_costs([]) == ()


def rate(load: Load, settings: LoaderSettings) -> float:
    return simulate(load, settings, 600).batches_per_s


def test_the_model_makes_them_by_each_workers_own_count() -> None:
    load = Load((BatchCost(0.0, BATCH_S),), pauses=pauses_of([records(60)]))
    for workers in (1, 3):
        long_run = workers / (BATCH_S + PAUSE_S / 12)
        assert rate(load, LoaderSettings(workers, 2)) == pytest.approx(long_run, rel=0.02)
    free = dataclasses.replace(load, pauses=Pauses())
    assert rate(free, LoaderSettings(1, 2)) == pytest.approx(1 / BATCH_S, rel=0.02)


def test_who_takes_a_batch_waits_for_its_workers_collection() -> None:
    """A batch is ready, but its worker's other thread hands it over."""
    waits = Transfer(latency_s=0.006)  # arrives in the middle of the next batch
    load = Load((BatchCost(0.0, BATCH_S),), waits, pauses=Pauses((0.0, PAUSE_S), 2))
    waited = simulate(load, LoaderSettings(1, 4), 40).waited_s
    assert max(waited) == pytest.approx(PAUSE_S + BATCH_S, rel=0.1)
    assert sum(waited[10:]) / 30 == pytest.approx(BATCH_S + PAUSE_S / 2, rel=0.1)


def test_a_wait_for_a_collection_is_no_cost_of_the_hand_off() -> None:
    """The worker is three batches ahead when it collects: whoever takes one over waits."""
    settings = LoaderSettings(1, 4)
    worker = records(60)
    begins = worker[:, BEGAN] = np.concatenate([[0.0], np.cumsum(worker[:, WALL])[:-1]])
    pause = int(np.flatnonzero(collected(worker) > PAUSE_S / 2)[1])
    places = np.arange(30.0)
    done = begins[:30] + 4 * BATCH_S
    took = np.full(30, 0.0005)
    took[pause - 3] = PAUSE_S  # it began to wait while the worker was at its collection
    done[pause - 3] = begins[pause] + 1.05 * PAUSE_S
    zeros = np.zeros(30)
    receipts = np.stack([took, zeros, zeros, done, places], 1)
    run = Run(settings, 0.0, handed=done, fetches=(worker,), received=receipts)
    waits = receive_waits(run)
    assert pause - 3 >= run.warm and len(waits) >= 10
    assert waits.max() == pytest.approx(0.0005)
