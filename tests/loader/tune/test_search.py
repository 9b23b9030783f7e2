"""The choice of settings and its confirmation, on simulated and invented runs."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_cases import some_of
from helpers_costs import lognormal_costs
from trainfit.findings.facts import Failure
from trainfit.loader.confirmation import SURPRISE, Confirmation, ConfirmingRun, decide
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import Fitted, fit_contention
from trainfit.loader.measure.model import BatchCost, Transfer
from trainfit.loader.measure.records import Run, warm_up
from trainfit.loader.search import (
    OWN_ERROR,
    WITHIN,
    Choice,
    Goal,
    beyond_knee,
    estimated_rates,
    keep_workers,
    search,
)
from trainfit.loader.tuner import run_seconds
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

PRESENT = LoaderSettings(0)
#: An example simulates dozens of settings, which takes a second: fewer where they are the same
#: each time (``make test``), more where they are by chance.
EXAMPLES = 2 if settings.default.derandomize else 20


def fitted(
    cores: float = 4, *, mean_s: float = 0.04, waits: bool = False, variation: float = 0.2
) -> Fitted:
    costs = lognormal_costs(mean_s, variation, 60, seed=5, work=not waits)
    transfer = Transfer(receive_s=5e-4, pin_s=2e-4, next_s=3e-4, latency_s=5e-4)
    return Fitted(costs, costs, transfer, transfer, Cores((1.0,) * int(cores)), 0.03)


def goal(step_s: float = 0.0, present: LoaderSettings = PRESENT, most: int = 8) -> Goal:
    return Goal(Consumer(step_s), present, most)


def real(settings: LoaderSettings, rate: float, failure: Failure | None = None) -> Run:
    """A run that handed batches over at this rate."""
    handed = np.arange(warm_up(settings) + 400) / rate
    waited = np.full(len(handed), 0.1 / rate)
    return Run(settings, 0.0, handed=handed, waited=waited, failure=failure)


class Machine:
    """Runs settings at the rates that a model gives, times a factor."""

    def __init__(self, model: Fitted, factor: float = 1.0) -> None:
        self.model, self.factor, self.ran = model, factor, list[LoaderSettings]()

    def __call__(self, settings: LoaderSettings, consumer: Consumer) -> Run:
        self.ran.append(settings)
        return real(settings, self.factor * self.model.predict(settings, consumer).batches_per_s)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    cores=st.integers(1, 6),
    mean_s=st.floats(0.002, 0.2),
    waits=st.booleans(),
    variation=st.floats(0, 1),
    step_s=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_the_smallest_settings_within_two_percent_are_chosen(
    cores: int, mean_s: float, waits: bool, variation: float, step_s: float
) -> None:
    model = fitted(cores, mean_s=mean_s, waits=waits, variation=variation)
    choice = search(model, goal(step_s))
    best, rate = choice.best(), choice.best_rate()
    assert choice.see(best).batches_per_s >= WITHIN * rate
    for each in choice.candidates.values():
        if each.settings.num_workers < best.num_workers:
            assert each.batches_per_s < WITHIN * rate
    # One worker less was looked at, so nothing smaller was overlooked by leaping over it.
    assert max(0, best.num_workers - 1) in {each.num_workers for each in choice.candidates}


@pytest.mark.parametrize(
    ("fastest", "seconds"),
    # The first run, others that may be as fast, one that is hardly slower: almost ten batches of
    # it, and those that are 1.8 and many times as slow.
    [(0.0, 10.0), (2.4, 10.0), (3.6, 10.0), (3.751, 3.99), (4.5, 0.4 * 10 * 0.4758), (20.0, 1.6)],
)
def test_what_cannot_be_chosen_is_run_for_fewer_batches(fastest: float, seconds: float) -> None:
    assert run_seconds(0.4, fastest, 20.0) == pytest.approx(max(seconds, 4.0), rel=0.01)
    # Of longer batches, where that is more than a run takes at least.
    assert run_seconds(4.0, fastest / 10, 200.0) == pytest.approx(10 * seconds, rel=0.01)


@pytest.mark.slow
def test_a_quota_counts_and_not_the_affinity() -> None:
    """4 CPUs, of which a cgroup gives 1.5."""
    model = dataclasses.replace(fitted(4), cores=Cores((1.0,) * 4, quota=1.5))
    assert search(model, goal()).best().num_workers < 4
    assert search(fitted(4), goal()).best().num_workers >= 4


def test_a_gpu_that_is_the_limit_needs_few_workers() -> None:
    slow = search(fitted(), goal(step_s=0.2))
    assert slow.best() == LoaderSettings(1)
    # 0.2 s of step and 0.04 s of batch in turn are 17% short.
    assert slow.see(LoaderSettings(0)).batches_per_s < WITHIN * slow.best_rate()
    assert search(fitted(), goal(step_s=4.0)).best() == LoaderSettings(0)


def test_workers_are_not_given_up_for_what_cannot_be_told_apart() -> None:
    """The step of a GPU that is the limit would begin later by each batch."""
    some = goal(step_s=4.0, present=LoaderSettings(3))
    assert search(fitted(), some).best().num_workers == 1
    tiny = search(fitted(mean_s=1e-5), goal(present=LoaderSettings(3)))
    assert tiny.best().num_workers == 0, "their transfer costs more than the batches"


def test_what_cannot_be_is_not_chosen() -> None:
    def infeasible(settings: LoaderSettings) -> str:
        return "no RAM" if settings.num_workers > 2 else ""

    choice = search(fitted(), dataclasses.replace(goal(), infeasible=infeasible))
    assert choice.best().num_workers == 2
    assert choice.look(LoaderSettings(4)).infeasible == "no RAM"


@pytest.mark.slow
def test_order_and_start_method_are_the_users() -> None:
    present = LoaderSettings(1, in_order=False, start_method="spawn", persistent_workers=True)
    best = search(fitted(), goal(present=present, most=2)).best()
    assert (best.in_order, best.start_method) == (False, "spawn")


def test_nothing_differs_then_the_present_pinning_stays() -> None:
    model = dataclasses.replace(fitted(), transfer=Transfer(), cold_transfer=Transfer())
    for pinned in (False, True):
        present = LoaderSettings(1, pin_memory=pinned)
        assert search(model, goal(present=present)).best().pin_memory is pinned


@pytest.mark.slow
def test_pageable_copies_speak_for_pinning() -> None:
    consumer = Consumer(0.01, pageable_s=0.005)
    assert search(fitted(), Goal(consumer, PRESENT, 8)).best().pin_memory


# --- Threads of libraries -----------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    cores=st.integers(1, 4),
    free_s=st.floats(0.005, 0.1),
    held_s=st.floats(0.005, 0.1),
    step_s=st.sampled_from([0.0, 0.03]),
)
def test_libraries_are_held_down_where_that_is_faster(
    cores: int, free_s: float, held_s: float, step_s: float
) -> None:
    free, held = fitted(cores, mean_s=free_s), fitted(cores, mean_s=held_s)
    choice = search(free, goal(step_s), {1: held})
    best = choice.best()
    assert choice.see(best).batches_per_s >= WITHIN / 1.05 * choice.best_rate()
    without = search(free, goal(step_s))
    assert choice.best_rate() >= without.best_rate()
    if best.library_threads is None:  # no more workers than it would take held down
        others = [s for s in choice.candidates if s.num_workers < best.num_workers]
        assert all(choice.see(s).batches_per_s < WITHIN * choice.best_rate() for s in others)


@functools.cache
def with_held() -> Choice:
    """Held down it is as fast."""
    return search(fitted(mean_s=0.05), goal(), {1: fitted(mean_s=0.05)})


@pytest.mark.parametrize(("gain", "threads"), [(1.03, None), (1.10, 1)])
def test_a_gain_that_two_runs_could_differ_by_asks_for_no_variable(
    gain: float, threads: int | None
) -> None:
    choice = with_held()
    two = dataclasses.replace(choice.goal.present, num_workers=2)
    held = dataclasses.replace(two, library_threads=1)
    assert choice.smallest({two: 10.0, held: 10.0 * gain}).library_threads == threads


def test_as_good_without_a_variable_it_stays_unset() -> None:
    choice = with_held()
    assert choice.best().library_threads is None
    assert {each.library_threads for each in choice.candidates} == {None, 1}
    # Without workers there is nothing to hold down.
    assert all(s.library_threads is None for s in choice.candidates if not s.num_workers)


@pytest.mark.slow
def test_held_settings_are_confirmed_and_refitted_by_their_own_model() -> None:
    """They are 1.5 times as fast by the model, and half as fast as that in truth."""
    free, held = fitted(mean_s=0.03), fitted(mean_s=0.02)

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        model, factor = (free, 1.0) if settings.library_threads is None else (held, 0.5)
        return real(settings, factor * model.predict(settings, consumer).batches_per_s)

    confirmation = Confirmation(search(free, goal(), {1: held}), runner, 4)
    chosen = confirmation.run()
    assert confirmation.trials[0].settings.library_threads == 1
    assert confirmation.refitted and confirmation.choice.fitted is free
    assert chosen.library_threads is None


# --- Confirmation -----------------------------------------------------------------------------


def confirmed(machine: Machine, model: Fitted, most: int = 4, step_s: float = 0.0) -> Confirmation:
    confirmation = Confirmation(search(model, goal(step_s)), machine, most)
    confirmation.run()
    return confirmation


def fastest_of(choice: Choice) -> LoaderSettings:
    return choice.smallest(choice.rates(), 1.0)


@pytest.mark.parametrize("most", some_of([0, 1, 2, 4], 2))
def test_no_more_runs_than_allowed(most: int) -> None:
    machine = Machine(fitted(), 0.7)
    confirmation = confirmed(machine, fitted(), most)
    assert len(confirmation.trials) == len(machine.ran) <= most


def test_the_choice_the_present_a_rival_and_twice_the_choice_are_run() -> None:
    machine = Machine(fitted())
    confirmation = confirmed(machine, fitted())
    choice = confirmation.choice
    chosen = choice.best()
    twice = dataclasses.replace(chosen, num_workers=2 * chosen.num_workers)
    counts = (0, chosen.num_workers)
    others = {s: r for s, r in choice.rates().items() if s.num_workers not in counts}
    assert machine.ran == [chosen, PRESENT, choice.smallest(others, 1.0), twice]
    assert [each.why for each in confirmation.trials] == [
        "recommended",
        "present",
        "fastest",
        "beyond the saturation point",
    ]
    for trial in confirmation.trials:
        assert trial.measured == pytest.approx(trial.predicted, rel=1e-6)


def test_a_rival_is_recommended_where_it_is_faster_than_the_model_said() -> None:
    model = fitted()
    chosen = search(model, goal()).best()

    class Surprising(Machine):
        def __call__(self, settings: LoaderSettings, consumer: Consumer) -> Run:
            self.factor = 1.1 if settings.num_workers > chosen.num_workers else 1.0
            return super().__call__(settings, consumer)

    hurried = Confirmation(search(model, goal()), Surprising(model), 4, in_time=lambda: False)
    hurried.run()
    assert {trial.why for trial in hurried.trials} <= {
        "recommended",
        "present",
        "beyond the saturation point",
    }
    found = Confirmation(search(model, goal()), Surprising(model), 4).run()
    assert found.num_workers > chosen.num_workers
    assert Confirmation(search(model, goal()), Machine(model), 4).run() == chosen


@pytest.mark.parametrize(
    ("noise", "measured", "low", "high"),
    [
        (1e-9, 0.9, 0.9, 0.9),  # runs that never differ are right
        (0.04, 0.96, 0.97, 0.98),  # as noisy as the model: halfway to what it says by then
        (0.04, 0.5, 0.5, 0.521),  # never further from the run than runs differ
    ],
)
def test_runs_and_model_are_weighed_by_what_each_may_be_off(
    noise: float, measured: float, low: float, high: float
) -> None:
    choice = search(fitted(), goal())
    best = choice.best()
    said = choice.look(best).batches_per_s
    found = estimated_rates(choice, {best: measured * said}, noise)
    assert low - 1e-6 <= found[best] / said <= high
    other = next(s for s in found if s.num_workers != best.num_workers)
    common = math.log(found[other] / choice.look(other).batches_per_s)
    assert common == pytest.approx(math.log(measured) / (2 + (noise / OWN_ERROR) ** 2))


def test_a_run_that_differs_by_luck_alone_changes_nothing() -> None:
    """The present settings are as fast as any; one rival's run was 5% faster by chance."""
    model = fitted(2)
    present = LoaderSettings(4)
    choice = search(model, goal(present=present))
    rival = dataclasses.replace(present, prefetch_factor=8)
    rate = choice.look(present).batches_per_s
    runs = {present: real(present, rate), rival: real(rival, 1.03 * rate)}
    trials = [ConfirmingRun(each, rate, run, "") for each, run in runs.items()]
    assert decide(choice, trials, rival, "cores", noise=0.06).verdict != "change"
    assert decide(choice, trials, rival, "cores", noise=1e-9).verdict == "change"


