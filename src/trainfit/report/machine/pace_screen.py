"""A measurement of paced calls on one screen: the answer, times, cause, fix, doubts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainfit.report.machine.pace import (
    AS_FAST,
    CAUSES,
    arms_table,
    failure_text,
    times_table,
    verdict_line,
)
from trainfit.report.screen import Line, ScreenBlock, Style, blank, block, made, screen
from trainfit.results.format import percent
from trainfit.results.machine.pace import Attribution, PaceResult
from trainfit.results.text import printable, wrapped

_MORE: Final = "--explain"
#: Warnings of a rate that are merged: how one is known, and what is said of several.
_KINDS: Final[Sequence[tuple[str, str]]] = (
    ("calls vary", "calls vary: the middle half of them by a quarter or more"),
    ("calls became", "calls changed during the measurement (heat, or another load)"),
    ("outliers", "some calls are outliers; other work ran at the same time"),
    ("too few for p95", "too few calls with work for p95"),
)
_DURATION: Final = re.compile(r"--duration (\d+) gives")


def pace_screen(result: PaceResult) -> list[Line]:
    """At most 25 lines: the verdict, times, the cause, the fix, doubts."""
    slower = any(row.is_slower for row in result.rates)
    bad = result.ended == "failed" or result.unheld
    style: Style = "bad" if bad or slower else "title" if _doubtful(result) else "good"
    blocks = [
        block(verdict_line(result), style=style),
        *(block(line, 30 + at, style="quiet") for at, line in enumerate(_heading(result))),
        blank(),
        made(times_table(result, short=True)),
        blank(),
    ]
    if result.failure is not None:
        # The last lines of a traceback say the most.
        head, *traceback = failure_text(result).split("\n")
        blocks += [made(head), *(made(line, 60 - at) for at, line in enumerate(traceback))]
    if result.attribution is not None:
        blocks += [*_cause(result.attribution), blank()]
    blocks.append(made(_fix(result), 4))
    for number, doubt in enumerate(merged(result.warnings)):
        text = wrapped(printable(doubt), "Warning: ", " " * 9)
        blocks.append(made(text, 5 + 30 * number, notes=1))
    return screen(blocks, "calls over time, notes", "warning")


def _doubtful(result: PaceResult) -> bool:
    """Was a rate not measured, or is more possible than was seen?"""
    return (
        bool(result.unmeasured)
        or result.ended != "finished"
        or not verdict_line(result).startswith(AS_FAST)
    )


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
    facts = [printable(f"{subject}: {words}") for subject, words in result.machine.items()]
    return [text, *(["; ".join(facts)] if facts else [])]


def _cause(found: Attribution) -> list[ScreenBlock]:
    """The arms that were tried, and the causes with what decided each."""
    title, *rows = arms_table(found)
    blocks = [block(title, 1, style="title"), made(rows, 10)]
    for finding in found.findings:
        share = percent(max(0.0, min(1.0, finding.share.value)))
        blocks.append(block(f"{CAUSES[finding.cause]} ({share} of it)", 2, first="  "))
    if found.cannot_tell:
        text = wrapped(printable(found.cannot_tell), "  CANNOT TELL: ", "    ")
        blocks.append(made(text, 3))
    return blocks


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
