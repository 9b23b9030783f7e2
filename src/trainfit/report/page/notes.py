"""Every assumption, warning and note of the results, with the file each is from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from trainfit.report.notes_text import note_text, plain, plan_notes
from trainfit.report.page.blocks import Item, Items, Section, Tone, section
from trainfit.report.protection_text import protection_notes
from trainfit.results.files.notes import Note, Severity
from trainfit.results.loader.result import LoaderResult
from trainfit.results.machine.pace import PaceResult
from trainfit.results.memory.summary import RecordingSummary
from trainfit.results.plan.result import PlanResult

_TONES: Final[dict[Severity, Tone]] = {
    "changes the figures": "bad",
    "may change the figures": "warn",
    "information": "plain",
}


def notes_section(results: Sequence[tuple[str, Any]]) -> list[Section]:
    """Those that change figures first; ``results`` with their files' names."""
    several = len(results) > 1
    found = [
        Item(
            note_text(note),
            _TONES[note.severity],
            f"{note.kind} · {name}" if several else note.kind,
        )
        for name, result in results
        for note in _notes(result)
    ]
    order = list(_TONES.values())
    found.sort(key=lambda item: order.index(item.tone))
    return section("Assumptions and warnings", Items(tuple(found)) if found else None)


def _notes(result: Any) -> Iterator[Note]:
    if isinstance(result, PlanResult):
        yield from plan_notes(result)
        yield from plain(protection_notes(result.protection))
    elif isinstance(result, LoaderResult):
        yield from (_doubt(doubt.summary, doubt.meaning, doubt.decides) for doubt in result.doubts)
        doubted = {f"{doubt.summary}: {doubt.meaning}" for doubt in result.doubts}
        others = (note for note in result.notes if note not in doubted)
        yield from plain((*others, *protection_notes(result.protection)))
    elif isinstance(result, PaceResult):
        yield from (
            Note("note", text, severity="may change the figures") for text in result.warnings
        )
        yield from (Note("note", each.text) for each in result.unmeasured)
        yield from plain(result.notes)
    elif isinstance(result, RecordingSummary):
        yield from result.structured_notes
    else:
        yield from plain(getattr(result, "notes", ()))


def _doubt(summary: str, meaning: str, decides: bool) -> Note:
    severity: Severity = "changes the figures" if decides else "may change the figures"
    return Note("note", f"{summary}: {meaning}" if meaning else summary, severity=severity)
