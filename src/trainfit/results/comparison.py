"""What is said of several watched runs: two compared, or a change that was tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from trainfit.results.files.documents import Format, ResultFile

Group = Literal[
    "command", "loader", "precision", "batch size", "model", "version", "variable", "hardware"
]
Verdict = Literal["faster", "slower", "no difference", "cannot tell"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that the runs were given or ran on; empty: one of them has no such thing."""

    group: Group
    what: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Change:
    """A measure of both runs. ``None`` is not measured.

    ``effect`` with its 95% ``interval`` is relative to the value before (``basis`` "itself"), to
    the whole step's time before ("step"), or a difference of shares ("points"). ``verdict`` is
    empty where there is no interval. ``detectable`` is how large an effect must be to be found in
    80 of 100 such comparisons.
    """

    what: str
    unit: Literal["s/step", "s/sample", "samples/s", "share", "bytes"]
    before: float | None
    after: float | None
    effect: float | None = None
    interval: tuple[float, float] | None = None
    basis: Literal["itself", "step", "points"] = "itself"
    verdict: Literal["more", "less", "no difference", ""] = ""
    detectable: float | None = None


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the runs: its folder, its command, and its steady steps."""

    folder: str
    command: str
    steps: int


@dataclasses.dataclass(frozen=True)
class Comparison(ResultFile):
    """The verdict on a run ``after`` against one ``before``.

    It is about the time of a step, or of a sample where batch sizes differ. ``needs`` is what would
    let it be told where it cannot be.
    """

    FILE: ClassVar = Format.of("trainfit-watch-comparison", "trainfit compare --output")

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    verdict: Verdict
    needs: str = ""
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Change | None:
        """The change that the verdict is about."""
        return self.changes[0] if self.changes else None


# ---
# What came of a recommended change that was tried: runs with it and without, in turn.


@dataclasses.dataclass(frozen=True)
class VerifiedRun:
    """One of the runs, in their order; ``changed``: with the change."""

    changed: bool
    folder: str
    steps: int


@dataclasses.dataclass(frozen=True)
class Verification(ResultFile):
    """``verdict`` is about ``settings``, the recommendation of the finding ``kind``, as far as the
    command can be given it; "not tried": ``reason`` says why.

    ``command`` is the command as it is, ``changed_command`` with the change. ``line`` is what to
    change by hand.
    """

    FILE: ClassVar = Format.of("trainfit-watch-verification", "trainfit watch --verify --output")

    verdict: Literal["proven", "no gain", "worse", "cannot tell", "not tried"]
    command: str
    kind: str = ""
    title: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Recommended with them, and not tried: the command has no place for them."""
    changed_command: str = ""
    reason: str = ""
    line: str = ""
    runs: tuple[VerifiedRun, ...] = ()
    comparison: Comparison | None = None

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """Of speed, relative, with its 95% interval; ``None``: not measured."""
        change = None if self.comparison is None else self.comparison.main
        if change is None or change.effect is None or change.interval is None:
            return None
        low, high = change.interval
        return 1 / (1 + change.effect) - 1, 1 / (1 + high) - 1, 1 / (1 + low) - 1
