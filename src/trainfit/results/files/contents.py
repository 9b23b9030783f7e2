"""What every result carries as data: notes, and its numbers under stable names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.text import GIB

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
#: Where an assumption was made, at the end of its text (``assume`` of simgpu/device/engine.py).
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
    notes = []
    for text, times in assumptions.items():
        placed = _PLACE.match(text)
        lines = (placed["line"],) if placed is not None else ()
        plain = placed["text"] if placed is not None else text
        notes.append(Note("assumption", plain, times, lines, "may change the figures"))
    return notes


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

    def number(match: re.Match[str]) -> str:
        low, high = next(ranges)
        return match[0] if low == high else f"{low} to {high}"

    return _NUMBER.sub(number, texts[0])


# ---
# The numbers of a result under stable names, for experiment trackers and for conditions.
#
# A key ends with its unit, which `Kind.METRICS` (by key: what it is) thus declares:
#
#     step_ms             a time, in milliseconds (epoch_s: in seconds)
#     device_gib          bytes, in GiB
#     samples_per_s       a rate; loader_batches_per_s, reached_hz
#     mfu_share           a share, from 0 to 1
#     largest_batch       a count


#: What all keys of the flat form begin with.
PREFIX: Final = "trainfit/"

MetricUnit = Literal["s", "bytes", "1/s", "share", "count"]


@dataclasses.dataclass(frozen=True)
class MetricName:
    """``short`` is how conditions name it ("step", "samples/s"); a value in ``unit`` times
    ``scale`` is in that of the key."""

    key: str
    short: str
    unit: MetricUnit
    scale: float = 1.0


#: By the end of the key, a longer one first: what replaces it in the short name, unit and scale.
_ENDS: Final[tuple[tuple[str, str, MetricUnit, float], ...]] = (
    ("_batches_per_s", "", "1/s", 1.0),
    ("_per_s", "/s", "1/s", 1.0),
    ("_share", "", "share", 1.0),
    ("_gib", "", "bytes", 1 / GIB),
    ("_ms", "", "s", 1e3),
    ("_hz", "", "1/s", 1.0),
    ("_s", "", "s", 1.0),
)


def metric(key: str) -> MetricName:
    """What a key says of itself."""
    for end, short, unit, scale in _ENDS:
        if key.endswith(end):
            return MetricName(key, key.removesuffix(end) + short, unit, scale)
    return MetricName(key, key, "count")


class Metered:
    """Has numbers under stable names."""

    METRICS: ClassVar[Mapping[str, str]] = {}
    """By key: what it is. No key is renamed, nor its unit changed."""

    def quantities(self) -> Mapping[str, float | None]:
        """The values by the keys of ``METRICS``, in seconds, bytes, shares and counts; ``None``:
        neither measured nor predicted."""
        return {}

    def metrics(self) -> dict[str, float]:
        """A flat dict of numbers for a tracker: {"trainfit/step_ms": 12.3, …}.

        What was neither measured nor predicted is left out. Empty for a kind of result that has no
        such numbers.
        """
        return {
            PREFIX + key: value if (scale := metric(key).scale) == 1 else value * scale
            for key, value in self.quantities().items()
            if value is not None and math.isfinite(value)
        }
