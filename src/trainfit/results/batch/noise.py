"""The gradient noise scale of a training, as ``trainfit.batch.NoiseScale`` measured it.

|G|² is the squared norm of the gradient of the whole data set's loss, tr Σ the trace of the
covariance of one sample's gradient, and the noise scale tr Σ ÷ |G|², in samples (McCandlish et
al. 2018, arXiv:1812.06162, "simple noise scale").

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile

FORMAT: Final = "trainfit-noise-scale"
VERSION: Final = 1
REMAKE: Final = "re-create it with NoiseScale.save"
_WANTED: Final = "give a file that NoiseScale.save wrote"

#: More samples than any step has, and than any noise scale.
MOST_SAMPLES: Final = 10**12

#: Share of repetitions in which an interval holds the true value.
CONFIDENCE: Final = 0.9

Method = Literal["accumulation", "ranks", "parts", "examples", "none"]
"""Where the gradients of two batch sizes come from: micro-batches of a step; ranks of a
data-parallel run; parts of a batch in a measuring pass; single samples of some modules; nowhere."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with its 90% interval. ``value`` is ``None`` where the figure is not positive in the
    data, ``high`` where the data sets no upper bound."""

    value: float | None
    low: float
    high: float | None

    def __post_init__(self) -> None:
        if self.low < 0 or (self.high is not None and self.high < self.low):
            raise ValueError(f"an interval from {self.low} to {self.high}")

    @property
    def text(self) -> str:
        """``210 (170 to 260)``, or ``at least 170``."""
        if self.high is None or self.value is None:
            return f"at least {samples_text(self.low)}"
        low, high = samples_text(self.low), samples_text(self.high)
        return f"{samples_text(self.value)} ({low} to {high})"


def samples_text(value: float) -> str:
    """Samples: two digits below 10, whole numbers with separators above."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


@dataclasses.dataclass(frozen=True)
class ModuleNoise:
    """The noise scale of the parameters below one module; ``trace_share`` is its part of tr Σ."""

    name: str
    parameters: int
    noise: Interval | None
    trace_share: float | None


@dataclasses.dataclass(frozen=True)
class Moment:
    """The noise scale around one optimizer step."""

    step: int
    noise: Interval


@dataclasses.dataclass(frozen=True)
class NoiseResult(ResultFile):
    """What was measured, over the last ``steps_used`` of the measured steps.

    ``micro_batch`` samples, ``accumulation`` micro-batches and ``ranks`` make a step.
    ``gradient_square`` and ``trace`` are those of the loss as ``backward`` got it: a loss divided
    by the accumulation makes both smaller by its square, and changes nothing of their ratio.
    ``steps_left_out`` counts measured steps that do not count, by reason. ``cost_share`` is the
    estimator's share of the run's time (``None``: not measured). ``cannot_tell`` says why there is
    no noise scale with an upper bound ("": there is one).
    """

    FILE: ClassVar = Format(FORMAT, VERSION, REMAKE, _WANTED)

    method: Method
    micro_batch: int
    accumulation: int
    ranks: int
    steps_seen: int
    steps_used: int
    noise: Interval | None
    gradient_square: Interval | None
    trace: Interval | None
    modules: tuple[ModuleNoise, ...] = ()
    history: tuple[Moment, ...] = ()
    steps_left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    cost_share: float | None = None
    cannot_tell: str = ""
    notes: tuple[str, ...] = ()
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        parts = (self.micro_batch, self.accumulation, self.ranks)
        if min(parts) < 1 or math.prod(parts) > MOST_SAMPLES:
            raise ValueError(f"a step of {' × '.join(map(str, parts))} samples")
        if min(self.steps_used, self.steps_seen) < 0:
            raise ValueError(f"{self.steps_used} measured steps of {self.steps_seen}")

    @property
    def batch_size(self) -> int:
        """The effective batch size, in samples."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def line(self) -> str:
        """One line: the noise scale, its interval, the batch."""
        if self.noise is None:
            return f"noise scale not known: {self.cannot_tell}"
        text = f"noise scale {self.noise.text} samples, batch {self.batch_size}"
        return text if self.noise.high is not None else f"{text}: {self.cannot_tell}"
