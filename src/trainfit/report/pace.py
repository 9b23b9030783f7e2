"""A measurement of paced calls: on one screen, and as the whole text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trainfit.report.layout import (
    Line,
    ScreenBlock,
    Style,
    blank,
    block,
    histogram,
    made,
    screen,
    strips,
    table,
    times,
)
from trainfit.results.findings import Fix
from trainfit.results.pace import (
    Arm,
    ArmEffect,
    Attribution,
    Cause,
    Estimate,
    FixTrial,
    PaceResult,
    RateSummary,
    Unmeasured,
)
from trainfit.results.text import count, duration, percent, printable, rate, wrapped

_INDENT: Final = " " * 4
#: A median above that back to back by less than this share is as fast; where more than this much
#: more is possible, a run cannot tell.
_NOTHING: Final = 0.05
_ANYTHING: Final = 1.0
#: A ratio's interval says nothing where its ends differ by this factor.
_UNKNOWN: Final = 4.0

ARMS: Final[dict[Arm, str]] = {
    "back_to_back": "back to back",
    "sleep": "sleep",
    "spin": "busy-wait",
    "hybrid": "sleep, then busy-wait",
    "gpu_awake": "GPU kept busy",
    "awake": "core and GPU kept busy",
    "launching": "the same, and launches",
    "no_idle_states": "no deep idle states",
}
CAUSES: Final[dict[Cause, str]] = {
    "cpu_frequency": "CPU FREQUENCY: the clock falls between calls",
    "c_states": "C-STATES: cores enter deep idle states, and waking up costs time",
    "gpu_clocks": "GPU CLOCKS: the clocks fall between calls",
    "launch_overhead": "LAUNCH OVERHEAD: kernels are launched more slowly after a pause",
    "cache_or_contention": "CACHES OR CONTENTION: the same work is slower after a pause",
}
AS_FAST: Final = "Calls at these rates are as fast as back to back"
_PRIVILEGE: Final = {
    1: "needs no privilege",
    2: "lasts as long as the process",
    3: "changes the system",
}


def pace_text(result: PaceResult) -> str:
    """The verdict; times by rate, over time and as a histogram; causes; fixes."""
    parts = [
        wrapped(verdict_line(result), "", "  "),
        _heading(result),
        "\n".join([*times_table(result), *_details(result)]),
        strips(result),
        histogram(result),
        _attribution(result.attribution) if result.attribution is not None else "",
        _advice(result.advice),
        _fix_trial(result.fix_trial) if result.fix_trial is not None else "",
        failure_text(result),
        _said(result.warnings, "Warning: "),
        _said(result.notes, "Note: "),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(result: PaceResult) -> str:
    rates = ", ".join(f"{hz:g}" for hz in result.hz)
    lines = [f"{printable(result.target)} at {rates} Hz"]
    if result.period > 1:
        text = (
            f"every {result.period}th call does the work, the others read from a queue; times are "
            "of calls with work"
        )
        lines.append(wrapped(text, "  ", "  "))
    for subject, words in result.machine.items():
        lines.append(wrapped(printable(words), f"  {subject:<18}", " " * 20))
    return "\n".join(lines)


# --- Times --------------------------------------------------------------------------------------
def times_table(result: PaceResult, *, short: bool = False) -> list[str]:
    """Percentiles by rate, and the rates without: not measured, not held."""
    rows = [*([result.back_to_back] if result.back_to_back is not None else []), *result.rates]
    missing = [
        wrapped(printable(each.text), f"  {each.hz:g} Hz was not measured: ", "    ")
        for each in result.unmeasured
    ]
    if not rows:
        return missing
    head = ("", "calls", "p50", "p95", "p99", "max", "÷ back to back", "missed", "late p99")
    spare = ("late p99",) if short else ()
    lines = table([_row(row) for row in rows], "l" + "r" * 8, head, indent="", spare=spare)
    return [*lines, *missing, *_unheld(result)]


def _unheld(result: PaceResult) -> list[str]:
    """The rates that cannot be held, each with what a call needs."""
    lines = []
    for hz, seconds in result.unheld:
        text = (
            f"{hz:g} Hz cannot be held: {_every(result)} needs {duration(seconds)} of "
            f"{duration(result.period / hz)}, which allows {rate(result.period / seconds)} Hz"
        )
        lines.append(wrapped(text, "  ", "    "))
    return lines


def _every(result: PaceResult) -> str:
    return f"one call in {result.period}" if result.period > 1 else "a call"


def _details(result: PaceResult) -> list[str]:
    """Calls without work, and those that ended too late."""
    lines = [
        f"  calls without work at {row.hz:g} Hz: {row.pops.count}, p50 "
        f"{duration(row.pops.p50)}, p99 {duration(row.pops.p99)}"
        for row in result.rates
        if row.pops is not None
    ]
    for row in result.rates:
        if result.is_held(row) and row.overrun is not None:
            repeats = ""
            if row.consecutive_share is not None:
                again = percent(row.consecutive_share)
                repeats = f"; {again} of the calls after a late one were late too"
            text = (
                f"at {row.hz:g} Hz {count(row.misses, 'call')} ended after the next was due, by up "
                f"to {duration(row.overrun.most)}{repeats}"
            )
            lines.append(wrapped(text, "  ", "    "))
    return lines


def _row(row: RateSummary) -> tuple[str, ...]:
    calls = row.calls
    name = "back to back" if row.hz is None else f"{row.hz:g} Hz"
    against = ""
    if row.ratio is not None:
        name += " SLOWER" if row.is_slower else ""
        against = f"{row.ratio.value:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"
        if not row.is_slower and row.ratio.high > _UNKNOWN * row.ratio.low:
            against = "cannot tell"
    return (
        name,
        str(calls.count),
        *(duration(t) for t in (calls.p50, calls.p95, calls.p99, calls.most)),
        against,
        "" if row.hz is None else percent(row.missed_share),
        "" if row.late is None else duration(row.late.p99),
    )


# --- Why ----------------------------------------------------------------------------------------
def _attribution(found: Attribution) -> str:
    lines = arms_table(found)
    lines += [
        wrapped(printable(effect.why_not), f"  {ARMS[effect.arm]} not tried: ", _INDENT)
        for effect in found.arms
        if effect.why_not
    ]
    for finding in found.findings:
        lines.append(f"  {CAUSES[finding.cause]} ({_share(finding.share)} of it)")
        lines += [wrapped(printable(words), _INDENT + "- ", _INDENT + "  ") for words in
                  finding.evidence]  # fmt: skip
    if found.cannot_tell:
        lines.append(wrapped(printable(found.cannot_tell), "  CANNOT TELL: ", _INDENT))
    lines += [
        wrapped(printable(words), _INDENT + "to learn more: ", _INDENT + "  ")
        for words in found.would_tell
    ]
    return "\n".join(lines)


def arms_table(found: Attribution) -> list[str]:
    """What the arms are to explain, and what each that was tried came to."""
    excess = found.excess_s
    low, high = duration(max(0.0, excess.low)), duration(excess.high)
    title = f"Why a call at {found.hz:g} Hz needs {duration(excess.value)} more ({low} to {high})"
    head = ("", "call", "CPU", "GPU", "core speed", "recovers")
    tried = [_effect(effect) for effect in found.arms if not effect.why_not]
    return [title, *table(tried, "lrrrrr", head)]


def _effect(effect: ArmEffect) -> tuple[str, ...]:
    """One arm of the attribution."""
    seconds = (effect.wall_s, effect.cpu_s, effect.device_s)
    return (
        ARMS[effect.arm],
        *("" if each is None else duration(each) for each in seconds),
        "" if effect.speed is None else percent(effect.speed),
        "" if effect.recovered is None else _interval(effect.recovered),
    )


def _interval(found: Estimate) -> str:
    """In whole percent: runs differ by more than that."""
    bounds = max(-1.0, found.low), min(2.0, found.high)
    value, low, high = (f"{round(100 * share)}%" for share in (found.value, *bounds))
    return f"{value} ({low} to {high})"


def _share(found: Estimate) -> str:
    return percent(max(0.0, min(1.0, found.value)))


# --- Fixes --------------------------------------------------------------------------------------
def _advice(found: Sequence[Fix]) -> str:
    if not found:
        return ""
    lines = ["What helps"]
    for each in found:
        fix = f"; trainfit pace --fix {each.name} tests it" if each.name else ""
        lines.append(
            wrapped(
                printable(f"{each.title} ({_PRIVILEGE[each.tier or 1]}{fix})"),
                f"  {each.tier}  ",
                "     ",
            )
        )
        for label, words in (("how", each.action), ("undo", each.undo), ("cost", each.cost)):
            lines.append(wrapped(printable(words), f"     {label:<6}", " " * 11))
    return "\n".join(lines)


def _fix_trial(fix_trial: FixTrial) -> str:
    before, after = fix_trial.before, fix_trial.after
    lines = [
        wrapped(f"--fix {fix_trial.fix}: {printable(fix_trial.what)}", "", "  "),
        f"  before  p50 {duration(before.calls.p50)}, p99 {duration(before.calls.p99)}"
        f"{_late(before)}",
        f"  after   p50 {duration(after.calls.p50)}, p99 {duration(after.calls.p99)}{_late(after)}",
        *_changed(fix_trial),
        wrapped(printable(fix_trial.cost), "  cost    ", " " * 10),
        wrapped(printable(fix_trial.undo), "  undo    ", " " * 10),
    ]
    return "\n".join(lines)


def _changed(fix_trial: FixTrial) -> list[str]:
    change, gone = fix_trial.change, fix_trial.recovered
    if change is None:
        return []
    text = f"after ÷ before {change.value:.3f} ({change.low:.3f} to {change.high:.3f})"
    text += f", {_interval(gone)} of the excess recovered" if gone is not None else ""
    return [wrapped(text, "  ", "    ")]


def _late(row: RateSummary) -> str:
    return "" if row.late is None else f", starts up to {duration(row.late.p99)} late (p99)"


# --- The end ------------------------------------------------------------------------------------
def failure_text(result: PaceResult) -> str:
    """The call that raised, with its traceback; "" for none."""
    failure = result.failure
    if failure is None:
        return ""
    head = f"Call {failure.call} raised {failure.error_type}: {failure.message}"
    lines = [wrapped(printable(" ".join(head.split())), "FAILED: ", "  ")]
    lines += ["  " + printable(line) for line in failure.traceback.splitlines()]
    return "\n".join(lines)


def _said(words: Sequence[str], first: str) -> str:
    return "\n".join(wrapped(printable(each), first, " " * len(first)) for each in words)


def verdict_line(result: PaceResult) -> str:
    """The answer: is a rate held, and are its calls slower than back to back?"""
    if result.ended == "failed":
        return "The call FAILED; below are the results so far"
    said = [_cannot_hold(result), _compared(result)]
    return ". ".join(text for text in said if text)


def _compared(result: PaceResult) -> str:
    if result.ended == "interrupted":
        return "Interrupted: results so far"
    if not result.rates:
        if result.unheld:
            return ""
        wanted = max((each.wanted_s or 0.0 for each in result.unmeasured), default=0.0)
        return "Nothing was measured: give --duration " + (f"{wanted:g}" if wanted else "more")
    slower = [row for row in result.rates if row.is_slower]
    if result.back_to_back is None:
        return ""
    if not slower and not any(map(result.is_held, result.rates)):
        text = ""  # whether such calls are as fast as back to back helps nobody
    elif not slower:
        text = _not_slower(result)
    else:
        worst = max(slower, key=lambda row: row.calls.p50)
        more = worst.calls.p50 - result.back_to_back.calls.p50
        text = f"At {worst.hz:g} Hz a call needs {duration(more)} more than back to back"
        text += _why(result.attribution)
    if result.unmeasured:
        text += "; " * bool(text) + f"{_rates(result.unmeasured)} was not measured"
    if result.fix_trial is not None and slower:
        helps = "fixes it" if result.fix_trial.is_fixed else "does not fix it"
        text += f"; --fix {result.fix_trial.fix} {helps}"
    return text


def _cannot_hold(result: PaceResult) -> str:
    """The first thing to know of a call that is too long for its rate; "" for none."""
    if not result.unheld:
        return ""
    rates = ", ".join(f"{hz:g}" for hz, _ in result.unheld)
    hz, seconds = max(result.unheld)
    return (
        f"{rates} Hz cannot be held: {_every(result)} needs {duration(seconds)}, and the next is "
        f"due after {duration(result.period / hz)}"
    )


def _rates(rows: Sequence[RateSummary | Unmeasured]) -> str:
    return ", ".join(f"{row.hz:g}" for row in rows) + " Hz"


def _not_slower(result: PaceResult) -> str:
    rates = result.rates
    compared = [row.ratio for row in rates if row.ratio is not None]
    alone = [row for row in rates if row.ratio is None]
    uncompared = f"{_rates(alone)}: too few calls to compare with back to back" if alone else ""
    if not compared:
        return uncompared
    most = max(ratio.high - 1 for ratio in compared)
    if most <= _NOTHING:
        text = AS_FAST
    elif most > _ANYTHING:
        text = f"Cannot tell whether calls are slower: {_varied(result)}"
    else:
        text = (
            "No call is measurably slower than back to back; with so few or so varied calls up "
            f"to {percent(most)} more is possible"
        )
    return f"{text}; {uncompared}" if uncompared else text


def _varied(result: PaceResult) -> str:
    walls = [wall for _, values in times(result) for wall in values]
    vary = f"they vary from {duration(min(walls))} to {duration(max(walls))}; " if walls else ""
    return f"{vary}repeat on an idle machine, or with a longer --duration"


def _why(found: Attribution | None) -> str:
    if found is None:
        return ""
    if not found.findings:
        return ": the cause is not known"
    names = [CAUSES[finding.cause].partition(":")[0] for finding in found.findings]
    return ": " + " and ".join(names)


# ---
# A measurement of paced calls on one screen: the answer, times, cause, fix, doubts.


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
        *(block(line, 30 + at, style="quiet") for at, line in enumerate(_screen_heading(result))),
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


def _screen_heading(result: PaceResult) -> list[str]:
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
        test = f"; trainfit pace --fix {first.name} tests it" if first.name else ""
        more = len(result.advice) - 1
        others = f"; {more} more: {_MORE}" if more else ""
        text = printable(f"{first.title}{test}{others}")
        lines += wrapped(text, "What helps: ", "  ").splitlines()
    return lines
