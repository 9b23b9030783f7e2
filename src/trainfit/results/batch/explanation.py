"""The trade between two batch sizes, as ``trainfit batch explain`` says it.

Format history
    1   first version
    2   ``critical_batch``, ``learning_rate.beta1``
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from trainfit.results.batch.goodput import GoodputCurve
from trainfit.results.batch.noise import Interval
from trainfit.results.files.documents import Format, ResultFile

FORMAT: Final = "trainfit-batch"
VERSION: Final = 2
_REMAKE: Final = "re-create it with `trainfit batch explain --output`"
_WANTED: Final = "give a file that `trainfit batch explain --output` wrote"

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
class Claim:
    """Something that is said, with where it is from."""

    topic: Topic
    text: str
    source: str


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
    source: str
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

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED)

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