def test_a_choice_that_is_slower_than_others_promise_is_given_up() -> None:
    """No workers were nearly as good by the model, and are a tenth slower than it said."""
    model = fitted(2)
    choice = search(model, goal())
    one = LoaderSettings(0)
    promised = 0.985 * choice.best_rate()
    choice.candidates[one] = dataclasses.replace(choice.see(one), batches_per_s=promised)
    assert choice.best() == one

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        rate = 0.88 * promised if settings == one else choice.look(settings).batches_per_s
        return real(settings, rate)

    confirmation = Confirmation(choice, runner, 4)
    assert confirmation.run().num_workers > 0
    assert [trial.settings for trial in confirmation.trials][:2] == [
        one,
        choice.smallest({s: r for s, r in choice.rates().items() if s != one}),
    ]


def test_a_rival_may_fail() -> None:
    model = fitted()
    choice = search(model, goal())
    chosen = choice.best()

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        fails = settings.num_workers > chosen.num_workers
        failure = Failure(exit_code=-7) if fails else None
        return real(settings, model.predict(settings, consumer).batches_per_s, failure)

    confirmation = Confirmation(choice, runner, 4)
    assert confirmation.run() == chosen
    assert choice.look(confirmation.trials[2].settings).infeasible


@pytest.mark.slow
def test_any_order_will_do_where_the_user_says_so() -> None:
    uneven = fitted(variation=2.0, waits=True)
    in_order = search(uneven, goal()).best()
    either = search(uneven, dataclasses.replace(goal(), any_order=True))
    assert in_order.in_order
    assert not fastest_of(either).in_order
    assert {each.in_order for each in either.candidates} == {True, False}
    # Where nothing is gained by it (batches alike, a core for each), the order stays.
    even = search(fitted(8, variation=0.0), dataclasses.replace(goal(most=4), any_order=True))
    assert even.best().in_order


