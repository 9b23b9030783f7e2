"""Watched runs beside each other in words: two compared, or a change that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainfit.report.layout import Line, ScreenBlock, Style, block, made, screen, table_rows
from trainfit.report.watch import PHASES
from trainfit.results.comparison import Change, Comparison, Difference, Side, Verification
from trainfit.results.text import duration, percent, printable, rate, size, wrapped

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


# ---
# A change that was tried, in words.


#: A comparison that finds only gains above this share has not shown that there is none.
_COARSE: Final = 0.10
_VERDICT_STYLES: Final[dict[str, Style]] = {"proven": "good", "worse": "bad"}


def verification_screen(result: Verification) -> list[Line]:
    """The verdict, what was measured, and the command with the change: at most 25 lines."""
    return screen(_verified_blocks(result), "all measures")


def verification_lines(result: Verification) -> list[Line]:
    """The same with all measures."""
    return [line for each in _verified_blocks(result) for line in each.lines]


def _verified_blocks(result: Verification) -> list[ScreenBlock]:
    blocks = [block(verified_text(result), style=_VERDICT_STYLES.get(result.verdict, "title"))]
    if result.title:
        blocks.append(block(f"finding: {printable(result.title)}", 20))
    if result.comparison is not None:
        before, after = result.comparison.before.steps, result.comparison.after.steps
        text = f"{before} steady steps as it is, {after} with the change:"
        blocks += [block(text, 1, style="quiet"), *change_blocks(result.comparison.changes)]
    if result.left_out and result.settings:
        rest = _settings(result.left_out)
        text = f"not tried, as the command has no placeholder: {rest}"
        blocks.append(block(text, 8, style="quiet"))
    if result.line:
        blocks.append(block(f"by hand: {printable(result.line)}", style="title"))
    if result.verdict == "no gain" and _detectable(result) > _COARSE:
        more = 2 * len(result.runs) + 1
        blocks.append(block(f"more runs find smaller gains: --verify-runs {more}", style="title"))
    if result.changed_command:
        proven = result.verdict == "proven"
        text = f"{'next' if proven else 'tried'}: {printable(result.changed_command)}"
        blocks.append(ScreenBlock((Line(text, "title" if proven else "quiet"),)))
    return blocks


def verified_text(result: Verification) -> str:
    """The verdict in one line."""
    settings = _settings(result.settings)
    gain = result.gain
    if result.verdict in ("not tried", "cannot tell") or gain is None:
        return f"{result.verdict.capitalize()}: {printable(result.reason)}"
    value, low, high = (percent(each, decimals=1, signed=True) for each in gain)
    numbers = f"speed {value} (95%: {low} to {high})"
    if result.verdict == "proven":
        return f"Proven: {settings} is faster, {numbers}"
    if result.verdict == "worse":
        return f"Worse: {settings} is slower, {numbers}; keep the command as it is"
    least = percent(_detectable(result), decimals=1)
    found = "No gain found by" if _detectable(result) <= _COARSE else "Not decided:"
    return f"{found} {settings}: {numbers}; detectable from {least} on"


def _detectable(result: Verification) -> float:
    change = result.comparison.main if result.comparison is not None else None
    return change.detectable or 0.0 if change is not None else 0.0


def _settings(settings: Mapping[str, str]) -> str:
    return " ".join(f"{printable(name)}={printable(value)}" for name, value in settings.items())
