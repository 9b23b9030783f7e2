"""Several watched runs: two compared, or a change that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainfit.report.blocks import (
    PAGE,
    Chart,
    Headline,
    Section,
    Snippet,
    Subject,
    Text,
    Tone,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import NAMES, TIP, chart, nominal, tip, values, x
from trainfit.report.notes import plain
from trainfit.report.watch import PHASES
from trainfit.results.text import duration, percent, rate, size
from trainfit.results.watch import AdviceVerification, Change, Comparison

_ACROSS: Final = "change from A to B (%, with the 95% interval)"
_TONES: Final[Mapping[str, Tone]] = {"faster": "good", "slower": "bad", "proven": "good",
                                     "worse": "bad", "no gain": "plain"}  # fmt: skip
#: Phases below this share of a step, before and after, are left out.
_SHOWN: Final = 0.01
#: A comparison that finds only gains above this share has not shown that there is none.
_COARSE: Final = 0.10


def comparison_subject(result: Comparison) -> Subject:
    """The verdict on the run after; measures with their effects, what differs in the set-up."""
    return Subject(
        Headline(
            kind="Comparison",
            tone=_TONES.get(result.verdict, "warn" if result.verdict == "cannot tell" else "plain"),
            text=answer_text(result) + ".",
            subject=f"A: {result.before.folder} · B: {result.after.folder}",
        ),
        tuple(_compared(result, "Compared runs")),
        tuple(plain(result.notes)),
    )


def tried_subject(result: AdviceVerification) -> Subject:
    """What came of a change that was tried, and the command with it."""
    is_proven = result.verdict == "proven"
    label = "Run" if is_proven else "Tried"
    command = (Snippet(result.changed_command, label),) if result.changed_command else ()
    rest = ""
    if result.left_out and result.settings:
        rest = f"{_settings(result.left_out)}: the command has no placeholder for it"
    more = ""
    if result.verdict == "no gain" and _detectable(result) > _COARSE:
        more = f"more runs find smaller gains: --verify-runs {2 * len(result.runs) + 1}"
    compared = result.comparison
    parts = _compared(compared, "The change that was tried") if compared is not None else []
    return Subject(
        Headline(
            kind="Tried change",
            tone=_TONES.get(result.verdict, "warn"),
            text=verified_text(result) + ".",
            limit=f"finding: {result.title}" if result.title else "",
            subject=result.command,
            commands=command,
            changes=(f"by hand: {result.line}",) if result.line else (),
        ),
        (
            *parts,
            *section("What was not tried", facts(("left out", rest), ("next", more), detail=2)),
        ),
        tuple(plain(compared.notes)) if compared is not None else (),
    )


def _compared(result: Comparison, title: str) -> list[Section]:
    before, after = result.before.steps, result.after.steps
    measures = table_of(
        ("Measure", "A", "B", "Effect"),
        [
            (name_of(change), value_text(change, change.before), value_text(change, change.after),
             _effect(change))
            for change in notable(result.changes)
        ],
        f"A: {before} steady steps, B: {after}",
        (1, 2),
        detail=2,
    )  # fmt: skip
    differs = table_of(
        ("Differs", "A", "B"),
        [
            (
                f"{difference.group}: {difference.what}",
                difference.before or "(none)",
                difference.after or "(none)",
            )
            for difference in result.differences
        ],
        "Set-up of the two runs",
        detail=12,
    )
    same = None if differs else Text("The set-up does not differ.", detail=11)
    return section(title, _effects(result), measures, same, differs)


def _effect(change: Change) -> str:
    if change.before is None or change.after is None:
        return "not measured in both"
    same = "; no difference" if change.verdict == "no difference" else ""
    return (effect_text(change) or "-") + same


def notable(changes: tuple[Change, ...]) -> list[Change]:
    """The changes without phases that are no part of a step worth a line, before or after."""
    whole = changes[0].before if changes else None
    return [change for change in changes if _matters(change, whole)]


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
        return f"Cannot tell: it needs {result.needs}"
    if result.verdict == "no difference":
        text = f"; detectable from {percent(change.detectable or 0, decimals=1)} on"
        return f"No difference of the {change.what} found: {effect_text(change)}{text}"
    return f"B is {result.verdict}: {change.what} {effect_text(change)}"


def _matters(change: Change, whole: float | None) -> bool:
    if change.basis != "step" or not whole:
        return True
    return max(change.before or 0.0, change.after or 0.0) >= _SHOWN * whole


def name_of(change: Change) -> str:
    """The measure in words."""
    return PHASES.get(change.what, change.what)


def value_text(change: Change, value: float | None) -> str:
    """A value of this measure with its unit."""
    if change.unit in ("s/step", "s/sample"):
        return duration(value)
    if change.unit == "bytes":
        return size(value)
    return percent(value) if change.unit == "share" else rate(value)


def _effects(result: Comparison) -> Chart | None:
    """Effects with their 95% intervals."""
    rows: list[dict[str, Any]] = []
    shown: list[Change] = []
    for change in notable(result.changes):
        if change.effect is None or change.interval is None:
            continue
        shown.append(change)
        rows.append(
            {
                "what": name_of(change),
                "effect": 100 * change.effect,
                "low": 100 * change.interval[0],
                "high": 100 * change.interval[1],
                "verdict": change.verdict or "no difference",
                "tip": tip(
                    name_of(change), ("effect", effect_text(change)), ("verdict", change.verdict)
                ),
            }
        )
    if not rows:
        return None
    says = f"{name_of(shown[0]).capitalize()}: {effect_text(shown[0])}."
    zero = [{"zero": 0}]
    spec = chart(
        26 * len(rows) + 10,
        says,
        layer=[
            {
                "data": values(zero),
                "mark": {"type": "rule", "color": "var(--muted)"},
                "encoding": {"x": x("zero", _ACROSS)},
            },
            {
                "data": values(rows),
                "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--c1)", **TIP},
                "encoding": {
                    "x": x("low", _ACROSS),
                    "x2": {"field": "high"},
                    "y": nominal("what", axis=NAMES),
                },
            },
            {
                "data": values(rows),
                "mark": {"type": "point", "filled": True, "size": 90, "color": "var(--c1)", **TIP},
                "encoding": {"x": x("effect", _ACROSS), "y": nominal("what", axis=NAMES)},
            },
        ],
    )
    table = figures(
        ("Measure", "Effect"),
        [(name_of(each), effect_text(each)) for each in shown],
        "Effects with their 95% intervals",
        (1,),
    )
    return Chart("What changed, with 95% intervals", says, spec, table, detail=PAGE)


def verified_text(result: AdviceVerification) -> str:
    """The verdict in one line."""
    settings = _settings(result.settings)
    gain = result.gain
    if result.verdict in ("not tried", "cannot tell") or gain is None:
        return f"{result.verdict.capitalize()}: {result.reason}"
    value, low, high = (percent(each, decimals=1, signed=True) for each in gain)
    numbers = f"speed {value} (95%: {low} to {high})"
    if result.verdict == "proven":
        return f"Proven: {settings} is faster, {numbers}"
    if result.verdict == "worse":
        return f"Worse: {settings} is slower, {numbers}; keep the command as it is"
    least = percent(_detectable(result), decimals=1)
    text = "No gain found by" if _detectable(result) <= _COARSE else "Not decided:"
    return f"{text} {settings}: {numbers}; detectable from {least} on"


def _detectable(result: AdviceVerification) -> float:
    change = result.comparison.main if result.comparison is not None else None
    return change.detectable or 0.0 if change is not None else 0.0


def _settings(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
