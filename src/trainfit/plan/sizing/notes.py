"""The notes of a plan, collected in order."""

from __future__ import annotations

from typing import Final

from trainfit.results.files.notes import Note, NoteKind, Severity

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
