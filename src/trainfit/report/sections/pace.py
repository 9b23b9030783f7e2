"""Calls at a fixed rate: are they slower than back to back, why, and what helps?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.blocks import (
    WHOLE,
    Chart,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Row,
    Section,
    Snippet,
    Subject,
    Table,
    Text,
    Tile,
    facts,
    figures,
    items,
    rows,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import (
    COLORS,
    NAMES,
    TIP,
    chart,
    nominal,
    tip,
    values,
    x,
)
from trainfit.report.notes import plain
from trainfit.report.sections.pace_charts import (
    all_rates,
    base_walls,
    call_walls,
    latency_curves,
    latency_distribution,
    rate_name,
)
from trainfit.results.files.contents import Note
from trainfit.results.pace import (
    OTHERS,
    Arm,
    Attribution,
    Cause,
    Estimate,
    FixName,
    FixTrial,
    PaceResult,
    RateSummary,
    Unmeasured,
)
from trainfit.results.text import count, duration, one_line, percent, rate, times

_REMOVED: Final = "of the excess that it removes (%, with the 95% interval)"
_PRIVILEGE: Final = {
    1: "needs no privilege",
    2: "lasts as long as the process",
    3: "changes the system",
}
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
    "touch": "awake, parameters read",
    "rehearse_awake": "awake, rehearsal call",
    "rehearse": "sleep, rehearsal call",
}
CAUSES: Final[dict[Cause, str]] = {
    "cpu_frequency": "CPU FREQUENCY: the clock falls between calls",
    "c_states": "C-STATES: cores enter deep idle states, and waking up costs time",
    "gpu_clocks": "GPU CLOCKS: the clocks fall between calls",
    "launch_overhead": "LAUNCH OVERHEAD: kernels are launched more slowly after a pause",
    "cold_caches": "COLD CACHES: weights and code have left the caches when the call comes",
    "cache_or_contention": "CACHES OR CONTENTION: the same work is slower after a pause",
    "competing_thread": "COMPETING THREAD: calls wait for another thread of this process",
}
AS_FAST: Final = "Calls at these rates are as fast as back to back"


def pace_subject(result: PaceResult) -> Subject:
    """The answer; times by rate, the cause, what helps, a fix that was tried."""
    return Subject(
        _headline(result),
        (
            *section("Latency of paced calls", _table(result), _rates(result),
                     latency_distribution(result)),
            *section("The call that failed", *_failure(result)),
            *_attribution(result.attribution),
            *section("What helps", _advice(result)),
            *section("Before and after the fix", *_trial(result, result.fix_trial)),
            *section("Warnings by rate", _each_warning(result.warnings)),
        ),
        tuple(_notes(result)),
        tuple(Row(subject, words) for subject, words in result.machine.items()),
    )  # fmt: skip


def _headline(result: PaceResult) -> Headline:
    slower = any(row.is_slower for row in result.rates)
    failed = result.ended == "failed" or bool(result.unheld)
    trial = result.fix_trial
    fixed = trial is not None and trial.is_fixed
    tried = "" if trial is None else trial.fix
    own = next((each for each in result.advice if each.name not in ("", tried)), None)
    commands = []
    if own is not None and not fixed:
        commands.append(Snippet(f"trainfit pace {result.target} --fix {own.name}", "Try the fix"))
    tiles = [
        Tile(
            rate_name(row.hz),
            duration(row.calls.p50),
            f"median; 99%: {duration(row.calls.p99)}"
            + (f"; {times(row.ratio.value)}" if row.ratio is not None else ""),
            tone="bad" if row.is_slower or not result.is_held(row) else "plain",
        )
        for row in all_rates(result)
    ]
    answer = verdict_line(result)
    sure = result.ended == "finished" and not result.unmeasured and answer.startswith(AS_FAST)
    return Headline(
        kind="Paced calls",
        tone="bad" if failed or slower else "good" if sure else "warn",
        text=answer + ".",
        subject=f"{result.target} at {', '.join(f'{hz:g}' for hz in result.hz)} Hz",
        commands=tuple(commands),
        tiles=tuple(tiles),
    )


def _notes(result: PaceResult) -> Iterator[Note]:
    for warning in merged(result.warnings):
        yield Note("note", warning, severity="may change the figures")
    yield from plain(result.notes)


def _each_warning(warnings: Sequence[str]) -> Items | None:
    """All, where the notes have several as one."""
    alike = len(merged(warnings)) < len(warnings)
    return items([Item(warning) for warning in warnings]) if alike else None


# -- times -------------------------------------------------------------------------------------


def _table(result: PaceResult) -> Table | None:
    """Percentiles by rate."""
    return table_of(
        ("Rate", "Calls", "p50", "p95", "p99", "Max", "÷ back to back", "Missed", "Late p99"),
        [
            (
                rate_name(row.hz) + (", slower" if row.is_slower else ""),
                str(row.calls.count),
                *map(duration, (row.calls.p50, row.calls.p95, row.calls.p99, row.calls.most)),
                _ratio(row),
                percent(row.missed_share) if row.hz is not None else "-",
                duration(row.late.p99) if row.late is not None else "-",
            )
            for row in all_rates(result)
        ],
        "Calls by rate; the ratio with its 95% interval",
        range(1, 9),
        [n for n, row in enumerate(all_rates(result)) if row.is_slower],
        spare=("Late p99",),
        detail=0,
    )


def _ratio(row: RateSummary) -> str:
    ratio = row.ratio
    if ratio is None:
        return "-"
    if not row.is_slower and ratio.high > _UNKNOWN * ratio.low:
        return "cannot tell"
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _rates(result: PaceResult) -> Facts | None:
    """Facts on rates that were not measured or are not held, on calls without work, and on late
    ones."""
    said: list[tuple[str, str, int]] = []
    if result.period > 1:
        text = (
            f"every {result.period}th call does the work, the others read from a queue; times are "
            "of calls with work"
        )
        said.append(("calls", text, 20))
    if result.ended != "failed" or _has_any(result):
        said += [(f"{e.hz:g} Hz", f"was not measured: {e.text}", 2) for e in result.unmeasured]
    said += [(hz, text, 2) for hz, text in _unheld(result)]
    for row in result.rates:
        if row.pops is not None:
            text = f"{row.pops.count}, p50 {duration(row.pops.p50)}, p99 {duration(row.pops.p99)}"
            said.append((rate_name(row.hz), f"calls without work: {text}", WHOLE))
        if result.is_held(row) and row.overrun is not None:
            text = f"{count(row.misses, 'call')} ended after the next was due, by up to "
            text += duration(row.overrun.most)
            if row.consecutive_share is not None:
                again = percent(row.consecutive_share)
                text += f"; {again} of the calls after a late one were late too"
            said.append((rate_name(row.hz), text, WHOLE))
    return facts(*said, lines=3)


def _unheld(result: PaceResult) -> list[tuple[str, str]]:
    """The rates that cannot be held, each with what a call needs."""
    rows = []
    for hz, seconds in result.unheld:
        text = (
            f"cannot be held: {_every(result)} needs {duration(seconds)} of "
            f"{duration(result.period / hz)}, which allows {rate(result.period / seconds)} Hz"
        )
        rows.append((f"{hz:g} Hz", text))
    return rows


def _every(result: PaceResult) -> str:
    return f"one call in {result.period}" if result.period > 1 else "a call"


def _attribution(attribution: Attribution | None) -> list[Section]:
    if attribution is None:
        return []
    excess = attribution.excess_s
    low, high = duration(max(0.0, excess.low)), duration(excess.high)
    causes = [
        Item(
            CAUSES[finding.cause],
            "warn",
            f"{percent(max(0.0, min(1.0, finding.share.value)))} of it",
            rows(*(("evidence", text) for text in finding.evidence)),
            detail=2,
        )
        for finding in attribution.findings
    ]
    said = facts(
        ("cannot tell", attribution.cannot_tell, 3),
        *(("to learn more", words, WHOLE) for words in attribution.would_tell),
        *(("not tried", f"{ARMS[arm.arm]}: {arm.why_not}", WHOLE)
          for arm in attribution.arms if arm.why_not),
        lines=4,
    )  # fmt: skip
    more = f"at {attribution.hz:g} Hz a call needs {duration(excess.value)} more ({low} to {high})"
    return section(
        "Why paced calls are slower", Text(more, detail=1), items(causes), said, _arms(attribution)
    )


def _arms(attribution: Attribution) -> Chart | None:
    """What each way of spending the wait gives back of the excess."""
    shown = [effect for effect in attribution.arms if effect.recovered is not None]
    rows = []
    for arm in shown:
        share = arm.recovered
        assert share is not None
        said = tip(ARMS[arm.arm], ("of the excess", percent(share.value)),
                   ("a call", duration(arm.wall_s)))  # fmt: skip
        rows.append({"arm": ARMS[arm.arm], "share": 100 * share.value, "low": 100 * share.low,
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
        ("Between calls", "A call", "CPU", "GPU", "Core speed", "Recovers"),
        [
            (ARMS[effect.arm], *map(duration, (effect.wall_s, effect.cpu_s, effect.device_s)),
             percent(effect.speed), _interval(effect.recovered) if effect.recovered else "-")
            for effect in attribution.arms if not effect.why_not
        ],
        "What each way of spending the wait recovers of the excess",
        (1, 2, 3, 4, 5),
    )  # fmt: skip
    return Chart("The experiment: what is done between calls", says, spec, table, detail=10)


def _interval(estimate: Estimate) -> str:
    """In whole percent: runs differ by more than that."""
    bounds = max(-1.0, estimate.low), min(2.0, estimate.high)
    value, low, high = (f"{round(100 * share)}%" for share in (estimate.value, *bounds))
    return f"{value} ({low} to {high})"


# -- fixes -------------------------------------------------------------------------------------


def _advice(result: PaceResult) -> Items | None:
    return items(
        [
            Item(
                each.title,
                tag=_PRIVILEGE[each.tier or 1],
                rows=rows(
                    ("how", each.action), ("undo", each.undo), ("cost", each.cost),
                    ("test", f"trainfit pace --fix {each.name}" if each.name else ""),
                ),
                detail=4,
            )
            for each in result.advice
        ],
        "fix",
    )  # fmt: skip


def _trial(result: PaceResult, trial: FixTrial | None) -> list[Chart | Facts | None]:
    if trial is None:
        return []
    before, after, change = trial.before, trial.after, trial.change
    ratio = ""
    if change is not None:
        ratio = f"{change.value:.3f} ({change.low:.3f} to {change.high:.3f})"
        if trial.recovered is not None:
            ratio += f", {_interval(trial.recovered)} of the excess recovered"
    says = (
        f"{trial.what}: the median goes from {duration(before.calls.p50)} to "
        f"{duration(after.calls.p50)}."
    )
    told = facts(
        ("fix", f"--fix {trial.fix}: {trial.what}", 5),
        ("before", _calls(before), 6),
        ("after", _calls(after), 6),
        ("after ÷ before", ratio, 4),
        ("cost", trial.cost, 20),
        ("undo", trial.undo, 19),
    )
    named = [
        ("before", _latest(result, before, None)),
        (f"after: {trial.fix}", _latest(result, after, trial.fix)),
    ]
    return [told, latency_curves(named, "Latency before and after the fix", says)]


def _calls(row: RateSummary) -> str:
    late = "" if row.late is None else f", starts up to {duration(row.late.p99)} late (p99)"
    return f"p50 {duration(row.calls.p50)}, p99 {duration(row.calls.p99)}{late}"


def _latest(result: PaceResult, row: RateSummary, fix: FixName | None) -> list[float]:
    """The calls that ``row`` is of: the latest ones; those before looked for the right fix."""
    found: list[float] = []
    for block in reversed(result.blocks):
        if len(found) >= row.calls.count:
            break
        if (block.phase, block.hz, block.arm, block.fix) == ("fix", row.hz, row.arm, fix):
            found += call_walls(block, result)
    return found


def _failure(result: PaceResult) -> list[Text | Output | None]:
    failure = result.failure
    if failure is None:
        return []
    head = f"Call {failure.call} raised {failure.error_type}: {failure.message}"
    trace = Output(failure.traceback, 60) if failure.traceback else None
    return [Text(head, "bad", 0), trace]


# -- the answer --------------------------------------------------------------------------------


def verdict_line(result: PaceResult) -> str:
    """The answer: is a rate held, and are its calls slower than back to back?"""
    if result.ended == "failed":
        failure = result.failure
        head = "The call failed"
        if failure is not None:
            what = one_line(f"{failure.error_type}: {failure.message}")
            head = f"The call failed: call {failure.call} raised {what}"
        return head + ("; below are the results so far" if _has_any(result) else "")
    said = [_cannot_hold(result), _late(result), _compared(result)]
    return ". ".join(text for text in said if text)


def _has_any(result: PaceResult) -> bool:
    return bool(result.rates) or result.back_to_back is not None


def _compared(result: PaceResult) -> str:
    if result.ended == "interrupted":
        return "Interrupted: results so far"
    if not result.rates:
        if result.unheld:
            return ""
        target = max((each.wanted_s or 0.0 for each in result.unmeasured), default=0.0)
        return "Nothing was measured: give --duration " + (f"{target:g}" if target else "more")
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
        text += "; " * bool(text) + f"{_rate_names(result.unmeasured)} was not measured"
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
    rows = [row for row in all_rates(result) if row.is_collecting and row.hz in (None, hz)]
    share = max((row.collected_share for row in rows), default=0.0)
    collected = f" ({percent(share)} of it garbage collections of Python)" if share else ""
    return (
        f"{rates} Hz cannot be held: {_every(result)} needs {duration(seconds)}{collected}, and "
        f"the next is due after {duration(result.period / hz)}"
    )


def _late(result: PaceResult) -> str:
    """A sentence on calls that end too late at a rate that its usual call leaves time for; empty
    where they are few."""
    held = [row for row in result.rates if result.is_held(row)]
    worst = max(held, key=lambda row: row.missed_share, default=None)
    if result.period > 1 or worst is None or worst.missed_share < _NOTHING:
        return ""
    return (
        f"At {worst.hz:g} Hz {percent(worst.missed_share)} of the calls end after the next one is "
        f"due, though half of them need {duration(worst.calls.p50)} or less"
        + (_collecting(worst) or _also_back_to_back(result, worst) + _next_to(result))
    )


def _also_back_to_back(result: PaceResult, row: RateSummary) -> str:
    """A clause that says that calls are as long at any rate; empty where half as many are, or
    fewer."""
    walls = dict(base_walls(result)).get(rate_name(None), [])
    if not walls or row.hz is None:
        return ""
    share = sum(wall > 1 / row.hz for wall in walls) / len(walls)
    if share <= row.missed_share / 2:
        return ""
    return (
        f"; back to back {percent(share)} need more than {duration(1 / row.hz)}, too: the rate is "
        "not why"
    )


def _collecting(row: RateSummary) -> str:
    """Which of its late calls garbage collections explain; empty: less than half of them."""
    if not row.misses_collecting or row.misses_collecting < row.misses / 2:
        return ""
    share = row.misses_collecting / row.misses
    return f"; garbage collections within them make {percent(share)} of these late"


def _next_to(result: PaceResult) -> str:
    """What makes calls late at any rate: programs that had the cores meanwhile."""
    others = next((warning for warning in result.warnings if warning.startswith(OTHERS)), "")
    return f"; {others}" if others else ""


def _rate_names(rows: Sequence[RateSummary | Unmeasured]) -> str:
    return ", ".join(f"{row.hz:g}" for row in rows) + " Hz"


def _not_slower(result: PaceResult) -> str:
    rates = result.rates
    compared = [row.ratio for row in rates if row.ratio is not None]
    alone = [row for row in rates if row.ratio is None]
    uncompared = ""
    if alone:
        uncompared = f"{_rate_names(alone)}: too few calls to compare with back to back"
    if not compared:
        return uncompared
    maximum = max(ratio.high - 1 for ratio in compared)
    if maximum <= _NOTHING:
        text = AS_FAST
    elif maximum > _ANYTHING:
        text = f"Cannot tell whether calls are slower: {_varied(result)}"
    else:
        text = (
            "No call is measurably slower than back to back; with so few or so varied calls up "
            f"to {percent(maximum)} more is possible"
        )
    return f"{text}; {uncompared}" if uncompared else text


def _varied(result: PaceResult) -> str:
    walls = [wall for _, values in base_walls(result) for wall in values]
    vary = f"they vary from {duration(min(walls))} to {duration(max(walls))}; " if walls else ""
    return f"{vary}repeat on an idle machine, or with a longer --duration"


def _why(attribution: Attribution | None) -> str:
    if attribution is None:
        return ""
    if not attribution.findings and attribution.threads:
        threads = ", ".join(attribution.threads)
        return f": cannot tell why, as another thread of this process works meanwhile ({threads})"
    if not attribution.findings and attribution.is_spread:
        return ": cannot tell why, as calls vary by more than that"
    if not attribution.findings:
        return ": the cause is not known"
    names = [CAUSES[finding.cause].partition(":")[0] for finding in attribution.findings]
    return ": " + " and ".join(names)


#: Warnings of a rate that are merged: how one is known, and what is said of several.
_KINDS: Final[Sequence[tuple[str, str]]] = (
    ("calls vary", "calls vary: the middle half of them by a quarter or more"),
    ("calls became", "calls changed during the measurement (heat, or another load)"),
    ("outliers", "some calls are outliers; other work or garbage collections ran at the same time"),
    ("too few for p95", "too few calls with work for p95"),
)
_DURATION: Final = re.compile(r"--duration (\d+) gives")


def merged(warnings: Sequence[str]) -> list[str]:
    """One for each kind, the most important first: of the machine, then of the calls."""
    of_machine = [warning for warning in warnings if not any(kind in warning for kind, _ in _KINDS)]
    found = sorted(of_machine, key=lambda each: each.startswith("the first call"))
    for kind, several in _KINDS:
        alike = [warning for warning in warnings if kind in warning]
        if len(alike) > 1:
            names = ", ".join(each.partition(":")[0] for each in alike)
            needed = [int(match[1]) for each in alike if (match := _DURATION.search(each))]
            enough = f"; --duration {max(needed)} is enough for all" if needed else ""
            alike = [f"{names}: {several}{enough}"]
        found += alike
    return found