@pytest.mark.slow
def test_a_slower_machine_than_predicted_is_fitted_and_the_choice_made_again() -> None:
    """The probe saw no contention; four workers do."""
    truth = fitted().with_contention(0.12)
    machine = Machine(truth)
    confirmation = confirmed(machine, fitted())
    first = confirmation.trials[0]
    assert first.measured is not None and first.measured < (1 - SURPRISE) * first.predicted
    assert confirmation.refitted
    assert confirmation.choice.fitted.cores.contention == pytest.approx(0.12, abs=0.02)
    assert confirmation.choice.best() == search(truth, goal()).best()


def test_a_setting_that_fails_is_not_recommended() -> None:
    model = fitted()
    bad = search(model, goal()).best()

    def run(settings: LoaderSettings, consumer: Consumer) -> Run:
        failure = Failure(error_type="RuntimeError") if settings == bad else None
        return real(settings, model.predict(settings, consumer).batches_per_s, failure)

    confirmation = Confirmation(search(model, goal()), run, 4)
    assert confirmation.run() != bad
    assert confirmation.trials[0].measured is None
    assert "failed" in confirmation.choice.candidates[bad].infeasible


def test_present_settings_that_measure_as_well_with_no_more_workers_stay() -> None:
    model = fitted(waits=True)
    chosen = search(model, goal(step_s=0.01)).best()
    present = dataclasses.replace(chosen, num_workers=chosen.num_workers - 1, prefetch_factor=4)
    rate = model.predict(chosen, Consumer(0.01)).batches_per_s

    def run(settings: LoaderSettings, consumer: Consumer) -> Run:
        return real(settings, rate if settings.num_workers >= present.num_workers else 1.0)

    confirmation = Confirmation(search(model, goal(0.01, present=present)), run, 4)
    assert confirmation.run() == present


