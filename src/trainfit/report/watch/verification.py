"""A change that was tried, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainfit.report.screen import Line, ScreenBlock, Style, block, screen
from trainfit.report.watch.comparison import change_blocks
from trainfit.results.format import percent
from trainfit.results.text import printable
from trainfit.results.watch.verification import Verification

#: A comparison that finds only gains above this share has not shown that there is none.
_COARSE: Final = 0.10
_STYLES: Final[dict[str, Style]] = {"proven": "good", "worse": "bad"}


def verification_screen(result: Verification) -> list[Line]:
    """The verdict, what was measured, and the command with the change: at most 25 lines."""
    return screen(_blocks(result), "all measures")


def verification_lines(result: Verification) -> list[Line]:
    """The same with all measures."""
    return [line for each in _blocks(result) for line in each.lines]


def _blocks(result: Verification) -> list[ScreenBlock]:
    blocks = [block(answer_text(result), style=_STYLES.get(result.verdict, "title"))]
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


def answer_text(result: Verification) -> str:
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
