"""Calls at a fixed rate: latency distributions, the cause of slow ones, a fix before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.pace import ARMS, CAUSES, verdict_line
from trainfit.report.page.blocks import (
    Chart,
    Command,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Section,
    Table,
    Text,
    Tile,
    facts,
    figures,
    section,
)
from trainfit.report.page.blocks import table as table_of
from trainfit.report.page.charts import (
    COLORS,
    NAMES,
    TIP,
    Spec,
    chart,
    color,
    nominal,
    thinned,
    tip,
    values,
    x,
    y,
)
from trainfit.results.pace import (
    Attribution,
    Block,
    FixName,
    FixTrial,
    PaceResult,
    Phase,
    RateSummary,
)
from trainfit.results.text import duration, percent, times

#: Points of a distribution.
_POINTS: Final = 120
_REMOVED: Final = "of the excess that it removes (%, with the 95% interval)"
_PRIVILEGE: Final = {
    1: "needs no privilege",
    2: "lasts as long as the process",
    3: "changes the system",
}


def pace_headline(result: PaceResult) -> Headline:
    """Are calls slower at a rate, and which fix helps?"""
    slower = any(row.is_slower for row in result.rates)
    failed = result.ended == "failed" or bool(result.unheld)
    trial = result.fix_trial
    fixed = trial is not None and trial.is_fixed
    own = next((each for each in result.advice if each.name), None)
    commands = []
    if own is not None and not fixed:
        commands.append(Command(f"trainfit pace {result.target} --fix {own.name}", "Try the fix"))
    tiles = [
        Tile(
            "Back to back" if row.hz is None else f"{row.hz:g} Hz",
            duration(row.calls.p50),
            f"median; 99%: {duration(row.calls.p99)}"
            + (f"; {times(row.ratio.value)}" if row.ratio is not None else ""),
            tone="bad" if row.is_slower or not result.is_held(row) else "plain",
        )
        for row in _rows(result)
    ]
    return Headline(
        kind="Paced calls",
        tone="bad" if failed else "warn" if slower else "good",
        text=verdict_line(result) + ".",
        subject=f"{result.target} at {', '.join(f'{hz:g}' for hz in result.hz)} Hz",
        commands=tuple(commands),
        tiles=tuple(tiles),
    )


def pace_sections(result: PaceResult) -> list[Section]:
    """Distributions by rate, before and after a fix, the cause, fixes."""
    failure = None
    if result.failure is not None:
        failure = Output(result.failure.traceback or result.failure.message)
    return [
        *section("Latency of paced calls", _distribution(result), _table(result)),
        *section("Before and after the fix", *_trial(result, result.fix_trial)),
        *section("Why paced calls are slower", *_attribution(result.attribution)),
        *section("Fixes for paced calls", _advice(result)),
        *section("The call that failed", failure),
    ]


def _rows(result: PaceResult) -> list[RateSummary]:
    first = [result.back_to_back] if result.back_to_back is not None else []
    return [*first, *result.rates]


def _of(result: PaceResult, hz: float | None, arm: str, phases: Sequence[Phase]) -> list[float]:
    """Seconds of all calls that count and do the work, of these blocks."""
    return [
        wall
        for block in result.blocks
        if block.hz == hz and block.arm == arm and block.phase in phases
        for wall in _walls(block, result)
    ]


def _walls(block: Block, result: PaceResult) -> list[float]:
    return [
        wall
        for number, wall in enumerate(block.wall_s)
        if number >= block.settled
        and (block.first_call + number) % result.period == result.phase % result.period
    ]


def _quantiles(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Share of calls and their longest time: all of few calls, else evenly spaced with the
    slowest."""
    count = len(seconds)
    points = [((place + 1) / count, wall) for place, wall in enumerate(sorted(seconds))]
    return thinned(points, _POINTS, range(max(0, count - 10), count))


