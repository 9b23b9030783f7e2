"""Lanes above a chart over time: from when to when each finding is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainfit.report.page.blocks import Tone
from trainfit.report.page.charts import TIP, Spec, tip, values
from trainfit.report.watch.words import evidence_text, title
from trainfit.results.watch.result import Finding, TimelinePoint

#: Pixels of a lane.
LANE: Final = 24
#: Findings with a lane.
_LANES: Final = 6
TONES: Final[Mapping[str, Tone]] = {"critical": "bad", "warning": "warn", "info": "plain"}
_HUES: Final = {"bad": "var(--bad)", "warn": "var(--warn)", "plain": "var(--muted)"}


def finding_lanes(
    findings: Sequence[Finding], timeline: Sequence[TimelinePoint]
) -> list[dict[str, Any]]:
    """Findings with their place in time: of those about certain steps, from the first to the
    last."""
    begin, end = timeline[0].time_s, timeline[-1].time_s
    found = []
    for each in findings[:_LANES]:
        first = _time_of(each.first_step, timeline, begin)
        last = _time_of(each.last_step, timeline, end)
        rows = ("evidence", "; ".join(map(evidence_text, each.evidence[:3]))), ("fix", each.action)
        found.append(
            {
                "from": first,
                "to": last,
                "title": title(each),
                "tone": TONES[each.severity],
                "tip": tip(title(each), *rows),
            }
        )
    return found


def _time_of(step: int | None, timeline: Sequence[TimelinePoint], otherwise: float) -> float:
    if step is None:
        return otherwise
    return min(timeline, key=lambda point: abs(point.step - step)).time_s


def lane_layers(marks: Sequence[Mapping[str, Any]], across: Spec) -> list[Spec]:
    """A lane for each finding, above the picture: from its first step to its last."""
    layers: list[Spec] = []
    for lane, mark in enumerate(marks):
        place = {
            "x": {**across, "field": "from"},
            "y": {"value": 4 + LANE * lane},
            "color": {"value": _HUES[mark["tone"]]},
        }
        line = {"type": "rule", "strokeWidth": 5, "strokeCap": "round", **TIP}
        label = {"type": "text", "align": "left", "dy": 10, "fontSize": 11, "fontWeight": "bold",
                 "limit": {"expr": "width"}, **TIP}  # fmt: skip
        layers.append(
            {"data": values([mark]), "mark": line, "encoding": {**place, "x2": {"field": "to"}}}
        )
        layers.append(
            {
                "data": values([mark]),
                "mark": label,
                "encoding": {**place, "text": {"field": "title"}},
            }
        )
    return layers
