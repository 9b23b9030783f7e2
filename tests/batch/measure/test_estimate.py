"""The arithmetic of two batch sizes: unbiased, and with intervals that hold what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.batch.estimate import (
    LEAST_STEPS,
    Weights,
    estimate,
    first_against_all,
    mean_against_all,
    t_quantile,
)

SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=6)


@given(SIZES, st.sampled_from(["mean", "sum"]), st.integers(1, 8), st.floats(0, 1e3))
def test_expected_squares_give_back_what_they_are_of(
    sizes: list[int], loss: str, ranks: int, trace: float
) -> None:
    for weights in (first_against_all(sizes, loss, ranks), mean_against_all(sizes)):  # type: ignore[arg-type]
        assert weights.can_tell
        small = np.array([weights.small_g * 2.0 + weights.small_t * trace])
        big = np.array([weights.big_g * 2.0 + weights.big_t * trace])
        square, found = weights.solve(small, big)
        assert square[0] == pytest.approx(2.0, rel=1e-6)
        assert found[0] == pytest.approx(trace, rel=1e-6, abs=1e-6)


def test_equal_micro_batches_give_the_formulas_of_the_paper() -> None:
    """McCandlish et al. 2018, A.2: with B_small = b and B_big = k·b."""
    b, k, small, big = 8, 4, 5.0, 3.0
    weights = first_against_all([b] * k)
    square, trace = weights.solve(np.array([small]), np.array([big * k**2]))
    assert square[0] == pytest.approx((k * b * big - b * small) / (k * b - b))
    assert trace[0] == pytest.approx((small - big) / (1 / b - 1 / (k * b)))


def test_one_batch_size_tells_nothing() -> None:
    assert not first_against_all([8]).can_tell
    assert first_against_all([8], ranks=2).can_tell
    assert Weights(1, 1, 1, 1 / 8).can_tell


def drawn(noise_scale: float, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """|G|² (1) and tr Σ of steps of 4 micro-batches of 8 samples, in 30 unequal dimensions."""
    rng = np.random.default_rng(seed)
    spread = np.linspace(0.2, 2.0, 30)
    spread *= np.sqrt(noise_scale / 8 / (spread**2).sum())
    grads = 30**-0.5 + spread * rng.normal(size=(steps, 4, 30))
    small, big = (grads[:, 0] ** 2).sum(-1), (grads.sum(1) ** 2).sum(-1)
    return first_against_all([8] * 4).solve(small, big)


def test_nine_tenths_of_the_intervals_hold_the_true_value() -> None:
    held = [estimate(*drawn(60.0, 200, seed)) for seed in range(300)]
    inside = [e.noise.low <= 60 <= (e.noise.high or np.inf) for e in held if e is not None]
    assert len(inside) == 300 and 0.85 <= np.mean(inside) <= 0.95
    values = [e.noise.value for e in held if e is not None and e.noise.value is not None]
    assert np.median(values) == pytest.approx(60, rel=0.05)


def test_without_a_gradient_there_is_no_upper_bound() -> None:
    rng = np.random.default_rng(0)
    found = estimate(rng.normal(0.0, 1.0, 400), rng.normal(50.0, 1.0, 400))
    assert found is not None and found.noise.high is None and found.noise.low > 100
    assert found.square.low == 0.0 and found.trace.low > 49


def test_without_noise_the_noise_scale_reaches_0() -> None:
    rng = np.random.default_rng(0)
    found = estimate(rng.normal(5.0, 0.1, 400), rng.normal(0.0, 0.1, 400))
    assert found is not None and found.noise.low == 0.0 and (found.noise.high or 1) < 0.01


def test_blocks_keep_steps_that_resemble_their_neighbours_apart() -> None:
    """A slow change within the window widens the interval."""
    rng = np.random.default_rng(0)
    drift = np.repeat(rng.normal(0.0, 0.5, 20), 20)
    trace = np.full(400, 10.0) + rng.normal(0, 0.5, 400)
    steady = estimate(np.ones(400) + rng.normal(0, 0.5, 400), trace)
    slow = estimate(np.ones(400) + drift, trace)
    assert steady is not None and slow is not None and slow.noise.high and steady.noise.high
    assert slow.noise.high - slow.noise.low > 2 * (steady.noise.high - steady.noise.low)


def test_few_steps_give_nothing() -> None:
    values = np.ones(LEAST_STEPS - 1)
    assert estimate(values, values) is None
    assert estimate(np.ones(LEAST_STEPS), np.ones(LEAST_STEPS)) is not None


@pytest.mark.parametrize(("free", "wanted"), [(4, 2.1318), (7, 1.8946), (19, 1.7291), (99, 1.6604)])
def test_the_quantile_of_t(free: int, wanted: float) -> None:
    assert t_quantile(free) == pytest.approx(wanted, rel=2e-3)
