"""What a plan tells: its progress while simulated runs go on, and its notes, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from trainfit.results.files.contents import Note, NoteKind, Severity
from trainfit.results.runs.trace import RunStatus


@dataclasses.dataclass(frozen=True)
class FirstAnswer:
    """What is known before the plan is: the job as it is, from the first run.

    ``device_bytes`` of ``capacity_bytes`` are needed; ``step_s`` is the step time (``None``: not
    predicted).
    """

    batch_size: int | None
    fits: bool
    device_bytes: int
    capacity_bytes: int
    step_s: float | None


class Progress:
    """Hears of a plan, from any thread; nothing is done about it here.

    Calling it says that something else begins, in words.
    """

    def __call__(self, text: str) -> None:
        """``text`` begins now."""

    def expect(self, runs: int) -> None:
        """Expect so many simulated runs in all, as far as is known by now."""

    def begin(self, run: int, title: str) -> None:
        """The ``run``-th run (from 1) begins."""

    def status(self, run: int, status: RunStatus) -> None:
        """It has come so far."""

    def end(self, run: int) -> None:
        """It is over."""

    def warn(self, text: str) -> None:
        """Something that the user should know at once."""

    def first_answer(self, answer: FirstAnswer) -> None:
        """The job as it is was simulated; other batch sizes and AMP are still to come."""


class Lines(Progress):
    """One call of ``say`` for each thing that begins."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def __call__(self, text: str) -> None:
        self._say(text)

    def begin(self, run: int, title: str) -> None:
        self._say(title)

    def warn(self, text: str) -> None:
        self._say(text)


def as_progress(progress: Callable[[str], None]) -> Progress:
    """A plain function as a progress; a progress as it is."""
    return progress if isinstance(progress, Progress) else Lines(progress)


# ---
# The notes of a plan, collected in order.


CHANGES: Final[Severity] = "changes the figures"
MAY_CHANGE: Final[Severity] = "may change the figures"


class Notes(list[str]):
    """The texts of a plan's notes; :meth:`add` keeps what is known of each.

    A text that was only appended is a plain note, for information.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, Note] = {}

    def add(
        self,
        text: str,
        severity: Severity = "information",
        kind: NoteKind = "note",
        *,
        lines: tuple[str, ...] = (),
        first: bool = False,
    ) -> None:
        """Append a note, or put it ``first``."""
        self._known[text] = Note(kind, text, 1, lines, severity)
        self.insert(0 if first else len(self), text)

    def structured(self) -> tuple[Note, ...]:
        """All of them as data."""
        return tuple(self._known.get(text, Note("note", text)) for text in self)
