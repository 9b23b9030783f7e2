"""A training whose gradient and noise are known: a sample's gradient is the sample itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.batch import NoiseScale

DIMENSION = 40


class Known(nn.Module):
    """Loss = mean of w·x, whose gradient for a sample is x: mean G, covariance Σ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIMENSION // 2, 1, bias=False)
        self.second = nn.Linear(DIMENSION // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        half = DIMENSION // 2
        return torch.cat([self.first(x[:, :half]), self.second(x[:, half:])], 1).sum(1)


def samples(count: int, noise_scale: float, generator: torch.Generator) -> Tensor:
    """|G|² is 1, tr Σ is ``noise_scale``, both the same in each half of the coordinates."""
    noise = torch.randn((count, DIMENSION), generator=generator, dtype=torch.float64)
    mean = torch.full((DIMENSION,), DIMENSION**-0.5, dtype=torch.float64)
    return (mean + noise * (noise_scale / DIMENSION) ** 0.5).float()


def train(
    steps: int,
    *,
    noise_scale: float = 32.0,
    micro: int = 4,
    accumulation: int = 4,
    seed: int = 0,
    model: nn.Module | None = None,
    between: Callable[[nn.Module, int, int], None] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
    measured: Callable[[NoiseScale, nn.Module, Tensor], Any] | None = None,
    set_to_none: bool = True,
    **options: Any,
) -> NoiseScale:
    """The estimator after a plain loop; ``between`` is called after each backward pass."""
    generator = torch.Generator().manual_seed(seed)
    model = model if model is not None else Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, micro, **{"every": 1, **options})
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(accumulation):
            batch = samples(micro, noise_scale, generator)
            if measured is not None:
                measured(noise, model, batch)
            (model(batch).mean() / accumulation).backward()
            if between is not None:
                between(model, step, number)
        if before_step is not None:
            before_step(model)
        optimizer.step()
    return noise
