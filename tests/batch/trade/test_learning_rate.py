"""Rules for the learning rate, and how batches are split."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.batch.advice import (
    Split,
    beta,
    epoch,
    factor,
    last_micro_batch,
    learning_rate,
    left_over,
    same_samples,
    split,
)
from trainfit.results.batch import Epoch, Interval, Optimizer

BATCH = st.integers(1, 4096)
OPTIMIZER = st.sampled_from(["sgd", "adam"])


@given(OPTIMIZER, BATCH, BATCH, BATCH, st.floats(0.1, 1e6))
def test_two_changes_are_one(o: Optimizer, a: int, b: int, c: int, noise: float) -> None:
    both = factor(o, a, b, noise) * factor(o, b, c, noise)
    assert both == pytest.approx(factor(o, a, c, noise))
    assert factor(o, a, a, noise) == 1.0


@given(OPTIMIZER, BATCH, BATCH)
def test_far_below_the_noise_scale_the_rules_are_the_known_ones(
    optimizer: Optimizer, a: int, b: int
) -> None:
    wanted = b / a if optimizer == "sgd" else math.sqrt(b / a)
    assert factor(optimizer, a, b, math.inf) == pytest.approx(wanted)
    assert factor(optimizer, a, b, 1e9) == pytest.approx(wanted, rel=1e-4)
    assert factor(optimizer, a, b, 1e-9) == pytest.approx(1.0)


@given(OPTIMIZER, BATCH, BATCH, st.floats(0.1, 1e6))
def test_the_noise_scale_only_flattens(o: Optimizer, a: int, b: int, noise: float) -> None:
    plain, found = factor(o, a, b, math.inf), factor(o, a, b, noise)
    assert min(1.0, plain) * (1 - 1e-9) <= found <= max(1.0, plain) * (1 + 1e-9)


def test_a_learning_rate_with_its_range() -> None:
    found = learning_rate("sgd", 64, 16, Interval(1e4, 8e3, 1.2e4), value=0.1)
    assert found.value == pytest.approx(0.025, rel=0.02) and not found.warm_up
    assert found.low is not None and found.high is not None and found.factor is not None
    assert found.low <= found.factor <= found.high and "well below" in found.holds
    adam = learning_rate("adam", 16, 256, None, value=1e-3, second=0.999)
    assert adam.value == pytest.approx(4e-3) and adam.beta2 == pytest.approx(0.999**16)
    assert adam.warm_up and "not known" in adam.holds
    assert adam.low == pytest.approx(1.0) and adam.high == pytest.approx(4.0)
    flat = learning_rate("sgd", 1000, 4000, Interval(20.0, 10.0, 30.0), value=0.1)
    assert flat.value == pytest.approx(0.1, rel=0.05) and "stays" in flat.holds
    near = learning_rate("sgd", 100, 400, Interval(200.0, 150.0, 500.0))
    assert near.value is None and "flattened" in near.holds
    other = learning_rate("other", 8, 16, None, value=0.1)
    assert other.factor is None and other.value is None and "tune it" in other.holds


def test_beta1_is_for_a_larger_batch_alone() -> None:
    found = learning_rate("adam", 16, 64, None, first=0.9)
    assert found.beta1 == pytest.approx(0.9**4)
    assert learning_rate("adam", 64, 16, None, first=0.9).beta1 is None
    assert learning_rate("sgd", 16, 64, None, first=0.9).beta1 is None


def test_the_second_moment_keeps_its_half_life_in_samples() -> None:
    half_life = math.log(0.5) / math.log(0.999) * 32
    assert math.log(0.5) / math.log(beta(0.999, 32, 8)) * 8 == pytest.approx(half_life)


@given(BATCH, st.integers(1, 512), st.integers(1, 8))
def test_a_split_fits_and_keeps_the_batch(effective: int, largest: int, gpus: int) -> None:
    found = split(effective, largest, gpus)
    micro, accumulation = found.micro, found.accumulation
    assert 1 <= micro <= largest and accumulation >= 1
    made = micro * accumulation * gpus
    assert effective <= made < effective + accumulation * gpus + gpus * largest


@pytest.mark.parametrize(
    ("effective", "largest", "gpus", "wanted"),
    [(64, 24, 1, (16, 4)), (64, 16, 2, (16, 2)), (64, 64, 1, (64, 1)), (30, 7, 1, (6, 5)),
     (13, 5, 1, (5, 3)), (4, 16, 8, (1, 1))],
)  # fmt: skip
def test_splits(effective: int, largest: int, gpus: int, wanted: tuple[int, int]) -> None:
    assert split(effective, largest, gpus) == Split(*wanted, gpus)


def test_epochs() -> None:
    assert epoch(1000, Split(64)) == Epoch(64, 15, 40)
    assert epoch(1024, Split(64)).dropped == 0
    # 250 samples a GPU: 31 micro-batches of 8 and 2 samples; 7 steps of 4, and 3 micro-batches.
    of_four = Split(8, 4, 4)
    assert epoch(1000, of_four) == Epoch(128, 7, 1000 - 31 * 8 * 4)
    assert (left_over(1000, of_four), last_micro_batch(1000, of_four)) == (3, 2)
    assert same_samples(1000, 64, 48) == 1334
