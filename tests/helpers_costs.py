"""Costs of batches for models of a DataLoader: lognormal, as measured times of decoders are."""

from __future__ import annotations

import math
import random

from trainfit.loader.measure.model import BatchCost


def lognormal_costs(
    mean_s: float, variation: float, count: int, seed: int = 0, work: bool = False
) -> tuple[BatchCost, ...]:
    """``count`` costs with a coefficient of variation, as waiting or as work."""
    if variation == 0:
        drawn = [mean_s] * count
    else:
        sigma = math.sqrt(math.log(1 + variation**2))
        mu = math.log(mean_s) - sigma**2 / 2
        chance = random.Random(seed)
        drawn = [chance.lognormvariate(mu, sigma) for _ in range(count)]
    return tuple(BatchCost(0.0, s) if work else BatchCost(s, 0.0) for s in drawn)
