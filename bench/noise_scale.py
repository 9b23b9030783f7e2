"""The gradient noise scale: is it right, what does it predict of real trainings, what does it cost?

    error       median error of the noise scale on quadratic problems with known |G|² and tr Σ
    coverage    share of 90% intervals that hold the true value (goal: 90%, less twice the standard
                error of 4,000 trials)
    knee        the batch size above which more samples a step hardly save steps, fitted to measured
                steps to a loss (tuned learning rates, at least five batch sizes), over the one that
                NoiseScale predicts from a run at one batch size; the larger over the smaller
    averaged    the same of the weights' average over the last ninth of the training, which stands
                for a learning rate that decays
    rule        by how much the learning rate at twice or half the rule's needs fewer steps, at the
                worst of all batch sizes
    cost        of the estimator in a training step with an accumulation of 2, in CPU time of this
                machine

The trainings are real but small: a network of one hidden layer, on generated data without end and
on scikit-learn's digits; by SGD, by Adam with both betas' half-lives fixed in samples, and by Adam
with beta1 fixed at 0.9 (which is measured, and not promised: see docs/figures.md).

    python bench/noise_scale.py [--quick] [--only PART]… [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import Figure, finish

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _noise_runs import (  # noqa: E402
    Data,
    Digits,
    Generated,
    Networks,
    Optimizer,
    Sweep,
    Update,
    losses,
    sweep,
)
from torch import nn  # noqa: E402

from trainfit.batch import NoiseScale  # noqa: E402
from trainfit.batch.advice import factor  # noqa: E402
from trainfit.batch.estimate import estimate, first_against_all  # noqa: E402

#: Noise scales of the quadratic problems, as multiples of a step's 32 samples; steps; dimensions.
RATIOS, STEPS, DIMENSIONS = (0.25, 1.0, 2.0, 4.0), 512, 200
MICRO, ACCUMULATION = 8, 4
#: Seeds of the trainings; learning rates that the tuning tries first.
SEEDS, QUICK_SEEDS = 4, 2
RATES = {"sgd": [2.0**e for e in range(-5, 3)], "adam": [2.0**e for e in range(-11, -3)]}
OPTIMIZERS = {
    "sgd": Optimizer("sgd"),
    "adam": Optimizer("adam", in_samples=True),
    "adam_beta1_fixed": Optimizer("adam"),
}
DATA: dict[str, type[Data]] = {"generated": Generated, "digits": Digits}
#: Multiples of the rule's learning rate that are trained with.
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Estimates over a training, and runs that they are over: |G|² of fewer is not told from 0.
MOMENTS, RUNS = 8, 64
PARTS = ("quadratic", "training", "cost")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="SGD alone, fewer runs: a minute")
    parser.add_argument("--only", action="append", choices=PARTS, help="(may be repeated)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    parts = options.only or PARTS
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    if "quadratic" in parts:
        error, coverage = quadratic(100 if options.quick else 1000, details)
        figures += [
            Figure("noise_error", 100 * error, 5, True, "%"),
            Figure("noise_coverage", 100 * coverage, 89, False, "%"),
        ]
    if "training" in parts:
        figures += _trainings(options.quick, details)
    if "cost" in parts:
        figures.append(Figure("noise_cost", 100 * cost(40 if options.quick else 200), 2, True, "%"))
    if not options.json:
        for name, found in details.items():
            print(f"{name}: {found}")
    return finish(figures, options.json, details)


# --- Quadratic problems -------------------------------------------------------------------------
def quadratic(trials: int, details: dict[str, Any]) -> tuple[float, float]:
    """Median error, and share of intervals that hold the true value, over all ratios."""
    rng = np.random.default_rng(0)
    errors: list[float] = []
    held: list[bool] = []
    for ratio in RATIOS:
        wanted = ratio * MICRO * ACCUMULATION
        of_ratio = []
        for _ in range(trials):
            found = _trial(wanted, rng)
            of_ratio.append(abs((found.value or math.inf) / wanted - 1))
            high = math.inf if found.high is None else found.high
            held.append(found.low <= wanted <= high)
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


# --- Trainings ----------------------------------------------------------------------------------
def _trainings(quick: bool, details: dict[str, Any]) -> list[Figure]:
    figures = []
    for name, kind in DATA.items():
        try:
            data = kind()
        except ImportError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
            continue
        for optimizer in ("sgd",) if quick else OPTIMIZERS:
            found: dict[str, Any] = {}
            figures += training(f"{optimizer}_{name}", OPTIMIZERS[optimizer], data, quick, found)
            details |= {f"{name}, {optimizer}: {what}": value for what, value in found.items()}
    return figures


def training(
    name: str, optimizer: Optimizer, data: Data, quick: bool, details: dict[str, Any]
) -> list[Figure]:
    """How far the predicted critical batch and the rule's learning rates are off."""
    seeds = QUICK_SEEDS if quick else SEEDS
    optimizer = dataclasses.replace(optimizer, at=data.tuned)
    tuned = _tuned(data, optimizer, seeds)
    rate, steps = tuned.rates[tuned.best], tuned.medians[tuned.best]
    predicted, phi = measured_noise(data, optimizer, rate, math.ceil(steps))
    found = []
    for size in data.sizes[1::2] if quick else data.sizes:
        own = rate * factor(optimizer.kind, data.tuned, size, predicted)
        most = math.ceil(8 * steps * max(1.0, data.tuned / size))
        found.append(sweep(data, optimizer, size, [own * each for each in AROUND], seeds, most))
    fewest = {each.batch: min(each.medians) for each in found}
    averaged = {each.batch: each.fewest_averaged for each in found}
    knees = fitted_knee(fewest), fitted_knee(averaged)
    worst = {each.batch: round(_beaten(each), 3) for each in found}
    details |= {
        f"learning rate and steps at batch {data.tuned}": (rate, round(steps)),
        "steps to the loss by batch size, tuned": {b: round(n, 1) for b, n in fewest.items()},
        "the same of averaged weights": {b: round(n, 1) for b, n in averaged.items()},
        "critical batch predicted, and the knees": tuple(map(round, (predicted, *knees))),
        "noise scale by step": {at: round(each) for at, each in phi.items()},
        "neighbours of the rule need fewer steps by": worst,
        "best multiple of the rule's learning rate": {b.batch: AROUND[b.best] for b in found},
    }
    ratios = [max(knee / predicted, predicted / knee) for knee in knees]
    return [
        Figure(f"noise_knee_{name}", ratios[0], 2, True, " ×"),
        Figure(f"noise_averaged_{name}", ratios[1], 2, True, " ×"),
        Figure(f"noise_rule_{name}", 100 * max(worst.values()), 10, True, "%"),
    ]


