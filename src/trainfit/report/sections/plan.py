"""A plan's answer; the job on several GPUs; its prediction compared with a real run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Command,
    Headline,
    Item,
    Items,
    Section,
    Table,
    Text,
    Tile,
    Tone,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import (
    COLORS,
    NAMES,
    TIP,
    chart,
    color,
    named_bars,
    nominal,
    tip,
    values,
    x,
)
from trainfit.report.plan.facts import facts
from trainfit.report.plan.launch import change_lines
from trainfit.report.plan.real_runs import VERDICTS, difference_text, verdict_text
from trainfit.report.plan.remedies import fix_lines, fix_title
from trainfit.report.plan.speed import BOUNDS, answer, step_at
from trainfit.results.changes import LaunchPart
from trainfit.results.plan import PlanResult, run_rate
from trainfit.results.real_runs import REHEARSED, Verification
from trainfit.results.speed import GpuComparison, GpuEstimate, StepSpeed
from trainfit.results.text import GIB, count, duration, percent, rate, size, times

_STATUS: Final = {
    "set": "set",
    "kept": "kept",
    "not set": "left unset",
    "by hand": "change in the script",
    "cannot tell": "cannot tell",
}
_LOADER: Final = {
    "gpu": "keeps up with the GPU",
    "loader": "is the bottleneck",
    "unknown": "not known whether it keeps up",
}
_ORDER: Final = ("set", "by hand", "kept", "not set", "cannot tell")


def plan_headline(result: PlanResult) -> Headline:
    """Fits or not, what limits, what to run."""
    return Headline(
        kind="Plan",
        tone="good" if result.can_start else "bad",
        text=answer(result),
        limit=_limit(result),
        subject=f"{result.command} on {result.gpu}",
        commands=(Command(result.launch, "Run"),) if result.can_start else (),
        changes=tuple(change_lines(result.launch_parts)),
        tiles=_tiles(result),
    )


def command_sections(result: PlanResult) -> list[Section]:
    """Each parameter with its reason and evidence, and what decides."""
    parts = sorted(_grouped(result.launch_parts), key=lambda part: _ORDER.index(part.status))
    reasons = table_of(
        ("Parameter", "Value", "Why", "Evidence"),
        [(part.name, _value(part), part.reason or "reason not known", _evidence(part))
         for part in parts],
        "Each part of the launch command, and what was left out of it",
        marked=[place for place, part in enumerate(parts) if part.status in ("set", "by hand")],
    )  # fmt: skip
    deciding = table_of(
        ("Subject", "What decides"), [(fact.label, fact.text) for fact in facts(result)]
    )
    return section("Why these settings", reasons, deciding)


def remedy_sections(result: PlanResult) -> list[Section]:
    """What would lower the memory, and all that was tried."""
    fixes = [Item(line, "warn" if not result.fits else "plain") for line in fix_lines(result)]
    listed = Items(tuple(fixes)) if fixes else None
    return section(fix_title(result), listed, _remedies(result))


def _grouped(parts: Sequence[LaunchPart]) -> list[LaunchPart]:
    """Parts that are left out for one reason are one row."""
    groups: dict[tuple[str, ...], list[LaunchPart]] = {}
    for part in parts:
        left_out = part.status in ("not set", "cannot tell") and not part.present
        own = () if left_out else (part.name,)
        key = (part.status, part.reason, part.evidence, part.machine, *own)
        groups.setdefault(key, []).append(part)
    return [
        dataclasses.replace(group[0], name=", ".join(part.name for part in group))
        for group in groups.values()
    ]


def _limit(result: PlanResult) -> str:
    """What limits the job: the GPU's part that bounds a step, or the DataLoader."""
    step = step_at(result, result.chosen.recommended_batch or result.now.batch_size)
    parts = []
    loading, run = result.loading, run_rate(result)
    if run is not None and run.limit == "loader":
        by = times(run.step_s / run.gpu_step_s)
        parts.append(f"What limits: the DataLoader, which is {by} too slow for the GPU")
    elif step is not None:
        share = ""
        if loading is not None and loading.bottleneck == "gpu":
            share = "; the DataLoader keeps up"
        parts.append(f"What limits: {BOUNDS[step.bound]}{share}")
    if not result.fits:
        parts.insert(0, f"What limits: memory of {result.gpu} ({size(result.gpu_memory_bytes)})")
    return ". ".join(parts[:1]) + "." if parts else ""


