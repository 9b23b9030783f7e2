"""What any verb finds wrong with a job: why, what it rests on, what to do, and at what cost.

A kind of misuse has its name once, at the function that makes its finding (:class:`Kinds`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, get_args

from trainfit.results.loader_settings import LoaderSettings

Severity = Literal["critical", "warning", "info"]
Confidence = Literal["certain", "likely", "possible"]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One thing that a finding rests on: "waiting for batches", 0.041, "s/step".

    ``value`` is a number in ``unit`` or words; ``source`` is where it was read (empty: measured in
    the run that the result is about).
    """

    what: str
    value: float | str
    unit: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Fix:
    """What to do about a finding.

    Attributes:
        action: a command, a line to write, or words.
        undo: how to take it back; empty: that is plain.
        cost: what else it does.
        settings: values to set, by name ("num_workers": "4", "OMP_NUM_THREADS": "1").
        line: a line of the script to write.
        gain: the end-to-end rate with it divided by that without; ``None``: not predicted.
        title: what it does, in a few words, where ``action`` is what to type.
        tier: 1 needs no privilege, 2 lasts as long as a process, 3 changes the system; ``None``:
            not told.
        name: the word by which trainfit tries it itself (`trainfit pace --fix`).
    """

    action: str
    undo: str = ""
    cost: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    line: str = ""
    gain: float | None = None
    title: str = ""
    tier: int | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's code; ``line`` and ``column`` count from 1 (0: not known), ``source`` is
    the line as it stands."""

    file: str
    line: int
    column: int = 0
    source: str = ""

    @classmethod
    def parse(cls, text: str | None) -> Place | None:
        """The place that "file:line" is; ``None`` for other text."""
        file, _, line = (text or "").rpartition(":")
        return cls(file, int(line)) if file and line.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


#: Of a finding without a fix, and of one that is at no line.
_NOTHING_TO_DO = Fix("")
_NOWHERE = Place("", 0)


#: An evaluation that calls the model with gradients on.
EVALUATION_WITH_GRAPH: Final = "evaluation_with_graph"
#: … and calls of the model in a row whose graph no backward pass uses.
CALLS_WITH_GRAPH: Final = "calls_with_graph"
#: The kind of the finding that an epoch's last batch fails, which a plan's first line tells.
LAST_BATCH: Final = "last_batch_fails"
#: … and of one that the script fails after its first steps.
FAILS_LATER: Final = "fails_later"
#: … and of a schedule of learning rates that is over before the training.
SCHEDULE_ENDS: Final = "schedule_ends"
#: Likewise, that each epoch leaves memory behind; its subject is after how many the GPU is full.
EPOCH_GROWTH: Final = "memory_grows_by_epoch"
#: … and of calls of a model before the steps, which these do not contain; its subject is their
#: number and time.
SAMPLING: Final = "sampling_before_step"
#: … and of steps of a later epoch that have more or fewer micro-batches; its subject says so.
ACCUMULATION_CHANGES: Final = "accumulation_changes"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that costs time, memory or the result, or ends a run, and what to do about it.

    Attributes:
        kind: a stable identifier ("input_bound", "worker_killed", "driver_too_old").
        severity: "critical" ends a run or spoils its result, or costs much of its time.
        title: what is wrong, in a line.
        cause: why that is so, in words; of a failure what was seen of it.
        fixes: the first is the one to try first.
        subject: the part of the job that it is about, where there are several: a precision
            ("bfloat16").
        share: of the run's time that it costs, or concerns (``None``: none, or not known).
        place: where it is in the user's code.
        rank: the rank that it is about; ``None``: all.
        loader: the DataLoader settings that it was met under; ``None``: any.
    """

    kind: str
    severity: Severity
    title: str
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    fixes: tuple[Fix, ...] = ()
    confidence: Confidence = "certain"
    share: float | None = None
    place: Place | None = None
    rank: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    loader: LoaderSettings | None = None
    subject: str = ""

    @property
    def fix(self) -> Fix:
        """The fix to try first; one without an action where there is none."""
        return next(iter(self.fixes), _NOTHING_TO_DO)

    @property
    def at(self) -> Place:
        """Its place; one without a file where it has none."""
        return self.place or _NOWHERE

    @property
    def is_critical(self) -> bool:
        return self.severity == "critical"

    def value_of(self, what: str) -> float | None:
        """The number of the evidence that is called ``what``."""
        values = (each.value for each in self.evidence if each.what == what)
        return next((value for value in values if not isinstance(value, str)), None)


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A kind of finding of which nothing can be said: why, and what would be needed."""

    kind: str
    reason: str
    needs: str


def fails_later(title: str, subject: str) -> Finding:
    """A finding that a script which has begun to train will fail, next to its cause; ``subject`` is
    when, as a plan's first line has it."""
    return Finding(FAILS_LATER, "critical", title, (), "", (), subject=subject)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first, else in their order."""
    order = get_args(Severity)
    return tuple(sorted(findings, key=lambda each: order.index(each.severity)))


def failure_finding(
    kind: str,
    title: str,
    cause: str,
    action: str,
    loader: LoaderSettings | None = None,
    place: Place | None = None,
) -> Finding:
    """What ends a run, or gives wrong samples: certain, with one fix."""
    return Finding(kind, "critical", title, (), cause, (Fix(action),), loader=loader, place=place)


#: Gets its kind, and what was told of one (:class:`trainfit.results.runs.learning.Misuse`).
_Finds = Callable[..., Finding]


class Kinds(dict[str, _Finds]):
    """The functions that make findings, by kind.

    Attributes
    ----------
    later: Those that an evaluation, a later epoch or the run's end may be the first to show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.later: list[str] = []

    def of(self, kind: str, *, later: bool = False) -> Callable[[_Finds], _Finds]:
        """Decorates the function that makes the finding of ``kind``."""

        def put(finds: _Finds) -> _Finds:
            self[kind] = finds
            if later:
                self.later.append(kind)
            return finds

        return put
