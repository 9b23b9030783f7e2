"""What a batch size does to learning: the noise scale, step times, goodput, the trade explained."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from trainfit.results.files import documents
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.errors import ResultFileError

# ---
# The gradient noise scale of a training, as ``trainfit.batch.NoiseScale`` measured it.
#
# |G|² is the squared norm of the gradient of the whole data set's loss, tr Σ the trace of the
# covariance of one sample's gradient, and the noise scale tr Σ ÷ |G|², in samples (McCandlish et
# al. 2018, arXiv:1812.06162, "simple noise scale").


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
class NoiseMoment:
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

    FILE: ClassVar = Format.of("trainfit-noise-scale", "NoiseScale.save")

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
    history: tuple[NoiseMoment, ...] = ()
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


# ---
# Times of a step, by micro-batch, accumulation and GPUs, as a user or a plan gives them.


_REMEDY: Final = (
    "write CSV with a header such as micro_batch,accumulation,gpus,seconds (the two in the middle "
    "are 1 if left out)"
)
#: Spreadsheets begin CSV with it.
_BYTE_ORDER_MARK: Final = "\ufeff"
_NEEDED: Final = ("micro_batch", "seconds")
_COLUMNS: Final = ("micro_batch", "accumulation", "gpus", "seconds")

Basis = Literal["measured", "predicted", "derived"]
"""By a clock; by a speed model; from the time of one micro-batch, by accumulating."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """``seconds`` of an optimizer step of ``accumulation`` × ``micro_batch`` samples on each of
    ``gpus``."""

    micro_batch: int
    accumulation: int
    gpus: int
    seconds: float
    basis: Basis = "measured"

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.accumulation, self.gpus) < 1:
            raise ValueError("micro_batch, accumulation and gpus must be at least 1")
        if self.batch_size > MOST_SAMPLES:
            raise ValueError(f"a step has at most {MOST_SAMPLES:,} samples")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"a step of {self.seconds} s")

    @property
    def batch_size(self) -> int:
        """Samples of the step."""
        return self.micro_batch * self.accumulation * self.gpus

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch_size / self.seconds


def read(path: Path) -> tuple[StepTime, ...]:
    """A table of step times: CSV; or a plan's result, with the steps that it predicts.

    Raises :class:`ResultFileError`: missing, no table, a value that is no positive number.
    """
    text = documents.read(path, _REMEDY).removeprefix(_BYTE_ORDER_MARK)
    if text.lstrip().startswith("{"):
        return _of_plan(text, path)
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or ()]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise ResultFileError(path, f"it has no column {missing[0]!r}", _REMEDY)
    if len(set(names)) < len(names):
        raise ResultFileError(path, "two of its columns have one name", _REMEDY)
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise ResultFileError(path, f"the column {unknown[0]!r} is not known", _REMEDY)
    rows.fieldnames = names
    times = [_row(row, number, path) for number, row in enumerate(rows, 2)]
    if not times:
        raise ResultFileError(path, "it has no row", _REMEDY)
    keys = [(time.micro_batch, time.accumulation, time.gpus) for time in times]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ResultFileError(path, f"micro_batch {twice[0]} appears twice", "keep one row")
    return tuple(times)


def _row(row: dict[str | None, Any], number: int, path: Path) -> StepTime:
    try:
        if None in row:
            raise ValueError("more values than columns")
        return StepTime(
            int(row["micro_batch"]),
            int(row.get("accumulation") or 1),
            int(row.get("gpus") or 1),
            float(row["seconds"]),
        )
    except (TypeError, ValueError) as error:
        reason = f"line {number} is not a row of positive numbers ({error})"
        raise ResultFileError(path, reason, _REMEDY) from error


def _of_plan(text: str, path: Path) -> tuple[StepTime, ...]:
    """The throughput curve of a plan, on one GPU: a step has as many micro-batches as the script
    accumulates."""
    try:
        steps = json.loads(text)["speed"]["curve"]
        times = [
            StepTime(
                int(step["batch_size"]),
                max(1, round(step["samples_per_s"] * step["seconds"] / step["batch_size"])),
                1,
                float(step["seconds"]),
                "predicted",
            )
            for step in steps
            if step["batch_size"] and step["samples_per_s"]
        ]
    except (KeyError, TypeError, ValueError):
        times = []
    if not times:
        raise ResultFileError(path, "it has no step times by batch size", _REMEDY)
    return tuple(times)


# ---
# Goodput: how fast a training learns at each batch size, samples/s times a sample's worth.


#: Points with this share of the best goodput count as being as good.
NEARLY: Final = 0.95


@dataclasses.dataclass(frozen=True)
class GoodputPoint:
    """``efficiency`` is the progress of a sample compared with one at the reference batch size,
    ``per_s`` goodput: samples/s of the reference batch size that learn as much. ``low`` and
    ``high`` are its range over the noise scale's interval."""

    step: StepTime
    efficiency: float
    per_s: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class GoodputCurve:
    """Points by batch size, smallest first; ``best`` is the place of the best one.

    ``best_from`` and ``best_to`` are the batch sizes that are best at the two ends of the noise
    scale's interval; ``flat_from`` and ``flat_to`` the smallest and largest batch with 95% of the
    best goodput.
    """

    reference: int
    points: tuple[GoodputPoint, ...]
    best: int
    best_from: int
    best_to: int
    flat_from: int
    flat_to: int

    @property
    def best_point(self) -> GoodputPoint:
        """The point with the highest goodput."""
        return self.points[self.best]


