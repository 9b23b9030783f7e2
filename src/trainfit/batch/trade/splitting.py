"""How a batch is split: micro-batches and accumulation, steps of an epoch."""

from __future__ import annotations

from trainfit.results.batch.explanation import Epoch


def split(effective: int, largest: int, gpus: int = 1) -> tuple[int, int]:
    """Micro-batch and accumulation for ``effective`` samples on ``gpus``, with micro-batches of
    ``largest`` at most.

    All micro-batches are equal. Exact where a divisor allows it with at most twice the accumulation
    that is needed; else the nearest number of samples above.
    """
    share = -(-effective // gpus)
    least = -(-share // largest)
    for accumulation in range(least, 2 * least + 1):
        if effective % (accumulation * gpus) == 0:
            return effective // (accumulation * gpus), accumulation
    return -(-share // least), least


def epoch(samples: int, batch: int) -> Epoch:
    """Steps of an epoch without the uneven last batch."""
    return Epoch(batch, samples // batch, samples % batch)


def same_samples(steps: int, before: int, after: int) -> int:
    """Steps of ``after`` samples for as many samples as ``steps`` of ``before``."""
    return -(-steps * before // after)