# --- Around -----------------------------------------------------------------------------------


def two_workers(model: Fitted) -> float:
    return model.predict(LoaderSettings(2, 4), Consumer(0.0)).batches_per_s


def test_contention_is_found_again() -> None:
    truth = fitted(2).with_contention(0.3)
    found = fit_contention(fitted(2), two_workers, two_workers(truth), 1.0)
    assert found == pytest.approx(0.3, abs=0.01)


def test_where_cores_do_not_bound_the_cpu_time_tells_of_contention() -> None:
    model = fitted(2, waits=True)
    rate = two_workers(model)
    assert fit_contention(model, two_workers, 0.9 * rate, 1.07) == pytest.approx(0.07)
    assert fit_contention(model, two_workers, 0.9 * rate, 0.9) == 0.0


def test_workers_are_kept_where_starting_them_costs_a_percent() -> None:
    four = LoaderSettings(4)
    assert keep_workers(PRESENT, four, start_s=0.05, epoch_s=10.0)
    assert not keep_workers(PRESENT, four, start_s=0.05, epoch_s=100.0)
    assert not keep_workers(PRESENT, four, start_s=0.05, epoch_s=None)
    assert keep_workers(LoaderSettings(1, persistent_workers=True), four, 0.05, 100.0)
    assert not keep_workers(PRESENT, LoaderSettings(0), 9.0, 1.0)


def test_beyond_the_knee_is_no_candidate() -> None:
    choice = search(fitted(2), goal(most=4))
    chosen, before = choice.best(), choice.best_rate()
    beyond = beyond_knee(choice, chosen, (2, 8))
    assert [each.settings.num_workers for each in beyond] == [
        2 * chosen.num_workers,
        8 * chosen.num_workers,
    ]
    assert all(each.settings not in choice.candidates for each in beyond[1:])
    assert (choice.best(), choice.best_rate()) == (chosen, before)


def test_costs_of_width_share_the_cores() -> None:
    """A decoder with four threads: four workers of it are no faster than the cores."""
    wide = (BatchCost(0.0, 0.01, 4.0),)
    model = Fitted(wide, wide, Transfer(), Transfer(), Cores((1.0,) * 4), 0.0)
    one = model.predict(LoaderSettings(1), Consumer(0.0)).batches_per_s
    four = model.predict(LoaderSettings(4), Consumer(0.0)).batches_per_s
    assert one == pytest.approx(100, rel=0.01)
    assert four == pytest.approx(100, rel=0.03)