# ---
# The trade between two batch sizes, as ``trainfit batch explain`` says it.


Optimizer = Literal["sgd", "adam", "other"]
Topic = Literal[
    "steps",
    "learning rate",
    "accumulation",
    "batch norm",
    "contrastive loss",
    "token mean",
    "last batch",
    "generalization",
    "noise scale",
]


@dataclasses.dataclass(frozen=True)
class Citation:
    """A work that something is from ("Goyal 2017"), and where to find it ("arXiv:1706.02677")."""

    work: str
    reference: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something that is said, with where it is from."""

    topic: Topic
    text: str
    sources: tuple[Citation, ...]


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """The learning rate at another batch size, as a factor; ``None``: no rule.

    ``low`` and ``high`` are the factor at the ends of the critical batch's range. ``value``,
    ``beta1`` and ``beta2`` are filled in where the current ones are known; ``beta1`` only where the
    batch grows. ``holds`` says within which range.
    """

    optimizer: Optimizer
    rule: str
    factor: float | None
    low: float | None
    high: float | None
    value: float | None
    beta2: float | None
    warm_up: bool
    holds: str
    sources: tuple[Citation, ...]
    beta1: float | None = None


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Full steps of an epoch, and the samples that drop_last leaves out: those outside of full
    micro-batches."""

    batch_size: int
    steps: int
    dropped: int


@dataclasses.dataclass(frozen=True)
class Trade:
    """What a change from one batch size to another costs, as factors; ``None``: not known.

    ``steps`` and ``samples`` are those to the same loss at a tuned learning rate, ``time`` the time
    for that. ``steps_now`` and ``steps_then`` are numbers of steps, where the user gave one, and
    ``steps_same_samples`` that of the same number of samples.
    """

    steps: Interval
    samples: Interval
    time: Interval | None
    steps_now: int | None = None
    steps_then: int | None = None
    steps_same_samples: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchExplanation(ResultFile):
    """All that is said of ``before`` → ``after``, in samples of an optimizer step.

    ``noise_source`` says where the noise scale is from; ``critical_batch`` is the range that all
    factors are over: the noise scale's interval, and how far a training may be off. ``micro_batch``
    and ``accumulation`` are the split of ``before`` that keeps it in the memory of ``after`` (on
    each GPU).
    """

    FILE: ClassVar = Format.of("trainfit-batch", "trainfit batch explain --output")

    before: int
    after: int
    noise: Interval | None
    noise_source: str
    trade: Trade | None
    learning_rate: LearningRate
    answer: str
    claims: tuple[Claim, ...]
    goodput: GoodputCurve | None = None
    epochs: tuple[Epoch, ...] = ()
    micro_batch: int | None = None
    accumulation: int | None = None
    notes: tuple[str, ...] = ()
    critical_batch: Interval | None = None
