"""Notes of a result as data: what they are about, how often, where, and how much they matter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

#: How much a note changes what the result says, the most first.
Severity = Literal["changes the figures", "may change the figures", "information"]

#: What a note is about: something that the simulation had to assume; something that the user has
#: to do, because the launch command cannot; anything else.
NoteKind = Literal["assumption", "action", "note"]

_ORDER: Final[tuple[Severity, ...]] = (
    "changes the figures",
    "may change the figures",
    "information",
)
#: Where an assumption was made, at the end of its text (``assume`` of simgpu/dispatch/engine.py).
_PLACE: Final = re.compile(r"\A(?P<text>.*) \(at (?P<line>.+:\d+)\)\Z", re.DOTALL)
_NUMBER: Final = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Note:
    """One note, or several of the same text that were made ``count`` times in all.

    ``lines`` are the user's lines ("file:line") that it is about.
    """

    kind: NoteKind
    text: str
    count: int = 1
    lines: tuple[str, ...] = ()
    severity: Severity = "information"


def assumption_notes(assumptions: Mapping[str, int]) -> list[Note]:
    """What a simulation assumed, with how often each was; the line goes out of the text."""
    found = []
    for text, times in assumptions.items():
        placed = _PLACE.match(text)
        lines = (placed["line"],) if placed is not None else ()
        plain = placed["text"] if placed is not None else text
        found.append(Note("assumption", plain, times, lines, "may change the figures"))
    return found


def complete(
    structured: Iterable[Note], notes: Iterable[str], assumptions: Mapping[str, int]
) -> list[Note]:
    """All notes of a result, grouped; ``notes`` and ``assumptions`` are texts that files of
    earlier versions have alone, and that some have in addition to ``structured``."""
    found = list(structured)
    known = {note.text for note in found}
    found += [Note("note", text) for text in notes if text not in known]
    if not any(note.kind == "assumption" for note in found):
        found += assumption_notes(assumptions)
    return grouped(found)


def grouped(notes: Iterable[Note]) -> list[Note]:
    """Assumptions that differ in numbers and lines alone become one, with each number's range, and
    so do other notes of the same text.

    Those that matter most come first; the order is kept otherwise.
    """
    groups: dict[tuple[str, str, str], list[Note]] = {}
    for note in notes:
        is_assumption = note.kind == "assumption"  # in others, numbers may be part of a name
        text = _NUMBER.sub("#", note.text) if is_assumption else note.text
        key = (note.kind, text, note.severity)
        groups.setdefault(key, []).append(note)
    found = [_one(group) for group in groups.values()]
    return sorted(found, key=lambda note: _ORDER.index(note.severity))


def _one(group: list[Note]) -> Note:
    if len(group) == 1:
        return group[0]
    lines = dict.fromkeys(line for note in group for line in note.lines)
    return dataclasses.replace(
        group[0],
        text=_ranges([note.text for note in group]),
        count=sum(note.count for note in group),
        lines=tuple(lines),
    )


def _ranges(texts: list[str]) -> str:
    """One text for several that differ in their numbers: "all 3 values", "all 5 values" become
    "all 3 to 5 values"."""
    columns = zip(*(map(int, _NUMBER.findall(text)) for text in texts), strict=True)
    ranges = iter([(min(column), max(column)) for column in columns])

    def number(found: re.Match[str]) -> str:
        low, high = next(ranges)
        return found[0] if low == high else f"{low} to {high}"

    return _NUMBER.sub(number, texts[0])
