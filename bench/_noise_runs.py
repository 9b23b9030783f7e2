"""Trainings of a small network at many batch sizes and learning rates, many at once.

Two sets of data, both of 64 inputs and ten classes:

    generated   as it is needed, without repetition: points with a nuisance of rank 16 that the
                classes share, and a tenth of the labels wrong; the loss is of held-out samples
    digits      scikit-learn's 1,797 images of 8 × 8, drawn with replacement; the loss is of all

All runs of a batch size are one batched matrix product, each with its learning rate and seed; the
learning rates of a seed see the same batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.batch.advice import beta
from trainfit.results.batch import Optimizer as OptimizerKind

Steps = tuple[tuple[float, ...], ...]

INPUTS, HIDDEN, CLASSES, RANK = 64, 96, 10, 16
WRONG_LABELS: Final = 0.1
#: Held-out samples, and steps between two looks at their loss as a share of the steps so far.
HELD_OUT, LOOK = 1024, 0.04
#: An average over the last 1 ÷ 9 of the steps, however many they are (polynomial decay averaging,
#: Shamir and Zhang 2013): what a decaying learning rate comes to, without a number of steps that
#: has to be known (Zhang et al. 2024, arXiv:2410.21676, measure critical batch sizes so).
_AVERAGED: Final = 9.0


class Data(Protocol):
    """Where samples come from, the loss to reach, and the batch sizes to train with; learning rates
    are tuned and the noise scale is measured at ``tuned`` alone, far below the noise scale."""

    target: float
    sizes: tuple[int, ...]
    tuned: int

    def batch(self, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        r"""Inputs (\*shape, INPUTS) and labels (\*shape)."""

    def judged(self) -> tuple[Tensor, Tensor]:
        """The samples whose loss decides."""


class Generated:
    """Samples without end; the same classes for every seed."""

    sizes, tuned = tuple(2**n for n in range(5, 13)), 64

    def __init__(self, target: float = 0.82) -> None:
        self.target = target
        maker = torch.Generator().manual_seed(7)
        self.means = 0.5 * torch.randn(CLASSES, INPUTS, generator=maker)
        self.nuisance = torch.randn(RANK, INPUTS, generator=maker) / 2

    def batch(self, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        r"""Inputs (\*shape, INPUTS) and labels (\*shape)."""
        labels = torch.randint(CLASSES, tuple(shape), generator=generator)
        inputs = self.means[labels]
        inputs = inputs + torch.randn(*shape, RANK, generator=generator) @ self.nuisance
        inputs = inputs + torch.randn(*shape, INPUTS, generator=generator)
        wrong = torch.rand(tuple(shape), generator=generator) < WRONG_LABELS
        other = torch.randint(CLASSES, tuple(shape), generator=generator)
        return inputs, torch.where(wrong, other, labels)

    def judged(self) -> tuple[Tensor, Tensor]:
        """Held-out samples."""
        return self.batch((HELD_OUT,), torch.Generator().manual_seed(1))


class Digits:
    """scikit-learn's handwritten digits. Raises ``ImportError`` without scikit-learn."""

    sizes, tuned = tuple(2**n for n in range(3, 11)), 16

    def __init__(self, target: float = 0.05) -> None:
        self.target = target
        from sklearn.datasets import load_digits

        found = load_digits()
        inputs = torch.tensor(found.data, dtype=torch.float32)
        self._inputs = (inputs - inputs.mean()) / inputs.std()
        self._labels = torch.tensor(found.target)

    def batch(self, shape: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Drawn with replacement."""
        drawn = torch.randint(len(self._labels), tuple(shape), generator=generator)
        return self._inputs[drawn], self._labels[drawn]

    def judged(self) -> tuple[Tensor, Tensor]:
        """All of them."""
        return self._inputs, self._labels


class Networks(nn.Module):
    """``runs`` networks of one hidden layer, side by side; inputs (runs, batch, INPUTS)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        first, second = [], []
        for seed in seeds:
            maker = torch.Generator().manual_seed(1000 + seed)
            first.append(torch.randn(INPUTS, HIDDEN, generator=maker) / math.sqrt(INPUTS))
            second.append(torch.randn(HIDDEN, CLASSES, generator=maker) / math.sqrt(HIDDEN))
        runs = len(seeds)
        self.first, self.second = (
            nn.Parameter(torch.stack(first)),
            nn.Parameter(torch.stack(second)),
        )
        self.shift = nn.Parameter(torch.zeros(runs, 1, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(runs, 1, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(inputs @ self.first + self.shift)
        return hidden @ self.second + self.bias


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of each run, (runs,)."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape).mean(1)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """SGD, or Adam. ``first`` and ``second`` are Adam's betas at the batch size ``at``; with
    ``in_samples`` each keeps its half-life in samples at other batch sizes, else ``second`` alone
    does."""

    name: str
    first: float = 0.9
    second: float = 0.99
    in_samples: bool = False
    at: int = 64

    @property
    def kind(self) -> OptimizerKind:
        """Of the rule for the learning rate."""
        return "sgd" if self.name == "sgd" else "adam"

    def update(self, parameters: list[Tensor], rate: Tensor, batch: int) -> Update:
        """At this batch size."""
        first = beta(self.first, self.at, batch) if self.in_samples else self.first
        second = beta(self.second, self.at, batch)
        return Update(self.kind, parameters, rate, first, second)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Steps to the target at one batch size: (learning rates, seeds); infinite: not reached.

    ``averaged`` are those of the weights' average over the last part of the training.
    """

    batch: int
    rates: tuple[float, ...]
    steps: Steps
    averaged: Steps

    @property
    def medians(self) -> list[float]:
        """Of the seeds, by learning rate."""
        return [float(np.median(row)) for row in self.steps]

    @property
    def best(self) -> int:
        """The place of the learning rate with the fewest steps."""
        return int(np.argmin(self.medians))

    @property
    def fewest_averaged(self) -> float:
        """At the learning rate that is best for the average."""
        return float(min(np.median(row) for row in self.averaged))


class _Reached:
    """When each run's loss was first below ``target``, between two looks."""

    def __init__(self, runs: int, target: float) -> None:
        self.steps = np.full(runs, math.inf)
        self._former = np.full(runs, math.inf)
        self._target, self._looked = target, 0

    def look(self, step: int, now: NDArray[np.float64]) -> None:
        """``now`` are the losses after ``step``."""
        for run in np.flatnonzero((now < self._target) & np.isinf(self.steps)):
            share, former = 1.0, self._former[run]
            if math.isfinite(former):
                share = (former - self._target) / (former - now[run])
            self.steps[run] = self._looked + share * (step - self._looked)
        self._former, self._looked = now, step

    def rows(self, rates: int) -> Steps:
        """(learning rates, seeds)."""
        return tuple(tuple(map(float, row)) for row in self.steps.reshape(rates, -1))


def sweep(
    data: Data,
    optimizer: Optimizer,
    batch: int,
    rates: Sequence[float],
    seeds: int,
    most: int,
) -> Sweep:
    """Train all learning rates and seeds until the useful ones are there, or ``most`` steps."""
    grid = [(rate, seed) for rate in rates for seed in range(seeds)]
    networks, average = Networks([s for _, s in grid]), Networks([s for _, s in grid])
    parameters, averages = list(networks.parameters()), list(average.parameters())
    rate = torch.tensor([r for r, _ in grid]).view(-1, 1, 1)
    generator = torch.Generator().manual_seed(batch)
    inputs, labels = (part.expand(len(grid), *part.shape) for part in data.judged())
    last, averaged = (_Reached(len(grid), data.target) for _ in range(2))
    update = optimizer.update(parameters, rate, batch)
    looked = step = 0
    while step < most:
        drawn = data.batch((seeds, batch), generator)
        x, y = (part.expand(len(rates), *part.shape).flatten(0, 1) for part in drawn)
        update(torch.autograd.grad(losses(networks(x), y).sum(), parameters))
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, min(1.0, _AVERAGED / (step + _AVERAGED)))
        if step - looked < max(1, LOOK * step):
            continue
        looked = step
        with torch.no_grad():
            last.look(step, losses(networks(inputs), labels).double().numpy())
            averaged.look(step, losses(average(inputs), labels).double().numpy())
        # The fewest steps are known once a learning rate has all its seeds there; another rate that
        # is not there after three times these is no better in any figure.
        whole = last.steps.reshape(len(rates), seeds).max(axis=1)
        if np.isfinite(whole).any() and step > 3 * whole.min():
            break
    return Sweep(batch, tuple(rates), last.rows(len(rates)), averaged.rows(len(rates)))


class Update:
    """SGD or Adam, with a learning rate for each run."""

    def __init__(
        self, kind: str, parameters: list[Tensor], rate: Tensor, first: float, second: float
    ) -> None:
        self.parameters, self._rate, self._betas = parameters, rate, (first, second)
        self._is_adam = kind == "adam"
        self._mean = [torch.zeros_like(p) for p in parameters]
        self._square = [torch.zeros_like(p) for p in parameters]
        self._count = 0

    @torch.no_grad()
    def __call__(self, grads: Sequence[Tensor]) -> None:
        self._count += 1
        first, second = self._betas
        for place, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if not self._is_adam:
                parameter.sub_(self._rate * grad)
                continue
            mean = self._mean[place].lerp_(grad, 1 - first) / (1 - first**self._count)
            square = self._square[place].lerp_(grad * grad, 1 - second)
            square = square / (1 - second**self._count)
            parameter.sub_(self._rate * mean / (square.sqrt() + 1e-8))
