"""The gradient noise scale: is it right, and what does it cost?

    error       median error of the noise scale on quadratic problems with known |G|² and tr Σ
    coverage    share of 90% intervals that hold the true value (goal: 90%, less twice the standard
                error of 4,000 trials)
    cost        of the estimator in a training step with an accumulation of 2, in CPU time of this
                machine

What it predicts of real trainings (critical batch size, learning rates) was a study:
docs/figures.md has its results, and the commit that has its code.

    python bench/noise_scale.py [--quick] [--only PART]… [--json]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _bench import BenchFigure, finish, parser
from torch import nn

from trainfit.batch import NoiseScale
from trainfit.batch.estimate import estimate, first_against_all

#: Noise scales of the quadratic problems, as multiples of a step's 32 samples; steps; dimensions.
RATIOS, STEPS, DIMENSIONS = (0.25, 1.0, 2.0, 4.0), 512, 200
MICRO, ACCUMULATION = 8, 4
PARTS = ("quadratic", "cost")


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__, quick="fewer trials and rounds")
    made.add_argument("--only", action="append", choices=PARTS, help="(may be repeated)")
    options = made.parse_args(argv)
    torch.set_num_threads(1)
    parts = options.only or PARTS
    figures: list[BenchFigure] = []
    details: dict[str, Any] = {}
    if "quadratic" in parts:
        error, coverage = quadratic(100 if options.quick else 1000, details)
        figures += [
            BenchFigure("noise_error", 100 * error, 5, True, "%"),
            BenchFigure("noise_coverage", 100 * coverage, 89, False, "%"),
        ]
    if "cost" in parts:
        figures.append(
            BenchFigure("noise_cost", 100 * cost(40 if options.quick else 200), 2, True, "%")
        )
    return finish(figures, options.json, details)


# --- Quadratic problems -------------------------------------------------------------------------
def quadratic(trials: int, details: dict[str, Any]) -> tuple[float, float]:
    """Median error, and share of intervals that hold the true value, over all ratios."""
    rng = np.random.default_rng(0)
    errors: list[float] = []
    held: list[bool] = []
    for ratio in RATIOS:
        target = ratio * MICRO * ACCUMULATION
        of_ratio = []
        for _ in range(trials):
            found = _trial(target, rng)
            of_ratio.append(abs((found.value or math.inf) / target - 1))
            high = math.inf if found.high is None else found.high
            held.append(found.low <= target <= high)
        errors += of_ratio
        details[f"error at noise scale {ratio:g} × batch"] = statistics.median(of_ratio)
    return statistics.median(errors), statistics.fmean(held)


def _trial(noise_scale: float, rng: np.random.Generator) -> Any:
    """One estimate. Squared norms need the components' sums alone: no array of all samples."""
    spread = np.sqrt(rng.exponential(size=DIMENSIONS))
    spread *= math.sqrt(noise_scale / MICRO / float((spread**2).sum()))
    gradient = rng.normal(size=DIMENSIONS)
    gradient /= np.linalg.norm(gradient)
    first = gradient + spread * rng.standard_normal((STEPS, DIMENSIONS))
    rest = math.sqrt(ACCUMULATION - 1) * spread * rng.standard_normal((STEPS, DIMENSIONS))
    whole = first + (ACCUMULATION - 1) * gradient + rest
    weights = first_against_all([MICRO] * ACCUMULATION)
    found = estimate(*weights.solve((first**2).sum(1), (whole**2).sum(1)))
    assert found is not None
    return found.noise


# --- Cost ---------------------------------------------------------------------------------------
def cost(rounds: int) -> float:
    """Of a step with an accumulation of 2, with the estimator over without, minus 1; interleaved.

    A small ResNet-like network, 16 images of 32 × 32, on one thread. The clock is that of the
    process's CPU time: other work on the machine then counts little.
    """
    torch.manual_seed(0)
    arms = []
    for measured in (False, True):
        network = _network()
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        noise = NoiseScale(network, 8) if measured else None
        arms.append((network, optimizer, noise))
    images = torch.randn(8, 3, 32, 32)
    times: list[list[float]] = [[], []]
    for number in range(rounds + 8):
        for arm in (0, 1) if number % 2 else (1, 0):
            network, optimizer, _ = arms[arm]
            began = time.process_time()
            optimizer.zero_grad()
            for _ in range(2):
                network(images).square().mean().backward()
            optimizer.step()
            if number >= 8:
                times[arm].append(time.process_time() - began)
    # Trimmed means: the steps that are measured cost more, and a median would leave them out.
    plain, measured_s = (float(np.mean(np.sort(each)[: int(0.9 * len(each))])) for each in times)
    return measured_s / plain - 1


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 32, 64, 64, 128, 128):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


if __name__ == "__main__":
    sys.exit(main())
