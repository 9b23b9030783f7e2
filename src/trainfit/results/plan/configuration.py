"""One setting of a job: its memory, its batch sizes and what these follow from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from trainfit.results.memory.figures import MemoryFigures

#: An epoch of fewer steps is told of with the batch size that makes it so short.
FEW_STEPS: Final = 8


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """What a recommended batch size follows from; ``None`` is not known.

    ``memory``: the largest that leaves the headroom. ``knee``: the smallest with nearly the most
    samples a second of those (:data:`trainfit.results.plan.speed.KNEE`, rounded up to a multiple of
    8). ``noise_scale``: of the gradients, in samples, as the user said; the larger a batch is
    compared to it, the more samples the same loss needs. ``trains``: the smallest with nearly the
    fastest progress then.

    ``data_set``: the samples of an epoch, which no batch exceeds. ``at_least``: memory's figures
    are the largest that were simulated (the data set may have no more samples); it may allow
    more. ``reason`` says why the recommended batch size is not the throughput's (empty: it is).
    ``epoch_steps`` are an epoch's steps with it, where they are few (:data:`FEW_STEPS`).
    """

    memory: int | None
    knee: int | None
    noise_scale: float | None = None
    trains: int | None = None
    data_set: int | None = None
    at_least: bool = False
    reason: str = ""
    epoch_steps: int | None = None

    def is_data_set(self, batch: int) -> bool:
        """Has the data set about as many samples as this batch? (Sizes are rounded to 8.)"""
        return self.data_set is not None and batch + 8 > self.data_set

    @property
    def by_noise(self) -> int | None:
        """The batch size that the noise scale asks for, where memory and the data set allow more;
        ``None``: it asks for none."""
        most = min((each for each in (self.memory, self.data_set) if each), default=0)
        return self.trains if self.trains is not None and self.trains < most else None


@dataclasses.dataclass(frozen=True)
class BatchCheck:
    """Whether the recommended batch size, ``batch_size``, was itself simulated.

    ``reason`` says why not (empty: it was). ``peak_share`` and ``step_share`` are by how much its
    peak of reserved memory and its step lay above what followed from other batch sizes (0.01: 1%;
    ``None``: nothing followed, or it was not compared); the figures are those of the simulated run.
    """

    batch_size: int
    reason: str = ""
    peak_share: float | None = None
    step_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One setting of the job and what it needs.

    ``batch_size`` is ``None`` where the script's batch size could not be told. ``amp`` is
    autocast's dtype ("bfloat16", "float16") or "off". ``by_kind_bytes`` and ``by_module_bytes``
    split the peak of allocated memory; ``largest_batch`` is 0 where one sample does not fit and
    ``None`` where it could not be determined. ``recommended_batch`` follows from ``limits``
    (``None``: none is recommended). ``step_s`` is the step time (predicted).
    """

    batch_size: int | None
    amp: str
    memory: MemoryFigures
    fits: bool
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    largest_batch: int | None
    recommended_batch: int | None
    limits: BatchLimits | None = None
    step_s: float | None = None

    @property
    def by_noise(self) -> int | None:
        """As of :attr:`BatchLimits.by_noise`."""
        return self.limits.by_noise if self.limits is not None else None


@dataclasses.dataclass(frozen=True)
class BatchShapes:
    """Batches that differ in more than the number of their samples (padding, crops).

    ``median_elements`` and ``longest_elements`` are a sample's, of ``looked_at`` of the data set's
    ``samples`` (``None``: its samples could not be looked at, ``reason`` says why; the figures are
    then of the batches seen). ``longest`` is the memory of the current batch size where each sample
    is the longest. ``typical_step_s`` and ``longest_step_s`` are a step's with batches as they came
    and with the longest.
    """

    looked_at: int | None
    samples: int | None
    median_elements: int | None = None
    longest_elements: int | None = None
    longest: MemoryFigures | None = None
    longest_fits: bool | None = None
    typical_step_s: float | None = None
    longest_step_s: float | None = None
    reason: str = ""
