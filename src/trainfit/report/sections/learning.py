"""What a batch size does to learning: the measured noise scale, and the trade explained."""

from __future__ import annotations

from typing import Any, Final

from trainfit.report.batch import noise_text, sizes_around
from trainfit.report.blocks import (
    Chart,
    Headline,
    Output,
    Section,
    Table,
    Tile,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, chart, tip, values, x, y
from trainfit.results.batch import (
    BatchExplanation,
    GoodputCurve,
    GoodputPoint,
    NoiseResult,
    StepTime,
)
from trainfit.results.text import percent, rate

_LOG_BATCH: Final = "batch size (logarithmic)"
_LOG: Final = {"type": "log", "base": 2, "nice": False}
_BAND: Final = "The band is over the range of the critical batch."


def noise_headline(result: NoiseResult) -> Headline:
    """The noise scale with its interval."""
    known = result.noise is not None
    tiles = [Tile("Batch size", str(result.batch_size), f"{result.steps_used} steps used")]
    if result.noise is not None:
        tiles.insert(0, Tile("Noise scale", result.noise.text, "samples, 90% interval"))
    line = result.line
    return Headline(
        kind="Noise scale",
        tone="plain" if known else "warn",
        text=f"{line[0].upper()}{line[1:]}.",
        tiles=tuple(tiles),
    )


def noise_sections(result: NoiseResult) -> list[Section]:
    """Over the training, by module, and the whole text."""
    return section(
        "Gradient noise scale", _history(result), _modules(result), Output(noise_text(result))
    )


def trade_headline(result: BatchExplanation) -> Headline:
    """The trade in a sentence."""
    return Headline(
        kind="Batch size",
        tone="plain",
        text=result.answer,
        subject=f"batch size {result.before} → {result.after}",
    )


def trade_sections(result: BatchExplanation) -> list[Section]:
    """Goodput, and claims with their sources."""
    claims = table_of(
        ("Topic", "Statement", "Source"),
        [(each.topic, each.text, each.source) for each in result.claims],
        "What changes with the batch size",
    )
    goodput = _goodput(result.goodput) if result.goodput is not None else None
    return section("Effect of the batch size on learning", goodput or _steps(result), claims)


def _history(result: NoiseResult) -> Chart | None:
    moments = [each for each in result.history if each.noise.value is not None]
    if len(moments) < 3:
        return None
    rows = [
        {
            "step": each.step,
            "noise": each.noise.value,
            "tip": tip(f"step {each.step}", ("noise scale", each.noise.text)),
        }
        for each in moments
    ]
    says = f"The noise scale at {len(moments)} moments of the training."
    spec = chart(
        200,
        says,
        data=values(rows),
        mark={"type": "line", "point": True, "color": COLORS[0], **TIP},
        encoding={
            "x": x("step", "optimizer step"),
            "y": y("noise", "noise scale (samples)", scale={"domainMin": 0}),
        },
    )
    table = figures(
        ("Step", "Noise scale"),
        [(str(each.step), each.noise.text) for each in moments],
        "Noise scale over the training",
        (0, 1),
    )
    return Chart("Gradient noise scale over the training", says, spec, table)


def _modules(result: NoiseResult) -> Table | None:
    return table_of(
        ("Module", "Parameters", "Noise scale", "Share of the noise"),
        [
            (
                each.name or "(all)",
                f"{each.parameters:,}",
                each.noise.text if each.noise is not None else "-",
                percent(each.trace_share),
            )
            for each in result.modules
        ],
        "Noise scale by module",
        (1, 2, 3),
    )


def _steps(result: BatchExplanation) -> Chart | None:
    """Steps to the same loss, where no step times are known that would make them a time."""
    critical = result.critical_batch
    if critical is None or critical.value is None or critical.high is None:
        return None
    before, after = result.before, result.after

    def steps(size: int, of: float) -> float:
        return (1 + of / size) / (1 + of / before)

    rows = [
        {
            "batch": size,
            "steps": steps(size, critical.value),
            "low": min(steps(size, critical.low), steps(size, critical.high)),
            "high": max(steps(size, critical.low), steps(size, critical.high)),
            "tip": tip(
                f"batch size {size}",
                ("steps", f"{steps(size, critical.value):.2g} ×"),
                ("samples", f"{steps(size, critical.value) * size / before:.2g} ×"),
            ),
        }
        for size in sizes_around(before, after)
    ]
    label = f"steps ÷ those of batch size {before}"
    says = f"Steps to the same loss by batch size, compared with {before}."
    spec = chart(
        240,
        says,
        data=values(rows),
        layer=_band(x("batch", _LOG_BATCH, scale=_LOG), "steps", label),
    )
    table = figures(
        ("Batch size", "Steps", "Range", "Samples"),
        [
            (
                str(row["batch"]),
                f"{row['steps']:.2g} ×",
                f"{row['low']:.2g} to {row['high']:.2g} ×",
                f"{row['steps'] * row['batch'] / before:.2g} ×",  # type: ignore[operator]
            )
            for row in rows
        ],
        "Steps and samples to the same loss",
        (0, 1, 2, 3),
    )
    return Chart("Steps against batch size", says, spec, table, _BAND)


def _band(across: Any, name: str, label: str) -> list[dict[str, Any]]:
    """A line with points, and its range behind it."""
    return [
        {
            "mark": {"type": "area", "opacity": 0.18, "color": COLORS[0]},
            "encoding": {"x": across, "y": y("low", label), "y2": {"field": "high"}},
        },
        {
            "mark": {"type": "line", "point": True, "color": COLORS[0], **TIP},
            "encoding": {"x": across, "y": y(name, label, scale={"domainMin": 0})},
        },
    ]


def _split(step: StepTime) -> str:
    return f"{step.micro_batch} × {step.accumulation} × {step.gpus}"


def _goodput(curve: GoodputCurve) -> Chart | None:
    # Of several ways to make a batch (micro-batches, GPUs) the best.
    best_of: dict[int, GoodputPoint] = {}
    for each in sorted(curve.points, key=lambda point: point.per_s):
        best_of[each.step.batch_size] = each
    points = [best_of[size] for size in sorted(best_of)]
    if len(points) < 2:
        return None
    rows = [
        {
            "batch": each.step.batch_size,
            "goodput": each.per_s,
            "low": each.low,
            "high": each.high,
            "tip": tip(
                f"batch size {each.step.batch_size}",
                ("goodput", f"{rate(each.per_s)} samples/s"),
                ("throughput", f"{rate(each.step.throughput)} samples/s"),
                ("efficiency", percent(each.efficiency)),
            ),
        }
        for each in points
    ]
    best = curve.best_point
    says = f"Goodput is best at batch size {best.step.batch_size}: {rate(best.per_s)} samples/s."
    label = f"samples/s worth as much as at batch size {curve.reference}"
    spec = chart(
        240,
        says,
        data=values(rows),
        layer=_band(x("batch", _LOG_BATCH, scale=_LOG), "goodput", label),
    )
    table = figures(
        ("Batch size", "Micro-batch × accumulation × GPUs", "Goodput", "Throughput", "Efficiency"),
        [
            (
                str(each.step.batch_size),
                _split(each.step),
                rate(each.per_s),
                rate(each.step.throughput),
                percent(each.efficiency),
            )
            for each in points
        ],
        "Goodput by batch size",
        (0, 2, 3, 4),
    )
    return Chart("Goodput against batch size", says, spec, table, _BAND)
