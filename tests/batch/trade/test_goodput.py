"""Goodput: properties that hold for every noise scale and every table of step times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.batch.advice import accumulated, curve, efficiency, over, samples_factor, steps_factor
from trainfit.results.batch import Interval, StepTime

BATCH = st.integers(1, 4096)
NOISE = st.floats(0.1, 1e6)
STEPS = st.lists(
    st.builds(StepTime, st.integers(1, 256), st.integers(1, 4), st.integers(1, 4),
              st.floats(1e-3, 10.0)),
    min_size=1, max_size=8,
)  # fmt: skip


@given(BATCH, BATCH, NOISE)
def test_a_sample_of_a_larger_batch_is_worth_less(a: int, b: int, noise: float) -> None:
    small, large = sorted((a, b))
    assert efficiency(small, noise, small) == 1.0
    worth = efficiency(large, noise, small)
    assert small / large - 1e-12 <= worth <= 1.0
    assert efficiency(large, math.inf, small) == 1.0
    # A larger batch needs fewer steps and more samples, never more steps or fewer samples.
    assert steps_factor(small, large, noise) <= 1.0 <= samples_factor(small, large, noise) + 1e-12


@given(BATCH, BATCH, NOISE)
def test_the_factors_are_mccandlishs(before: int, after: int, noise: float) -> None:
    def steps(batch: int) -> float:
        return 100 * (1 + noise / batch)

    def samples(batch: int) -> float:
        return 100 * noise * (1 + batch / noise)

    assert steps_factor(before, after, noise) == pytest.approx(steps(after) / steps(before))
    assert samples_factor(before, after, noise) == pytest.approx(samples(after) / samples(before))


@given(STEPS, NOISE, NOISE, BATCH)
def test_the_best_point_is_within_its_own_range(
    steps: list[StepTime], a: float, b: float, reference: int
) -> None:
    low, high = sorted((a, b))
    found = curve(steps, Interval((low + high) / 2, low, high), reference)
    best = found.best_point
    assert all(point.per_s <= best.per_s for point in found.points)
    assert found.flat_from <= best.step.batch_size <= found.flat_to
    assert found.best_from <= best.step.batch_size <= found.best_to
    for point in found.points:
        assert point.low * (1 - 1e-9) <= point.per_s <= point.high * (1 + 1e-9)


@given(STEPS, NOISE, NOISE, BATCH)
def test_more_noise_never_makes_a_smaller_batch_best(
    steps: list[StepTime], a: float, b: float, reference: int
) -> None:
    small, large = (
        curve(steps, Interval(n, n, n), reference).best_point.step.batch_size
        for n in sorted((a, b))
    )
    assert small <= large


@given(STEPS, NOISE, BATCH, BATCH)
def test_the_reference_does_not_change_what_is_best(
    steps: list[StepTime], noise: float, a: int, b: int
) -> None:
    first, second = (curve(steps, Interval(noise, noise, noise), r) for r in (a, b))
    one, two = first.best_point.step, second.best_point.step
    assert one == two or first.points[first.best].per_s == pytest.approx(
        first.points[second.best].per_s
    )


def test_at_the_ends_throughput_and_steps_decide() -> None:
    steps = [StepTime(8, 1, 1, 0.10), StepTime(64, 1, 1, 0.20), StepTime(512, 1, 1, 1.50)]
    unbounded = curve(steps, Interval(None, 1e6, None), 8)
    assert unbounded.best_point.step.micro_batch == 512  # the most samples a second
    tiny = curve(steps, Interval(1e-6, 0.0, 1e-6), 8)
    assert tiny.best_point.step.micro_batch == 8  # the most steps a second
    between = curve(steps, Interval(200.0, 20.0, 20000.0), 8)
    assert between.best_point.step.micro_batch == 64
    assert (between.best_from, between.best_to) == (64, 512)


def test_a_curve_needs_a_step() -> None:
    with pytest.raises(ValueError, match="step time"):
        curve([], Interval(1.0, 1.0, 1.0), 8)


def test_an_interval_without_an_end_goes_to_the_limit() -> None:
    found = over(Interval(None, 100.0, None), lambda noise: samples_factor(10, 100, noise))
    assert found.value is None and found.low == 1.0
    assert found.high == pytest.approx(200 / 110)
    zero = over(Interval(0.0, 0.0, 1.0), lambda noise: steps_factor(10, 100, noise))
    assert zero.value == pytest.approx(1.0)


def test_accumulation_costs_at_most_a_step_for_each_micro_batch() -> None:
    found = accumulated([StepTime(8, 1, 1, 0.1)], 40)
    assert [(each.accumulation, each.seconds, each.basis) for each in found] == [
        (1, 0.1, "measured"), (2, 0.2, "derived"), (4, 0.4, "derived"),
    ]  # fmt: skip
    assert len(accumulated([StepTime(8, 4, 1, 0.4)], 32)) == 1
    line = accumulated([StepTime(8, 1, 1, 0.12), StepTime(8, 4, 1, 0.42)], 64)
    assert [(e.accumulation, pytest.approx(e.seconds)) for e in line] == [
        (1, 0.12), (2, 0.22), (4, 0.42), (8, 0.82),
    ]  # fmt: skip
