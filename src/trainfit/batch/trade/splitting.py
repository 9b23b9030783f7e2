"""How a step is split: micro-batch × accumulation × GPUs, and what that makes of an epoch."""

from __future__ import annotations

import dataclasses

from trainfit.results.batch.explanation import Epoch


@dataclasses.dataclass(frozen=True)
class Split:
    """An optimizer step: ``accumulation`` micro-batches of ``micro`` samples on each GPU."""

    micro: int
    accumulation: int = 1
    gpus: int = 1

    @property
    def batch_size(self) -> int:
        """Samples of the step."""
        return self.micro * self.accumulation * self.gpus

    @property
    def text(self) -> str:
        """``4 micro-batches of 8 on each of 2 GPUs``."""
        where = f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""
        if self.accumulation == 1:
            return f"{self.micro}{where}"
        return f"{self.accumulation} micro-batches of {self.micro}{where}"


def split(effective: int, largest: int, gpus: int = 1) -> Split:
    """``effective`` samples on ``gpus``, with micro-batches of ``largest`` at most.

    All micro-batches are equal. Exact where a divisor allows it with at most twice the accumulation
    that is needed; else the nearest number of samples above.
    """
    share = -(-effective // gpus)
    least = -(-share // largest)
    for accumulation in range(least, 2 * least + 1):
        if effective % (accumulation * gpus) == 0:
            return Split(effective // (accumulation * gpus), accumulation, gpus)
    return Split(-(-share // least), least, gpus)


def after(present: Split, effective: int) -> Split:
    """The step of ``effective`` samples that the same training has: with the present micro-batch,
    where that is accumulated now, as then memory is likely to allow no more."""
    largest = present.micro if present.accumulation > 1 else effective
    return split(effective, largest, present.gpus)


def epoch(samples: int, of: Split) -> Epoch:
    """Full steps of an epoch, and the samples outside of full micro-batches.

    Each GPU gets an equal share, as of a DistributedSampler.
    """
    micro_batches = samples // of.gpus // of.micro
    full = micro_batches * of.micro * of.gpus
    return Epoch(of.batch_size, micro_batches // of.accumulation, samples - full)


def left_over(samples: int, of: Split) -> int:
    """Full micro-batches of a GPU after the last full step of an epoch."""
    return samples // of.gpus // of.micro % of.accumulation


def last_micro_batch(samples: int, of: Split) -> int:
    """Samples of the uneven last micro-batch of a GPU; 0: there is none."""
    return samples // of.gpus % of.micro


def same_samples(steps: int, before: int, after: int) -> int:
    """Steps of ``after`` samples for as many samples as ``steps`` of ``before``."""
    return -(-steps * before // after)