def _tuned(data: Data, optimizer: Optimizer, seeds: int) -> Sweep:
    """At ``data.tuned``, to a factor of the square root of 2."""
    coarse = sweep(data, optimizer, data.tuned, RATES[optimizer.kind], seeds, 3000)
    fine = [coarse.rates[coarse.best] * 2**e for e in (-0.5, 0.0, 0.5)]
    return sweep(data, optimizer, data.tuned, fine, seeds, 3000)


def _beaten(found: Sweep) -> float:
    """The share of steps that half or twice the rule's learning rate saves; 0: none."""
    medians = dict(zip(AROUND, found.medians, strict=True))
    own, other = medians[1.0], min(medians[0.5], medians[2.0])
    return max(0.0, 1 - other / own) if math.isfinite(own) else 1.0


def measured_noise(
    data: Data, optimizer: Optimizer, rate: float, steps: int
) -> tuple[float, dict[int, float]]:
    """The training's critical batch size by NoiseScale, at ``data.tuned`` alone; and φ by step.

    Steps at batch B are the integral of 1 + φ ÷ B over the progress that needs no noise (McCandlish
    et al. 2018, appendix D), so that the φ of a whole training is its average over that progress.
    Of a step at a learning rate ε far below the largest useful one, as at a batch far below φ, this
    progress is proportional to ε: with a constant rate, all steps count the same.
    """
    # Runs side by side are one model to NoiseScale: its |G|² and tr Σ are their sums, which have to
    # be pooled before anything is divided, as |G|² is far below its own error in a single run.
    networks = Networks(range(RUNS))
    update = optimizer.update(list(networks.parameters()), torch.tensor(rate), data.tuned)
    plain = _Stepper(networks, update)
    noise = NoiseScale(networks, data.tuned // ACCUMULATION, every=1, window=steps)
    generator = torch.Generator().manual_seed(10_000)
    for _ in range(steps + 1):  # of the first, the accumulation is not known
        networks.zero_grad()
        for _ in range(ACCUMULATION):
            inputs, labels = data.batch((RUNS, data.tuned // ACCUMULATION), generator)
            (losses(networks(inputs), labels).sum() / ACCUMULATION).backward()
        plain.step()
    noise.close()
    squares, traces = noise.steps()
    length = max(1, steps // MOMENTS)
    phi = {
        end: float(traces[end - length : end].sum() / squares[end - length : end].sum())
        for end in range(length, steps + 1, length)
    }
    return statistics.fmean(phi.values()), phi


class _Stepper(torch.optim.Optimizer):
    """The update of the sweeps as an optimizer of PyTorch."""

    def __init__(self, networks: nn.Module, update: Update) -> None:
        super().__init__(networks.parameters(), {})
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update([p.grad for p in self._update.parameters if p.grad is not None])


def fitted_knee(steps: dict[int, float]) -> float:
    """B of steps = S·(1 + B ÷ batch), by least squares of the logarithms."""
    known = {batch: value for batch, value in steps.items() if math.isfinite(value)}
    sizes, logs = np.array(list(known)), np.log(list(known.values()))

    def loss(knee: float) -> float:
        rest = logs - np.log1p(knee / sizes)
        return float(((rest - rest.mean()) ** 2).sum())

    return min((2.0 ** (n / 16) for n in range(16 * 14)), key=loss)


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
