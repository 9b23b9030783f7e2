"""A prediction compared with a real run: each quantity with its stated range."""

from __future__ import annotations

import statistics
from typing import Any

from trainfit.report.page.blocks import Chart, Headline, Section, Table, Tile, figures, section
from trainfit.report.page.charts import COLORS, NAMES, TIP, chart, color, nominal, tip, values, x
from trainfit.report.plan.verification import VERDICTS, difference_text, verdict_text
from trainfit.results.format import GIB, count, duration, percent, size
from trainfit.results.plan.verification import REHEARSED, Verification

_ACROSS = "memory (GiB; the bar is the stated range)"


def prediction_headline(result: Verification) -> Headline:
    """The verdict, and the measured memory."""
    device = result.compared.get("device")
    tiles = [
        Tile(
            name.capitalize(), size(each.measured_bytes), f"predicted {size(each.predicted_bytes)}"
        )
        for name, each in result.compared.items()
        if each.measured_bytes is not None
    ]
    if result.step_seconds:
        times = result.step_seconds
        tiles.append(
            Tile(
                "Step", duration(statistics.median(times)), f"measured, {count(len(times), 'step')}"
            )
        )
    rehearsed = REHEARSED in result.notes
    text = verdict_text(result)
    share = ""
    if device is not None and device.measured_bytes is not None and device.predicted_bytes:
        change = device.measured_bytes / device.predicted_bytes - 1
        share = f"Device memory {percent(change, decimals=1, signed=True)} against the prediction."
    return Headline(
        kind="Prediction and real run",
        tone="plain" if rehearsed else "good" if result.good else "bad",
        text=text if text.endswith(".") else f"{text}.",
        limit=REHEARSED.capitalize() + "." if rehearsed else share,
        subject=f"{result.command} on {result.gpu_measured}",
        tiles=tuple(tiles),
    )


def prediction_sections(result: Verification) -> list[Section]:
    """Predicted and measured memory."""
    return section("Predicted and measured memory", _chart(result))


def _table(result: Verification) -> Table:
    return figures(
        ("Memory", "Predicted", "Measured", "Difference", "Stated range", "In it"),
        [
            (
                name,
                size(each.predicted_bytes),
                size(each.measured_bytes),
                difference_text(each) or "-",
                f"{size(each.low_bytes)} to {size(each.high_bytes)}",
                VERDICTS[each.within].lower(),
            )
            for name, each in result.compared.items()
        ],
        f"Of {count(result.steps, 'optimizer step')}; the range: {result.range_basis}",
        (1, 2, 3, 4),
    )


def _chart(result: Verification) -> Chart | None:
    """The stated range as a bar, and the measured value as a point on it."""
    if not result.compared:
        return None
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for name, each in result.compared.items():
        said = tip(
            name,
            ("predicted", size(each.predicted_bytes)),
            ("stated range", f"{size(each.low_bytes)} to {size(each.high_bytes)}"),
            ("measured", size(each.measured_bytes)),
            ("difference", difference_text(each)),
        )
        rows.append({"what": name, "low": each.low_bytes / GIB, "high": each.high_bytes / GIB,
                     "tip": said})  # fmt: skip
        points.append({"what": name, "value": each.predicted_bytes / GIB, "of": "predicted",
                       "tip": said})  # fmt: skip
        if each.measured_bytes is not None:
            points.append({"what": name, "value": each.measured_bytes / GIB, "of": "measured",
                           "tip": said})  # fmt: skip
    says = f"{verdict_text(result)}."
    up = nominal("what", axis=NAMES)
    layer = [
        {
            "data": values(rows),
            "mark": {"type": "bar", "height": 12, "color": "var(--grid)", **TIP},
            "encoding": {"x": x("low", _ACROSS), "x2": {"field": "high"}, "y": up},
        },
        {
            "data": values(points),
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 110, **TIP},
            "encoding": {
                "x": x("value", _ACROSS),
                "y": up,
                "color": color("of", ["predicted", "measured"], [COLORS[0], COLORS[1]]),
            },
        },
    ]
    spec = chart(40 * len(rows) + 10, says, layer=layer)
    return Chart("Predicted and measured memory", says, spec, _table(result))