def _tiles(result: PlanResult) -> tuple[Tile, ...]:
    chosen = result.chosen
    best = chosen.recommended_batch
    memory = result.recommended if result.recommended is not None and best else result.now.memory
    at = best if result.recommended is not None and best else result.now.batch_size
    share = memory.device_bytes / result.gpu_memory_bytes
    tone: Tone = "bad" if share > 1 else "plain"
    tiles = [
        Tile(
            "GPU memory",
            size(memory.device_bytes),
            f"{percent(share)} of {size(result.gpu_memory_bytes)}"
            + (f" at batch size {at}" if at else ""),
            min(share, 1.0),
            tone,
        )
    ]
    if chosen.largest_batch is not None:
        more = chosen.limits is not None and chosen.limits.at_least
        tiles.append(
            Tile(
                "Batch size",
                str(best or "-"),
                f"recommended; largest {'at least ' if more else ''}{chosen.largest_batch}",
            )
        )
    step = step_at(result, best or result.now.batch_size)
    if step is not None:
        tiles += _speed_tiles(result, step)
    loading = result.loading
    if loading is not None and loading.result is not None:
        settings = loading.launched or loading.result.recommended
        tiles.append(
            Tile(
                "DataLoader",
                count(settings.num_workers, "worker"),
                _LOADER[loading.bottleneck],
                tone="bad" if loading.bottleneck == "loader" else "plain",
            )
        )
    return tuple(tiles)


def _speed_tiles(result: PlanResult, step: StepSpeed) -> Iterator[Tile]:
    """Of the launched run, which may be slower than ``step``, the GPU's."""
    run = run_rate(result)
    if run is None:
        return
    low, high = step.range_s
    what = "Call" if result.inference is not None else "Step"
    least = "at least " if run.is_bound else ""
    detail = f"predicted, {duration(low)} to {duration(high)}"
    if run.limit == "loader":
        detail = f"by the DataLoader; the GPU alone {duration(run.gpu_step_s)}"
    elif run.limit != "gpu":
        detail += "; the GPU alone"
    yield Tile(what, f"{least}{duration(run.step_s)}", detail)
    if run.samples_per_s:
        epoch = f"; an epoch in {least}{duration(run.epoch_s)}" if run.epoch_s else ""
        most = "at most " if run.is_bound else ""
        yield Tile("Throughput", f"{most}{rate(run.samples_per_s)}/s", f"samples a second{epoch}")


def _value(part: LaunchPart) -> str:
    value = part.line if part.status == "by hand" else part.value
    was = f" (was {part.present})" if part.present and part.present != part.value else ""
    status = "" if part.status == "set" else _STATUS[part.status]
    return f"{value}{was}" + (f" · {status}" if status and value else status)


def _evidence(part: LaunchPart) -> str:
    return ", ".join(each for each in (part.evidence, part.machine) if each) or "-"


def _remedies(result: PlanResult) -> Table | None:
    """What was tried, with what each saves and costs."""
    remedies = result.remedies
    if remedies is None:
        return None
    tried = [each for each in remedies.items if each.status != "not applicable"]
    order = sorted(tried, key=lambda each: -(each.saved_bytes or 0))
    return table_of(
        ("Remedy", "Device memory", "Saves", "Largest batch", "Step", "Training", "How"),
        [
            (
                each.title,
                size(each.memory.device_bytes) if each.memory is not None else "-",
                size(each.saved_bytes, signed=False),
                "-" if each.largest_batch is None else str(each.largest_batch),
                percent(each.step_change, signed=True),
                each.changes_detail or each.changes,
                "; ".join(each.how) or each.reason,
            )
            for each in order
        ],
        f"All {len(order)} remedies that were tried, each alone (the step's change is predicted)",
        numeric=(1, 2, 3, 4),
        folded=True,
    )


# ---
# A job on several GPUs: the table to choose from, speed against memory, effects of figures.


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


# ---
# A prediction compared with a real run: each quantity with its stated range.


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


def _quantities_table(result: Verification) -> Table:
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
    return Chart("Predicted and measured memory", says, spec, _quantities_table(result))
