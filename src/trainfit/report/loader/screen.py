"""The result of ``trainfit loader`` on one screen: the verdict, what to write, what decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.report.loader.table import settings_section
from trainfit.report.loader.text import (
    LIMITS,
    all_faults,
    certainty,
    step_words,
    title,
    verdict_line,
    write_section,
)
from trainfit.report.loader.words import without_others_words
from trainfit.report.protection_text import protection_notes
from trainfit.report.screen import (
    Line,
    ScreenBlock,
    Style,
    blank,
    block,
    made,
    screen,
    shortened,
)
from trainfit.results.format import percent, times
from trainfit.results.loader.advice import most_helpful_first
from trainfit.results.loader.result import LoaderResult
from trainfit.results.text import printable

_STYLES: Final[dict[str, Style]] = {
    "change": "bad",
    "keep": "good",
    "nothing_to_gain": "good",
    "no_setting_helps": "bad",
    "cannot_tell": "title",
}
#: Lines of a fault, of a change or of a note.
_LINES: Final = 2


def loader_screen(result: LoaderResult) -> list[Line]:
    """At most 25 lines."""
    return screen(_blocks(result), "what a batch costs, the machine, all settings, threads, notes")


def _blocks(result: LoaderResult) -> Iterator[ScreenBlock]:
    yield block(verdict_line(result), style=_STYLES[result.verdict])
    if result.reason:
        yield block(printable(result.reason), 1, first="  ")
    yield _short(without_others_words(result), 25)
    yield blank()
    if write := write_section(result).split("\n")[1:]:
        yield made(write, title="Write")
        yield blank()
    for number, fault in enumerate(all_faults(result)):
        said = made(shortened(printable(f"{fault.kind}: {fault.summary}"), _LINES, "  ", "    "))
        fix = made(shortened(printable(f"fix: {fault.fix}"), _LINES, "    ", "    "))
        head = [] if number else [Line("Faults", "title")]
        yield ScreenBlock((*head, *said.lines, *fix.lines), 2 + 20 * number)
    yield block(title(result), 15, style="title")
    if result.verdict in ("change", "keep"):
        yield block(f"limit with these settings: {LIMITS[result.limit]}", 12, first="  ")
    yield _short(step_words(result), 11)
    yield _short(certainty(result), 10)
    section = settings_section(result, tried=False).split("\n")
    yield made(section[1:], 5, title=section[0])
    for number, each in enumerate(most_helpful_first(result.advice)):
        figure = times(each.gain) if each.gain is not None else percent(each.share)
        of = "predicted" if each.gain is not None else "of the time"
        text = printable(f"{figure} ({of}): {each.summary}: {each.how}")
        head = [] if number else [Line("Other changes", "title")]
        lines = made(shortened(text, _LINES, "  - ", "    ")).lines
        yield ScreenBlock((*head, *lines), 30 + 10 * number)
    for number, note in enumerate([*result.notes, *protection_notes(result.protection)]):
        yield made(shortened(printable(note), _LINES, "  - ", "    "), 35 + 10 * number, notes=1)


def _short(text: str, rank: int) -> ScreenBlock:
    return made(shortened(text, _LINES, "  ", "    "), rank) if text else ScreenBlock(())
