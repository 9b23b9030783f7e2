"""Two watched runs in words: the verdict, what differs, and what changed by how much."""

from __future__ import annotations

from typing import Final

from trainfit.report.plan.screen import COLUMNS
from trainfit.report.screen import Line, Style
from trainfit.report.watch.words import PHASES
from trainfit.results.format import duration, percent, rate, size
from trainfit.results.text import printable, wrapped
from trainfit.results.watch.comparison import Change, Comparison, Difference

_STYLES: Final[dict[str, Style]] = {"faster": "good", "slower": "bad"}
#: Phases below this share of a step, before and after, are left out.
_SHOWN: Final = 0.01


def comparison_screen(result: Comparison, columns: int = COLUMNS) -> list[Line]:
    """The whole comparison."""
    lines = _wrapped(answer_text(result), _STYLES.get(result.verdict, "title"), columns)
    lines.append(Line(f"A: {_side(result, 'before')}", "quiet"))
    lines.append(Line(f"B: {_side(result, 'after')}", "quiet"))
    lines.append(Line("Differs:" if result.differences else "The set-up does not differ."))
    for each in result.differences:
        lines += _wrapped(_difference(each), "plain", columns, "  ")
    lines += change_lines(result.changes, columns)
    for note in result.notes:
        lines += _wrapped(f"note: {printable(note)}", "quiet", columns)
    return lines


def change_lines(changes: tuple[Change, ...], columns: int) -> list[Line]:
    """A line a measure: before, after, the effect with its interval, and the verdict."""
    shown = notable(changes)
    width = max((len(name_of(each)) for each in shown), default=0)
    lines: list[Line] = []
    for each in shown:
        made = wrapped(_change(each), f"  {name_of(each):<{width}}  ", " " * (width + 4), columns)
        lines += map(Line, made.splitlines())
    return lines


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


def _side(result: Comparison, name: str) -> str:
    side = result.before if name == "before" else result.after
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


def _change(change: Change) -> str:
    if change.before is None or change.after is None:
        return "not measured in both"
    before, after = (value_text(change, each) for each in (change.before, change.after))
    verdict = {"no difference": "  no difference", "": ""}.get(change.verdict, "")
    return f"{before} -> {after}  {effect_text(change)}{verdict}"


def value_text(change: Change, value: float | None) -> str:
    """A value of this measure with its unit."""
    if change.unit in ("s/step", "s/sample"):
        return duration(value)
    if change.unit == "bytes":
        return size(value)
    return percent(value) if change.unit == "share" else rate(value)


def _wrapped(text: str, style: Style, columns: int, indent: str = "") -> list[Line]:
    made = wrapped(text, indent, indent + "  ", columns)
    return [Line(line, style) for line in made.splitlines()]
