"""Two watched runs in words: the verdict, what differs, and what changed by how much."""

from __future__ import annotations

from typing import Final

from trainfit.report.screen import Line, ScreenBlock, Style, block, made, screen
from trainfit.report.table import table_rows
from trainfit.report.watch.words import PHASES
from trainfit.results.format import duration, percent, rate, size
from trainfit.results.text import printable, wrapped
from trainfit.results.watch.comparison import Change, Comparison, Difference, Side

_STYLES: Final[dict[str, Style]] = {"faster": "good", "slower": "bad"}
#: Phases below this share of a step, before and after, are left out.
_SHOWN: Final = 0.01


def comparison_screen(result: Comparison) -> list[Line]:
    """The verdict, what differs and the measures that matter most, in at most 25 lines."""
    return screen(_blocks(result), "all measures and notes")


def comparison_lines(result: Comparison) -> list[Line]:
    """The whole comparison."""
    return [line for each in _blocks(result) for line in each.lines]


def _blocks(result: Comparison) -> list[ScreenBlock]:
    differs = "Differs:" if result.differences else "The set-up does not differ."
    differences = [
        made(wrapped(_difference(each), "  ", "    "), 12 + at)
        for at, each in enumerate(result.differences)
    ]
    notes = [
        block(f"note: {printable(note)}", 10 + 5 * at, style="quiet")
        for at, note in enumerate(result.notes)
    ]
    return [
        block(answer_text(result), style=_STYLES.get(result.verdict, "title")),
        *(
            block(f"{name}: {_side(side)}", 30, style="quiet")
            for name, side in (("A", result.before), ("B", result.after))
        ),
        block(differs, 11),
        *differences,
        *change_blocks(result.changes),
        *notes,
    ]


def change_blocks(changes: tuple[Change, ...]) -> list[ScreenBlock]:
    """A row for each measure: before, after, the effect with its interval, and the verdict."""
    rows = table_rows([_change(each) for each in notable(changes)], "lrlrw")
    return [made(row, 2 + 2 * at) for at, row in enumerate(rows)]


def notable(changes: tuple[Change, ...]) -> list[Change]:
    """Without phases that are no part of a step worth a line, before or after."""
    whole = changes[0].before if changes else None
    return [each for each in changes if _matters(each, whole)]


def effect_text(change: Change) -> str:
    """ "-12.3% (95%: -14.0% to -10.5%)"."""
    if change.effect is None:
        return ""
    suffix = {"itself": "%", "step": "% of a step", "points": " points"}[change.basis]
    if change.interval is None:
        return f"{100 * change.effect:+.1f}{suffix}"
    low, high = (100 * each for each in change.interval)
    return f"{100 * change.effect:+.1f}{suffix} (95%: {low:+.1f} to {high:+.1f})"


def answer_text(result: Comparison) -> str:
    """The verdict in one line."""
    change = result.main
    if change is None or result.verdict == "cannot tell":
        return f"Cannot tell: it needs {printable(result.needs)}"
    if result.verdict == "no difference":
        found = f"; detectable from {percent(change.detectable or 0, decimals=1)} on"
        return f"No difference of the {change.what} found: {effect_text(change)}{found}"
    return f"B is {result.verdict}: {change.what} {effect_text(change)}"


def _side(side: Side) -> str:
    return f"{side.steps} steady steps, {printable(side.folder)}"


def _difference(each: Difference) -> str:
    before, after = (printable(value) or "(none)" for value in (each.before, each.after))
    return f"{printable(each.what)}: {before} -> {after}"


def _matters(change: Change, whole: float | None) -> bool:
    if change.basis != "step" or not whole:
        return True
    return max(change.before or 0.0, change.after or 0.0) >= _SHOWN * whole


def name_of(change: Change) -> str:
    """The measure in words."""
    return PHASES.get(change.what, change.what)


def _change(change: Change) -> tuple[str, ...]:
    if change.before is None or change.after is None:
        return name_of(change), "", "", "", "not measured in both"
    before, after = (value_text(change, each) for each in (change.before, change.after))
    same = "  no difference" if change.verdict == "no difference" else ""
    return name_of(change), before, "->", after, effect_text(change) + same


def value_text(change: Change, value: float | None) -> str:
    """A value of this measure with its unit."""
    if change.unit in ("s/step", "s/sample"):
        return duration(value)
    if change.unit == "bytes":
        return size(value)
    return percent(value) if change.unit == "share" else rate(value)