def _curves(named: Sequence[tuple[str, Sequence[float]]], title: str, says: str) -> Chart | None:
    """The share of calls that are done within a time, a line for each name."""
    there = [(name, seconds) for name, seconds in named if len(seconds) >= 2]
    if not there:
        return None
    rows: list[dict[str, Any]] = []
    for name, seconds in there:
        for share, wall in _quantiles(seconds):
            said = tip(name, (f"{percent(share, decimals=1)} of calls within", duration(wall)))
            rows.append({"ms": wall * 1e3, "share": 100 * share, "name": name, "tip": said})
    spread = [wall for _, seconds in there for wall in seconds]
    wide = max(spread) > 20 * max(min(spread), 1e-9)
    scale: Spec = {"type": "log", "nice": False} if wide else {"zero": False, "nice": False}
    label = "time of a call (ms, logarithmic)" if wide else "time of a call (ms)"
    spec = chart(
        260,
        says,
        data=values(rows),
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2, "point":
              {"size": 12, "opacity": 0.6}, **TIP},
        encoding={
            "x": x("ms", label, scale=scale, axis={"format": "~g"}),
            "y": y("share", "share of calls (%)", scale={"domain": [0, 100]}),
            "color": color("name", [name for name, _ in there], COLORS[: len(there)]),
        },
    )  # fmt: skip
    levels = (0.5, 0.9, 0.95, 0.99, 1.0)
    table = figures(
        ("Calls", "Number", *(percent(level) for level in levels)),
        [
            (name, str(len(seconds)),
             *(duration(sorted(seconds)[max(0, -(-int(level * 1000) * len(seconds) // 1000) - 1)])
               for level in levels))
            for name, seconds in there
        ],
        "Time within which a share of calls is done",
        range(1, 7),
    )  # fmt: skip
    note = "Further left is faster; a steep line means that calls are alike."
    if any(len(seconds) > _POINTS for _, seconds in there):
        note += f" Of many calls {_POINTS} quantiles and the ten slowest are drawn."
    return Chart(title, says, spec, table, note)


def _distribution(result: PaceResult) -> Chart | None:
    named = [
        (
            "back to back" if row.hz is None else f"{row.hz:g} Hz",
            _of(result, row.hz, row.arm, ("baseline", "attribution")),
        )
        for row in _rows(result)[: len(COLORS)]
    ]
    slow = max((row for row in result.rates), key=lambda row: row.calls.p50, default=None)
    says = ""
    if slow is not None and slow.ratio is not None:
        says = (
            f"At {slow.hz:g} Hz the median call needs {duration(slow.calls.p50)}, "
            f"{times(slow.ratio.value)} that of calls back to back."
        )
    return _curves(named, "Latency distribution by rate (measured)", says)


def _table(result: PaceResult) -> Table | None:
    return table_of(
        ("Rate", "Calls", "p50", "p95", "p99", "Max", "÷ back to back", "Missed", "Late (p99)"),
        [
            (
                "back to back" if row.hz is None else f"{row.hz:g} Hz",
                str(row.calls.count),
                *(duration(t) for t in (row.calls.p50, row.calls.p95, row.calls.p99,
                                        row.calls.most)),
                f"{row.ratio.value:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
                if row.ratio is not None
                else "-",
                percent(row.missed_share) if row.hz is not None else "-",
                duration(row.late.p99) if row.late is not None else "-",
            )
            for row in _rows(result)
        ],
        "Calls by rate; the ratio with its 95% interval",
        range(1, 9),
        [n for n, row in enumerate(_rows(result)) if row.is_slower],
    )  # fmt: skip


def _trial(result: PaceResult, trial: FixTrial | None) -> list[Chart | Facts | None]:
    if trial is None:
        return []
    before = _latest(result, trial.before, None)
    after = _latest(result, trial.after, trial.fix)
    says = (
        f"{trial.what}: the median goes from {duration(trial.before.calls.p50)} to "
        f"{duration(trial.after.calls.p50)}."
    )
    rows = facts(("fix", trial.what), ("undo", trial.undo), ("cost", trial.cost))
    named = [("before", before), (f"after: {trial.fix}", after)]
    return [_curves(named, "Latency before and after the fix", says), rows]


def _latest(result: PaceResult, row: RateSummary, fix: FixName | None) -> list[float]:
    """The calls that ``row`` is of: the latest ones; those before looked for the right fix."""
    found: list[float] = []
    for block in reversed(result.blocks):
        if len(found) >= row.calls.count:
            break
        if (block.phase, block.hz, block.arm, block.fix) == ("fix", row.hz, row.arm, fix):
            found += _walls(block, result)
    return found


def _attribution(found: Attribution | None) -> list[Items | Chart | Text | None]:
    if found is None:
        return []
    items = Items(
        tuple(
            Item(
                CAUSES[each.cause],
                "warn",
                f"{percent(each.share.value)} of the excess",
                tuple(("evidence", text) for text in each.evidence),
            )
            for each in found.findings
        )
    )
    text = f"At {found.hz:g} Hz a call needs {duration(found.excess_s.value)} more."
    if found.cannot_tell:
        text += f" {found.cannot_tell}"
    return [Text(text), items if items.items else None, _arms(found)]


def _arms(found: Attribution) -> Chart | None:
    """What each way of spending the wait gives back of the excess."""
    shown = [each for each in found.arms if each.recovered is not None]
    rows = []
    for each in shown:
        share = each.recovered
        assert share is not None
        said = tip(ARMS[each.arm], ("of the excess", percent(share.value)),
                   ("a call", duration(each.wall_s)))  # fmt: skip
        rows.append({"arm": ARMS[each.arm], "share": 100 * share.value, "low": 100 * share.low,
                     "high": 100 * share.high, "tip": said})  # fmt: skip
    if not rows:
        return None
    best = max(shown, key=lambda each: each.recovered.value if each.recovered else 0.0)
    says = f"{ARMS[best.arm][0].upper()}{ARMS[best.arm][1:]} between calls removes the most."
    across = x("share", _REMOVED)
    spec = chart(
        26 * len(rows) + 10,
        says,
        data=values(rows),
        layer=[
            {
                "mark": {"type": "bar", "color": COLORS[0], "opacity": 0.8, **TIP},
                "encoding": {"x": across, "y": nominal("arm", axis=NAMES)},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {
                    "x": x("low", _REMOVED),
                    "x2": {"field": "high"},
                    "y": nominal("arm", axis=NAMES),
                },
            },
        ],
    )
    table = figures(
        ("Between calls", "A call", "Of the excess removed", "Remark"),
        [
            (ARMS[each.arm], duration(each.wall_s),
             percent(each.recovered.value) if each.recovered is not None else "-", each.why_not)
            for each in found.arms
        ],
        "What each way of spending the wait removes",
        (1, 2),
    )  # fmt: skip
    return Chart("The experiment: what is done between calls", says, spec, table)


def _advice(result: PaceResult) -> Items | None:
    found = tuple(
        Item(
            each.title,
            "plain",
            _PRIVILEGE.get(each.tier or 0, ""),
            (("how", each.action), ("undo", each.undo), ("cost", each.cost)),
        )
        for each in result.advice
    )
    return Items(found) if found else None
