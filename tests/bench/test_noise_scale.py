"""Parts of the noise scale's bench."""

from __future__ import annotations

import sys

import pytest

from helpers_cli import ROOT

sys.path.append(str(ROOT / "bench"))

from _noise_runs import Generated, Networks, Optimizer, losses, sweep
from noise_scale import fitted_knee


def test_a_knee_is_fitted() -> None:
    steps = {2**n: 50 * (1 + 300 / 2**n) for n in range(3, 13)}
    assert fitted_knee(steps) == pytest.approx(300, rel=0.05)
    assert fitted_knee({**steps, 8: float("inf")}) == pytest.approx(300, rel=0.05)


def test_runs_side_by_side_are_those_of_one_each() -> None:
    import torch

    data, generator = Generated(), torch.Generator().manual_seed(0)
    inputs, labels = data.batch((2, 8), generator)
    both = losses(Networks([3, 5])(inputs), labels)
    single = [
        losses(Networks([seed])(inputs[n : n + 1]), labels[n : n + 1])[0]
        for n, seed in enumerate((3, 5))
    ]
    assert torch.allclose(both, torch.stack(single))


def test_a_sweep_reaches_an_easy_target() -> None:
    found = sweep(Generated(target=2.0), Optimizer("sgd"), 32, (0.01, 0.1), 2, 200)
    assert found.best == 1 and 1 <= found.medians[1] < 100
    assert 1 <= found.fewest_averaged < 100
