"""A plan on one screen: the answer, the launch command, the facts that decide, notes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainfit.report.memory.table import (
    kinds_text,
    memory_rows,
    modules_text,
)
from trainfit.report.notes_text import note_text, plan_notes, short_place
from trainfit.report.plan.answer import answer
from trainfit.report.plan.facts import facts
from trainfit.report.plan.fixes import fix_lines, fix_title
from trainfit.report.plan.launch import launch_lines
from trainfit.report.plan.launch_parts import change_lines
from trainfit.report.screen import LINES, Line, ScreenBlock, Style, cut_short, plain_text, within
from trainfit.results.files.notes import Note
from trainfit.results.format import count, duration
from trainfit.results.plan.result import PlanResult
from trainfit.results.text import WIDEST, printable, wrapped

#: Columns from which it has at most so many lines, and the fewest that it is laid out for.
COLUMNS: Final = 80
NARROWEST: Final = 52

#: Lines of a launch command from which it is one long line, which a terminal wraps and from which
#: it can be copied as well.
_LAUNCH_LINES: Final = 5
#: Lines of a fact or a note at most, and notes.
_FACT_LINES: Final = 2
_NOTES: Final = 3
_LABEL: Final = 12
_PLACE: Final = re.compile(r"(?<![\w/])/?(?:[^\s/:]+/){2,}[^\s/:]+:\d+")

_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|h|min)\b)")
_FIXED: Final = "\u00a0"


def plan_screen(result: PlanResult, columns: int = COLUMNS) -> list[Line]:
    """At most :data:`LINES` lines of ``columns``, but for words that are longer.

    A terminal of fewer columns than :data:`COLUMNS` gets more lines.
    """
    width = max(NARROWEST, min(columns, WIDEST))
    notes = plan_notes(result)
    blocks = [
        *_answer(result, width),
        *_launch(result, notes, width),
        *_memory(result, width),
        *_facts(result, width),
        *_fixes(result, width),
        *_notes([note for note in notes if note.kind != "action"], width),
    ]
    if width >= COLUMNS:
        blocks = within(blocks, LINES - 1)
    hidden = len(notes) - sum(block.notes for block in blocks)
    lines = [line for block in blocks for line in block.lines]
    return [*lines, Line(_more(result, hidden, width), "quiet")]


def screen_text(result: PlanResult) -> str:
    """The same as plain text."""
    return plain_text(plan_screen(result))


def _answer(result: PlanResult, width: int) -> list[ScreenBlock]:
    style: Style = "good" if result.now.fits else "bad"
    text = wrapped(printable(answer(result)), "", "  ", width)
    return [ScreenBlock(tuple(Line(line, style) for line in text.split("\n"))), _blank(92)]


def _launch(result: PlanResult, notes: Sequence[Note], width: int) -> list[ScreenBlock]:
    """The launch command, and what the user has to change because it cannot."""
    blocks = []
    if result.can_start:
        text = launch_lines(result.launch, 2, width)
        if text.count("\n") >= _LAUNCH_LINES:
            text = f"  {printable(result.launch)}"
        blocks.append(ScreenBlock(tuple(map(Line, text.split("\n")))))
    changes = change_lines(result.launch_parts)
    for number, change in enumerate(changes):
        rank = 0 if not number else 30 + number
        blocks.append(ScreenBlock(_wrapped(_shortened(change), "  - ", width), rank))
    for number, note in enumerate(note for note in notes if note.kind == "action"):
        rank = 0 if not number + len(changes) else 40 + number
        blocks.append(ScreenBlock(_wrapped(_short(note), "  - ", width), rank, notes=1))
    return [*blocks, _blank(91)] if blocks else []


def _memory(result: PlanResult, width: int) -> list[ScreenBlock]:
    now, chosen = result.now, result.chosen
    best = chosen.recommended_batch
    other_amp = f", {chosen.amp}" if chosen is not now else ""
    differs = best != now.batch_size or bool(other_amp)
    both = result.recommended is not None and best is not None and differs
    present = f"batch size {now.batch_size}" if now.batch_size else "the current batch size"
    gpu, amp = printable(result.gpu), f"AMP {printable(now.amp)}"
    where = f"{gpu}, {amp}" if both else f"{gpu} at {present}, {amp}"
    title = wrapped(f"Memory on {where} (90% prediction interval)", "", "  ", width)
    columns, titles = [now.memory], list[str]()
    if both and result.recommended is not None and width >= COLUMNS:
        columns.append(result.recommended)
        second = f"batch size {best}{other_amp or ', recommended'}"
        titles = [present, printable(second)]
    rows = [
        *(Line(line, "title") for line in title.split("\n")),
        *map(Line, memory_rows(columns, titles)),
    ]
    total = now.memory.allocated_bytes
    kinds, modules = kinds_text(now.by_kind_bytes, total), modules_text(now.by_module_bytes, total)
    blocks = [ScreenBlock(tuple(rows))]
    if kinds:
        blocks.append(ScreenBlock(_wrapped(kinds, f"  {'at the peak':<21}", width), 12))
    if modules:
        blocks.append(ScreenBlock(_wrapped(modules, f"  {'in modules':<21}", width), 45))
    return blocks


def _facts(result: PlanResult, width: int) -> list[ScreenBlock]:
    title = ScreenBlock((Line("Batch size and speed (predicted)", "title"),), 70)
    found = [
        ScreenBlock(_wrapped(_shortened(fact.text), f"  {fact.label:<{_LABEL}}", width), fact.rank)
        for fact in facts(result)
    ]
    return [title, *found] if found else []


def _fixes(result: PlanResult, width: int) -> list[ScreenBlock]:
    lines = fix_lines(result)
    if not lines:
        return []
    found = [
        ScreenBlock((Line(_fitted(f"  - {printable(text)}", width)),), 6 + 15 * number)
        for number, text in enumerate(lines)
    ]
    return [ScreenBlock((Line(fix_title(result), "title"),)), *found]


def _fitted(line: str, width: int) -> str:
    return line if len(line) <= width else cut_short(line, width)


def _notes(notes: Sequence[Note], width: int) -> list[ScreenBlock]:
    shown = notes[:_NOTES]
    if not shown:
        return []
    found = []
    for number, note in enumerate(shown):
        serious = note.severity == "changes the figures"
        rank = 3 if serious and not number else 48 + 20 * number - 10 * serious
        lines = _wrapped(_short(note), "  - ", width)
        if not number:
            lines = (Line("Notes", "title"), *lines)
        found.append(ScreenBlock(lines, rank, notes=1))
    return found


def _more(result: PlanResult, hidden: int, width: int) -> str:
    """Where to read more, and how the figures came about, as far as that has room."""
    what = "optimizer step" if result.inference is None else "model call"
    torch = printable(result.environment.get("torch", "?"))
    more = f"{count(hidden, 'more note')} and details" if hidden else "Details"
    steps, seconds = f"{count(result.steps, what)} simulated", duration(round(result.seconds))
    facts = ((steps, f"torch {torch}", seconds), (steps, seconds), (steps,))
    said = [f"{more}: --explain ({', '.join(each)})" for each in facts]
    return next((each for each in said if len(each) <= width), f"{more}: --explain")


def _blank(rank: int) -> ScreenBlock:
    return ScreenBlock((Line(""),), rank)


def _wrapped(text: str, first: str, width: int) -> tuple[Line, ...]:
    """At most :data:`_FACT_LINES` lines; what does not fit into them ends in an ellipsis."""
    whole = _UNIT.sub(_FIXED, printable(text))  # no line break between a number and its unit
    lines = wrapped(whole, first, " " * len(first), width).replace(_FIXED, " ").split("\n")
    if len(lines) > _FACT_LINES:
        lines = [*lines[: _FACT_LINES - 1], cut_short(lines[_FACT_LINES - 1], width)]
    return tuple(map(Line, lines))


def _short(note: Note) -> str:
    return _shortened(note_text(note, short=True))


def _shortened(text: str) -> str:
    """Places in the user's code without the folders that they lie in."""
    return _PLACE.sub(lambda found: short_place(found[0]), text)
