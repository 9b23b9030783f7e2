"""A measurement of paced calls on one screen: the answer, times, cause, fix, doubts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainfit.report.machine.pace import (
    CAUSES,
    arms_head,
    effect_line,
    failure_text,
    table,
    verdict_line,
)
from trainfit.results.format import percent
from trainfit.results.machine.pace import Attribution, PaceResult
from trainfit.results.text import columns, printable, wrapped

_LINES: Final = 25
_MORE: Final = "--explain"
#: Warnings of a rate that are merged: how one is known, and what is said of several.
_KINDS: Final[Sequence[tuple[str, str]]] = (
    ("calls vary", "calls vary: the middle half of them by a quarter or more"),
    ("calls became", "calls changed during the measurement (heat, or another load)"),
    ("outliers", "some calls are outliers; other work ran at the same time"),
    ("too few for p95", "too few calls with work for p95"),
)
_DURATION: Final = re.compile(r"--duration (\d+) gives")


def pace_screen(result: PaceResult) -> str:
    """At most 25 lines, but for a call that raised: its traceback is shown whole."""
    parts = [
        [*wrapped(verdict_line(result), "", "  ").splitlines(), *_heading(result)],
        table(result),
        _cause(result.attribution) if result.attribution is not None else [],
        _fix(result),
        failure_text(result).splitlines(),
    ]
    text = "\n\n".join("\n".join(part) for part in parts if part)
    doubts = merged(result.warnings)
    room = _LINES - len(text.splitlines()) - 2
    shown: list[str] = []
    left = len(doubts)
    for doubt in doubts:
        lines = wrapped(printable(doubt), "Warning: ", " " * 9).splitlines()
        if shown and len(shown) + len(lines) > room:
            break
        shown += lines
        left -= 1
    more = f"{left} more warnings, " if left > 1 else "1 more warning, " if left else ""
    shown.append(f"{more}calls over time, notes: {_MORE}".capitalize())
    return text + "\n\n" + "\n".join(shown)


def merged(warnings: Sequence[str]) -> list[str]:
    """One for each kind, the most important first: of the machine, then of the calls."""
    of_machine = [each for each in warnings if not any(kind in each for kind, _ in _KINDS)]
    found = sorted(of_machine, key=lambda each: each.startswith("the first call"))
    for kind, several in _KINDS:
        alike = [each for each in warnings if kind in each]
        if len(alike) > 1:
            names = ", ".join(each.partition(":")[0] for each in alike)
            needed = [int(match[1]) for each in alike if (match := _DURATION.search(each))]
            enough = f"; --duration {max(needed)} is enough for all" if needed else ""
            alike = [f"{names}: {several}{enough}"]
        found += alike
    return found


def _heading(result: PaceResult) -> list[str]:
    rates = ", ".join(f"{hz:g}" for hz in result.hz)
    text = f"{printable(result.target)} at {rates} Hz"
    if result.period > 1:
        text += f"; every {result.period}th call does the work, times are of those"
    lines = wrapped(text, "", "  ").splitlines()
    machine = ""
    for subject, words in result.machine.items():
        longer = machine + ("; " if machine else "") + printable(f"{subject}: {words}")
        machine = longer if len(longer) <= columns() else machine
    return [*lines, *([machine] if machine else [])]


def _cause(found: Attribution) -> list[str]:
    """The arms that were tried, and the causes with what decided each."""
    tried = [effect for effect in found.arms if not effect.why_not]
    lines = [*arms_head(found), *map(effect_line, tried)]
    for finding in found.findings:
        share = percent(max(0.0, min(1.0, finding.share.value)))
        lines.append(f"  {CAUSES[finding.cause]} ({share} of it)")
    if found.cannot_tell:
        lines += wrapped(printable(found.cannot_tell), "  CANNOT TELL: ", "    ").splitlines()[:2]
    return lines


def _fix(result: PaceResult) -> list[str]:
    """The first of the recommended fixes, or what the trial of one came to."""
    lines = []
    if result.fix_trial is not None and (change := result.fix_trial.change) is not None:
        lines.append(
            f"--fix {result.fix_trial.fix}: after ÷ before {change.value:.3f} ({change.low:.3f} "
            f"to {change.high:.3f})"
        )
    elif result.advice:
        first = result.advice[0]
        test = f"; trainfit pace --fix {first.fix} tests it" if first.fix is not None else ""
        more = len(result.advice) - 1
        others = f"; {more} more: {_MORE}" if more else ""
        text = printable(f"{first.what}{test}{others}")
        lines += wrapped(text, "What helps: ", "  ").splitlines()
    return lines
