"""Two watched runs, or a change that was tried: what changed by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainfit.report.page.blocks import Chart, Command, Headline, Section, Tone, figures, section
from trainfit.report.page.blocks import table as table_of
from trainfit.report.page.charts import NAMES, TIP, chart, nominal, tip, values, x
from trainfit.report.watch.comparison import answer_text, effect_text, name_of, notable, value_text
from trainfit.report.watch.verification import answer_text as verified_text
from trainfit.results.watch.comparison import Change, Comparison
from trainfit.results.watch.verification import Verification

_ACROSS: Final = "change from A to B (%, with the 95% interval)"
_TONES: Final[Mapping[str, Tone]] = {"faster": "good", "slower": "bad", "proven": "good",
                                     "worse": "bad", "no gain": "plain"}  # fmt: skip


def comparison_headline(result: Comparison) -> Headline:
    """The verdict on the run after."""
    return Headline(
        kind="Comparison",
        tone=_TONES.get(result.verdict, "warn" if result.verdict == "cannot tell" else "plain"),
        text=answer_text(result) + ".",
        subject=f"A: {result.before.folder} · B: {result.after.folder}",
    )


def verification_headline(result: Verification) -> Headline:
    """What came of the change."""
    command = result.changed_command if result.verdict == "proven" else ""
    return Headline(
        kind="Tried change",
        tone=_TONES.get(result.verdict, "warn"),
        text=verified_text(result) + ".",
        limit=result.title,
        subject=result.command,
        commands=(Command(command, "Run"),) if command else (),
        changes=(f"by hand: {result.line}",) if result.line else (),
    )


def comparison_sections(result: Comparison) -> list[Section]:
    """Measures with their effects, and what differs in the set-up."""
    measures = table_of(
        ("Measure", "A", "B", "Effect"),
        [
            (name_of(each), value_text(each, each.before), value_text(each, each.after),
             effect_text(each) or "-")
            for each in notable(result.changes)
        ],
        f"A: {result.before.steps} steady steps, B: {result.after.steps}",
        (1, 2, 3),
    )  # fmt: skip
    differs = table_of(
        ("Differs", "A", "B"),
        [
            (f"{each.group}: {each.what}", each.before or "-", each.after or "-")
            for each in result.differences
        ],
        "Set-up of the two runs",
    )
    return section("Compared runs", _effects(result), measures, differs)


def _effects(result: Comparison) -> Chart | None:
    """Effects with their 95% intervals."""
    rows: list[dict[str, Any]] = []
    shown: list[Change] = []
    for each in notable(result.changes):
        if each.effect is None or each.interval is None:
            continue
        shown.append(each)
        rows.append(
            {
                "what": name_of(each),
                "effect": 100 * each.effect,
                "low": 100 * each.interval[0],
                "high": 100 * each.interval[1],
                "verdict": each.verdict or "no difference",
                "tip": tip(name_of(each), ("effect", effect_text(each)), ("verdict", each.verdict)),
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
    return Chart("What changed, with 95% intervals", says, spec, table)
