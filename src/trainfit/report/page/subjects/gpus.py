"""A job on several GPUs: the table to choose from, speed against memory, effects of figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trainfit.report.page.blocks import (
    Chart,
    Headline,
    Section,
    Table,
    Text,
    Tile,
    figures,
    section,
)
from trainfit.report.page.blocks import table as table_of
from trainfit.report.page.charts import COLORS, color, named_bars, tip, x
from trainfit.report.plan.speed import BOUNDS
from trainfit.results.format import duration, percent, rate, size
from trainfit.results.plan.gpu_comparison import GpuComparison, GpuEstimate

#: GPUs that are drawn at most.
_BARS: Final = 24
_FITS: Final = {"fits as it is": COLORS[0], "fits with a smaller batch": COLORS[1]}


def gpus_headline(result: GpuComparison) -> Headline:
    """The cheapest and the fastest."""
    by_name = {each.gpu: each for each in result.gpus}
    picks = [("Fastest", result.fastest), ("Cheapest", result.cheapest)]
    tiles = []
    words = []
    for word, name in picks:
        if name is None or name not in by_name:
            continue
        each = by_name[name]
        words.append(f"{word}: {name}")
        per_s = f"{rate(each.samples_per_s)} samples/s" if each.samples_per_s else ""
        cost = f"{each.cost:.3g} {result.currency}" if each.cost is not None else ""
        tiles.append(Tile(word, name, "; ".join(filter(None, (per_s, cost)))))
    fitting = sum(each.runs for each in result.gpus)
    text = f"Fits {fitting} of {len(result.gpus)} GPUs."
    if words:
        text += f" {', '.join(words)}."
    return Headline(
        kind="GPU comparison",
        tone="good" if result.fits else "bad",
        text=text,
        subject=result.job,
        tiles=tuple(tiles),
    )


def gpus_sections(result: GpuComparison) -> list[Section]:
    """The choice as a table and a picture."""
    notes = "; ".join(filter(None, (result.constants, *result.notes)))
    return [
        *section(
            "Which GPU",
            _bars(result),
            _table(result),
            Text(f"Predicted; constants {notes}") if notes else None,
        ),
        *section("What 10% more of a figure changes", *_effects(result)),
    ]


def _step(each: GpuEstimate) -> str:
    if not each.runs:
        return "too large"
    step = each.now or each.at_saturation
    return duration(step.seconds) + ("" if each.now else " *") if step is not None else "-"


def _largest(each: GpuEstimate) -> str:
    about = "" if each.largest_is_exact or not each.largest_batch else "~"
    return "-" if each.largest_batch is None else f"{about}{each.largest_batch}"


def _table(result: GpuComparison) -> Table | None:
    columns: list[tuple[str, Callable[[GpuEstimate], str]]] = [
        ("GPU", lambda e: e.gpu),
        ("Memory", lambda e: size(e.memory_bytes)),
        ("Job uses", lambda e: size(e.device_bytes)),
        ("Fits", lambda e: "yes" if e.fits else "smaller batch" if e.runs else "no"),
        ("Largest batch", _largest),
        ("Saturation batch", lambda e: str(e.at_saturation.batch_size) if e.at_saturation else "-"),
        ("Step", _step),
        ("Samples/s", lambda e: rate(e.samples_per_s)),
        ("Limited by", lambda e: e.now.bound if e.now is not None else "-"),
        ("Samples/J", lambda e: rate(e.samples_per_joule)),
    ]
    if result.samples is not None:
        columns.append(("Whole run", lambda e: duration(e.run_s)))
    if any(each.price_per_hour is not None for each in result.gpus):
        unit = result.currency or "unit"
        columns += [
            (f"{unit}/h", lambda e: "-" if e.price_per_hour is None else f"{e.price_per_hour:g}"),
            (f"Run ({unit})", lambda e: "-" if e.cost is None else f"{e.cost:.3g}"),
        ]
    best = {result.cheapest, result.fastest}
    return table_of(
        [name for name, _ in columns],
        [[cell(each) for _, cell in columns] for each in result.gpus],
        "The job on each GPU, the best first (*: at the saturation batch size)",
        [n for n, (name, _) in enumerate(columns) if name not in ("GPU", "Fits", "Limited by")],
        [n for n, each in enumerate(result.gpus) if each.gpu in best],
    )


def _bars(result: GpuComparison) -> Chart | None:
    shown = [each for each in result.gpus if each.samples_per_s][:_BARS]
    if len(shown) < 2:
        return None
    rows: list[dict[str, Any]] = [
        {
            "gpu": each.gpu,
            "rate": each.samples_per_s,
            "fits": "fits as it is" if each.fits else "fits with a smaller batch",
            "tip": tip(
                each.gpu,
                ("samples/s", rate(each.samples_per_s)),
                ("job uses", f"{size(each.device_bytes)} of {size(each.memory_bytes)}"),
                ("largest batch", _largest(each)),
                ("step", _step(each)),
                ("limited by", BOUNDS[each.now.bound] if each.now is not None else ""),
                ("whole run", duration(each.run_s) if each.run_s is not None else ""),
            ),
        }
        for each in sorted(shown, key=lambda each: -(each.samples_per_s or 0))
    ]
    first = rows[0]
    says = f"The fastest is {first['gpu']} with {rate(first['rate'])} samples/s (predicted)."
    names = list(dict.fromkeys(row["fits"] for row in rows))
    hue = color("fits", names, [_FITS[name] for name in names])
    spec = named_bars(rows, says, x("rate", "samples/s (predicted)"), "gpu", hue, 24)
    table = figures(
        ("GPU", "Samples/s"),
        [(each.gpu, rate(each.samples_per_s)) for each in shown],
        "Predicted throughput",
        (1,),
    )
    return Chart("Throughput of the job on each GPU", says, spec, table)


def _effects(result: GpuComparison) -> list[Table | None]:
    return [
        table_of(
            (f"10% more of {each.gpu}'s", "Value", "Step", "Largest batch"),
            [
                (
                    effect.figure,
                    effect.value,
                    percent(effect.step_change, signed=True),
                    str(effect.largest_batch) if effect.largest_batch is not None else "-",
                )
                for effect in each.effects
            ],
            f"Effect of 10% more of each figure of {each.gpu}",
            (2, 3),
        )
        for each in result.gpus
        if each.effects
    ]
