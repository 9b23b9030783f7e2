"""What came of a recommended change that was tried: runs with it and without, in turn.

Format history
    1   first version
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.watch.comparison import Comparison

FORMAT: Final = "trainfit-watch-verification"
VERSION: Final = 1
_REMAKE: Final = "re-create it with `trainfit watch --verify --output`"
_WANTED: Final = "give a file that `trainfit watch --verify --output` wrote"


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

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED)

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
