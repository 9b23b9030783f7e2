"""A measured noise scale, and the trade between two batch sizes: what they do to learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Headline,
    Snippet,
    Subject,
    Table,
    Tile,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, chart, tip, values, x, y
from trainfit.report.layout import Sketch, bars
from trainfit.report.notes import plain
from trainfit.results.batch import (
    BatchExplanation,
    Claim,
    GoodputCurve,
    GoodputPoint,
    Interval,
    NoiseResult,
    StepTime,
    samples_text,
)
from trainfit.results.text import count, duration, percent, rate

#: Batch sizes of a picture on a terminal.
_ROWS: Final = 6
_TIME: Final = ("time to the same loss ÷ the fastest's", "time ÷ the fastest's")
_LOG_BATCH: Final = "batch size (logarithmic)"
_LOG: Final = {"type": "log", "base": 2, "nice": False}
_BAND: Final = "The band is over the range of the critical batch."
METHODS: Final = {
    "accumulation": "micro-batches of a step",
    "ranks": "ranks of a data-parallel run",
    "parts": "halves of a batch, in a measuring pass",
    "examples": "single samples, of Linear and normalization modules alone",
    "none": "nothing",
}


# ---
# The noise scale.


def noise_subject(result: NoiseResult) -> Subject:
    """The noise scale with its interval; over the training, and by module."""
    known = result.noise is not None
    tiles = [Tile("Batch size", str(result.batch_size), f"{result.steps_used} steps used")]
    if result.noise is not None:
        tiles.insert(0, Tile("Noise scale", result.noise.text, "samples, 90% interval"))
    line = result.line
    following = Snippet("trainfit batch explain FILE --to BATCH", "Next")
    batch = f"{result.micro_batch} × {result.accumulation} micro-batches × "
    cost = ""
    if result.cost_share is not None:
        cost = f"{percent(result.cost_share, decimals=1)} of the time (on the host)"
    measured = facts(
        ("measured on", METHODS[result.method]),
        ("a step", batch + count(result.ranks, "rank")),
        ("used", f"{count(result.steps_used, 'measured step')} of {result.steps_seen}"),
        ("cost", cost),
        ("over time", _course(result)),
        ("intervals", f"{percent(result.confidence)}" if known else ""),
        detail=5,
    )
    left_out = [
        f"{count(number, 'step')} left out: {reason}"
        for reason, number in result.steps_left_out.items()
    ]
    return Subject(
        Headline(
            kind="Noise scale",
            tone="plain" if known else "warn",
            text=f"{line[0].upper()}{line[1:]}.",
            commands=(following,) if known else (),
            tiles=tuple(tiles),
        ),
        tuple(section("Gradient noise scale", measured, _history(result), _modules(result))),
        tuple(plain([*left_out, *result.left_out, *result.notes])),
    )


def _course(result: NoiseResult) -> str:
    if len(result.history) < 2:
        return ""
    first, last = result.history[0], result.history[-1]
    return f"{first.noise.text} around step {first.step}, {last.noise.text} around step {last.step}"


def _modules(result: NoiseResult) -> Table | None:
    ordered = sorted(result.modules, key=lambda each: -(each.trace_share or 0.0))
    return table_of(
        ("Module", "Parameters", "Noise scale", "Of the noise"),
        [
            (
                module.name or "(itself)",
                f"{module.parameters:,}",
                module.noise.text if module.noise is not None else "-",
                percent(module.trace_share),
            )
            for module in ordered
        ],
        "Noise scale by module, in samples",
        (1, 2, 3),
        detail=10,
    )


def _history(result: NoiseResult) -> Chart | None:
    moments = [moment for moment in result.history if moment.noise.value is not None]
    if len(moments) < 3:
        return None
    rows = [
        {
            "step": moment.step,
            "noise": moment.noise.value,
            "tip": tip(f"step {moment.step}", ("noise scale", moment.noise.text)),
        }
        for moment in moments
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
        [(str(moment.step), moment.noise.text) for moment in moments],
        "Noise scale over the training",
        (0, 1),
    )
    return Chart("Gradient noise scale over the training", says, spec, table)


# ---
# The trade between two batch sizes.


def trade_subject(result: BatchExplanation) -> Subject:
    """The trade in a sentence, a picture of it, and claims with their sources."""
    noise, critical = result.noise, result.critical_batch
    scales = facts(
        ("noise scale", f"{noise.text} samples ({result.noise_source})" if noise else ""),
        ("critical batch", _critical(critical) if critical is not None else ""),
        detail=1,
    )
    claims = facts(
        *((claim.topic, f"{claim.text} [{'; '.join(_sources([claim]))}]", 5 + index)
          for index, claim in enumerate(result.claims)),
        lines=6,
        noun="claim",
    )  # fmt: skip
    picture = _goodput(result) or _steps(result)
    return Subject(
        Headline(
            kind="Batch size",
            tone="plain",
            text=result.answer,
            subject=f"batch size {result.before} → {result.after}",
        ),
        (
            *section("Effect of the batch size on learning", picture, scales),
            *section("What changes", claims),
            *section("Sources", facts(*_sources(result.claims).items())),
        ),
    )


def _sources(claims: Sequence[Claim]) -> dict[str, str]:
    """Authors and year of each, with the whole."""
    return {source.work: source.reference for claim in claims for source in claim.sources}


def _critical(interval: Interval) -> str:
    low = samples_text(interval.low)
    where = (
        f"{low} to {samples_text(interval.high)}" if interval.high is not None else f"{low} or more"
    )
    return f"{where} over a training (all ranges here cover it)"


def sizes_around(before: int, after: int) -> Sequence[int]:
    """Both, and powers of 2 around and between."""
    low, high = sorted((before, after))
    span = max(2, math.ceil(math.log2(high / low)) + 2)
    factor = max(2, 2 ** math.ceil(span / (_ROWS - 1)))
    found = {before, after, high * factor, max(1, low // factor)}
    size = low * factor
    while size < high:
        found.add(size)
        size *= factor
    return sorted(found)[: _ROWS + 1]


def _number(value: float) -> str:
    return samples_text(value) if value >= 10 else f"{value:.2g}"


def _marked(size: int, result: BatchExplanation, *more: str) -> str:
    """What is to be said of a batch size behind its bar."""
    names = (("now", result.before), ("asked", result.after))
    words = [*(word for word, batch in names if size == batch), *filter(None, more)]
    return f"  {', '.join(words)}" if words else ""


def _steps(result: BatchExplanation) -> Chart | None:
    """Steps to the same loss, where no step times are known that would make them a time."""
    critical = result.critical_batch or result.noise
    value = (critical.value or critical.low) if critical is not None else 0.0
    if critical is None or not value:
        return None
    before, after = result.before, result.after

    def steps(size: int, of: float | None) -> float:
        return before / size if of is None else (1 + of / size) / (1 + of / before)

    rows: list[dict[str, Any]] = []
    for size in sizes_around(before, after):
        ends = steps(size, critical.low), steps(size, critical.high)
        samples = steps(size, value) * size / before
        said = tip(
            f"batch size {size}",
            ("steps", f"{_number(steps(size, value))} ×"),
            ("samples", f"{_number(samples)} ×"),
        )
        rows.append({"batch": size, "steps": steps(size, value), "samples": samples,
                     "low": min(ends), "high": max(ends), "tip": said})  # fmt: skip
    what = [f"steps (bar) and samples{each} ÷ those of {before}"
            for each in (" to the same loss", "")]  # fmt: skip
    sketch = bars(
        [
            ((str(row["batch"]),), row["steps"],
             f"{_number(row['steps'])} × steps, {_number(row['samples'])} × samples"
             + _marked(row["batch"], result))
            for row in rows
        ],
        "r",
        ("batch",),
        what,
    )  # fmt: skip
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
                f"{_number(row['steps'])} ×",
                f"{_number(row['low'])} to {_number(row['high'])} ×",
                f"{_number(row['samples'])} ×",
            )
            for row in rows
        ],
        "Steps and samples to the same loss",
        (0, 1, 2, 3),
    )
    return Chart("Steps against batch size", says, spec, table, _BAND, sketch, 0)


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
    return f"{step.micro_batch}×{step.accumulation}×{step.gpus}"


def _bars(curve: GoodputCurve, points: Sequence[GoodputPoint], result: BatchExplanation) -> Sketch:
    """Time to the same loss by batch size: the current one, the other, the best and a few more."""
    best = curve.best_point
    kept = {result.before, result.after, best.step.batch_size}
    others = [point for point in points if point.step.batch_size not in kept]
    room = max(0, _ROWS - sum(point.step.batch_size in kept for point in points))
    if len(others) > room:
        places = [round(n * (len(others) - 1) / max(1, room - 1)) for n in range(room)]
        others = [others[place] for place in places]
    shown = [point for point in points if point.step.batch_size in kept or point in others]
    # How a step is split is said where some batch size is more than a micro-batch.
    is_split = any(point.step.micro_batch != point.step.batch_size for point in shown)
    rows = []
    for point in shown:
        time, step = best.per_s / point.per_s, point.step
        basis = step.basis if step.basis != "measured" else ""
        behind = f"{time:.2f} ×" if time < 100 else f"{time:,.0f} ×"
        behind += _marked(step.batch_size, result, "fastest" if point is best else "", basis)
        split = [_split(step)] if is_split else []
        rows.append(([str(step.batch_size), *split, duration(step.seconds)], time, behind))
    head = ("batch", *(["micro×accum.×GPUs"] if is_split else []), "step")
    return bars(rows, "rlr" if is_split else "rr", head, _TIME)


def _goodput(result: BatchExplanation) -> Chart | None:
    curve = result.goodput
    if curve is None:
        return None
    # Of several ways to make a batch (micro-batches, GPUs) the best.
    best_of: dict[int, GoodputPoint] = {}
    for each in sorted(curve.points, key=lambda point: point.per_s):
        best_of[each.step.batch_size] = each
    points = [best_of[size] for size in sorted(best_of)]
    if len(points) < 2:
        return None
    rows = [
        {
            "batch": point.step.batch_size,
            "goodput": point.per_s,
            "low": point.low,
            "high": point.high,
            "tip": tip(
                f"batch size {point.step.batch_size}",
                ("goodput", f"{rate(point.per_s)} samples/s"),
                ("throughput", f"{rate(point.step.throughput)} samples/s"),
                ("efficiency", percent(point.efficiency)),
            ),
        }
        for point in points
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
                str(point.step.batch_size),
                _split(point.step),
                rate(point.per_s),
                rate(point.step.throughput),
                percent(point.efficiency),
            )
            for point in points
        ],
        "Goodput by batch size",
        (0, 2, 3, 4),
    )
    sketch = _bars(curve, points, result)
    return Chart("Goodput against batch size", says, spec, table, _BAND, sketch, 0)
