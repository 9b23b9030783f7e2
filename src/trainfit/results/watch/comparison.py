"""What is said of two watched runs: what differs in their set-up, and what changed by it.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile

FORMAT: Final = "trainfit-watch-comparison"
VERSION: Final = 1
_REMAKE: Final = "re-create it with `trainfit compare --output`"
_WANTED: Final = "give a file that `trainfit compare --output` wrote"

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

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED)

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
