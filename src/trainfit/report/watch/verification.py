"""A change that was tried, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainfit.report.plan.screen import COLUMNS
from trainfit.report.screen import Line, Style
from trainfit.report.watch.comparison import change_lines
from trainfit.results.format import percent
from trainfit.results.text import printable, wrapped
from trainfit.results.watch.verification import Verification

#: A comparison that finds only gains above this share has not shown that there is none.
_COARSE: Final = 0.10
_STYLES: Final[dict[str, Style]] = {"proven": "good", "worse": "bad"}


def verification_screen(result: Verification, columns: int = COLUMNS) -> list[Line]:
    """The verdict, what was measured, and the command with the change."""
    lines = _wrapped(answer_text(result), _STYLES.get(result.verdict, "title"), columns)
    if result.title:
        lines += _wrapped(f"finding: {printable(result.title)}", "plain", columns)
    if result.comparison is not None:
        before, after = result.comparison.before.steps, result.comparison.after.steps
        lines.append(Line(f"{before} steady steps as it is, {after} with the change:", "quiet"))
        lines += change_lines(result.comparison.changes, columns)
    if result.left_out and result.settings:
        rest = _settings(result.left_out)
        lines += _wrapped(f"not tried, as the command has no placeholder: {rest}", "quiet", columns)
    if result.line:
        lines += _wrapped(f"by hand: {printable(result.line)}", "title", columns)
    if result.verdict == "no gain" and _detectable(result) > _COARSE:
        more = 2 * len(result.runs) + 1
        lines += _wrapped(f"more runs find smaller gains: --verify-runs {more}", "title", columns)
    if result.changed_command and result.verdict == "proven":
        lines.append(Line(f"next: {printable(result.changed_command)}", "title"))
    elif result.changed_command:
        lines.append(Line(f"tried: {printable(result.changed_command)}", "quiet"))
    return lines


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


def _wrapped(text: str, style: Style, columns: int) -> list[Line]:
    return [Line(line, style) for line in wrapped(text, "", "  ", columns).splitlines()]
