"""Memory over the step by kind, owners at the peak, by module, by batch size: charts and tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainfit.report.blocks import Chart, Facts, Snippet, Table, Text, facts, figures
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import (
    MEMORY_KINDS,
    TIP,
    Spec,
    areas,
    chart,
    color,
    hover_rule,
    memory_layers,
    stacked,
    thinned,
    tip,
    values,
    vega_chart,
    x,
    y,
)
from trainfit.report.notes import short_place
from trainfit.results.memory import BatchLaw, MemoryReport, Owner, StepMemory, StepMoment
from trainfit.results.plan import JobDetail, PlanResult
from trainfit.results.text import GIB, MIB, percent, share, size

# ---
# A treemap of memory by module (Vega).


#: Rectangles at most, and the share from which one has its own.
_MOST, _LEAST = 400, 0.0004
_MOST_MODULES: Final = 30
_NO_MODULE: Final = "(no module)"
_HEIGHT: Final = 420
#: What a sample adds: rows of a table at most, and the share from which one is a row.
_GROWING, _GROWING_SHARE = 6, 0.01


def treemap(modules: Mapping[str, Mapping[str, int]], colors: Mapping[str, str]) -> Chart | None:
    """``modules``: bytes by module path and kind; ``colors`` by kind. ``None`` without bytes."""
    total = sum(sum(kinds.values()) for kinds in modules.values())
    if not total:
        return None
    nodes, folded = _nodes(modules, total)
    by_top: dict[str, int] = {}
    for path, kinds in modules.items():
        top = ".".join(path.split(".")[:2]) or _NO_MODULE
        by_top[top] = by_top.get(top, 0) + sum(kinds.values())
    ranked = sorted(by_top.items(), key=lambda item: -item[1])
    most = ", ".join(f"{path} {percent(nbytes / total)}" for path, nbytes in ranked[:3])
    says = f"Most of the {size(total)} at the peak belongs to {most}."
    table = figures(
        ("Module", "At the peak", "Share"),
        [(path, size(nbytes), percent(nbytes / total)) for path, nbytes in ranked[:_MOST_MODULES]],
        "Allocated memory at the peak by module",
        (1, 2),
    )
    note = ""
    if folded:
        note = (
            f"{folded} small owners (less than {percent(_LEAST, decimals=2)} each) are drawn "
            "together with their module's others."
        )
    used = {kind for kinds in modules.values() for kind in kinds}
    hues = {kind: hue for kind, hue in colors.items() if kind in used}
    return Chart(
        "Who holds the memory at the peak: modules, by kind", says, _spec(nodes, hues, says),
        table, note,
    )  # fmt: skip


def _nodes(
    modules: Mapping[str, Mapping[str, int]], total: int
) -> tuple[list[dict[str, Any]], int]:
    """Nodes of the tree with their parents, and how many leaves were folded into others."""
    leaves = [
        (path, kind, nbytes)
        for path, kinds in modules.items()
        for kind, nbytes in kinds.items()
        if nbytes
    ]
    leaves.sort(key=lambda leaf: -leaf[2])
    kept = [leaf for leaf in leaves[:_MOST] if leaf[2] >= _LEAST * total]
    rest: dict[tuple[str, str], int] = {}
    for path, kind, nbytes in leaves[len(kept) :]:
        top = ".".join(path.split(".")[:2])
        rest[top, kind] = rest.get((top, kind), 0) + nbytes
    nodes: dict[str, dict[str, Any]] = {"": {"id": "root", "parent": None}}
    for path, kind, nbytes in kept:
        _add(nodes, path or _NO_MODULE, kind, nbytes, total)
    for (path, kind), nbytes in rest.items():
        _add(nodes, f"{path or _NO_MODULE}.(small ones)", kind, nbytes, total)
    return list(nodes.values()), len(leaves) - len(kept)


def _add(nodes: dict[str, dict[str, Any]], path: str, kind: str, nbytes: int, total: int) -> None:
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        here = ".".join(parts[:depth])
        if here not in nodes:
            above = ".".join(parts[: depth - 1])
            nodes[here] = {
                "id": f"m:{here}",
                "parent": nodes[above]["id"],
                "name": parts[depth - 1],
            }
    nodes[f"{path}\n{kind}"] = {
        "id": f"k:{path}:{kind}",
        "parent": nodes[path]["id"],
        "name": parts[-1] if len(parts) == 1 else ".".join(parts[-2:]),
        "kind": kind,
        "bytes": nbytes,
        "tip": tip(path, (kind, size(nbytes)), ("of the peak", percent(nbytes / total))),
    }


def _spec(nodes: list[dict[str, Any]], colors: Mapping[str, str], says: str) -> dict[str, Any]:
    tree = {
        "name": "tree",
        "values": nodes,
        "transform": [
            {"type": "stratify", "key": "id", "parentKey": "parent"},
            {
                "type": "treemap",
                "field": "bytes",
                "sort": {"field": "value", "order": "descending"},
                "round": True,
                "method": "squarify",
                "ratio": 1.4,
                "paddingInner": 1,
                "paddingOuter": 1,
                "size": [{"signal": "width"}, {"signal": "height - top"}],
            },
        ],
    }
    leaves = {
        "name": "leaves",
        "source": "tree",
        "transform": [{"type": "filter", "expr": "datum.kind"}],
    }
    box = {
        "x": {"field": "x0"},
        "y": {"field": "y0"},
        "x2": {"field": "x1"},
        "y2": {"field": "y1"},
    }
    rectangles = {
        "type": "rect",
        "from": {"data": "leaves"},
        "encode": {
            "enter": {
                "fill": {"scale": "color", "field": "kind"},
                "stroke": {"value": "var(--card)"},
                "tooltip": {"signal": "datum"},
            },
            "update": {**box, "fillOpacity": {"value": 0.88}, "strokeWidth": {"value": 0.5}},
            "hover": {"fillOpacity": {"value": 1}, "strokeWidth": {"value": 2}},
        },
    }
    room = "max(0, datum.x1 - datum.x0 - 8)"
    fits = "datum.x1 - datum.x0 > 42 && datum.y1 - datum.y0 > 16"
    labels = {
        "type": "text",
        "from": {"data": "leaves"},
        "interactive": False,
        "encode": {
            "enter": {
                "fill": {"value": "#fff"},
                "fontSize": {"value": 11},
                "baseline": {"value": "top"},
            },
            "update": {
                "x": {"signal": "datum.x0 + 4"},
                "y": {"signal": "datum.y0 + 4"},
                "limit": {"signal": room},
                "text": {"signal": f"{fits} ? datum.name : ''"},
            },
        },
    }
    plot = {
        "type": "group",
        "encode": {
            "update": {
                "y": {"signal": "top"},
                "width": {"signal": "width"},
                "height": {"signal": "height - top"},
            }
        },
        "marks": [rectangles, labels],
    }
    legend = {
        "fill": "color",
        "orient": "none",
        "legendX": 0,
        "legendY": 0,
        "direction": "horizontal",
        "columns": {"signal": "across"},
        "labelColor": "var(--text)",
        "labelFontSize": 12,
        "symbolType": "square",
    }
    rows = f"ceil({len(colors)} / across)"
    return vega_chart(
        _HEIGHT,
        says,
        signals=[
            {"name": "across", "update": "max(2, floor(width / 125))"},
            {"name": "top", "update": f"12 + 16 * {rows}"},
        ],
        data=[tree, leaves],
        scales=[
            {
                "name": "color",
                "type": "ordinal",
                "domain": list(colors),
                "range": list(colors.values()),
            }
        ],
        legends=[legend],
        marks=[plot],
    )


#: Owners in the table of the peak, and on hover; rows of a chart's table.
_OWNERS, _HOVER, _ROWS = 12, 8, 24
_ACROSS: Final = "the step's allocations and frees, in order (%)"
# -- over the step -----------------------------------------------------------------------------


def peak_text(memory: StepMemory | None, capacity: int) -> str:
    """When the peak is, and what most of it consists of."""
    if memory is None:
        return ""
    moment = memory.moments[memory.peak]
    by_kind = sorted(moment.by_kind_bytes.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(
        f"{MEMORY_KINDS[kind][0]} {percent(nbytes / memory.peak_bytes)}" for kind, nbytes in by_kind
    )
    share = percent(memory.peak_bytes / capacity)
    return (
        f"Allocated memory peaks in the {moment.phase} phase at {size(memory.peak_bytes)} "
        f"({share} of the GPU): {most}."
    )


def kind_title(kind: str) -> str:
    """The name of a kind of memory."""
    return MEMORY_KINDS.get(kind, (kind, ""))[0]


def over_step(memory: StepMemory) -> Chart:
    """A stacked area by kind; the peak is marked, with its owners on hover."""
    unit, name = (GIB, "GiB") if memory.peak_bytes >= GIB else (MIB, "MiB")
    kinds = [
        kind for kind in MEMORY_KINDS if any(m.by_kind_bytes.get(kind) for m in memory.moments)
    ]
    titles = [kind_title(kind) for kind in kinds]
    places = [moment.event / max(1, memory.events - 1) * 100 for moment in memory.moments]
    rows = stacked(
        [
            (
                place,
                {kind_title(kind): nbytes / unit for kind, nbytes in moment.by_kind_bytes.items()},
            )
            for place, moment in zip(places, memory.moments, strict=True)
        ],
        titles,
    )
    wide = [
        {"at": place, "tip": _moment_tip(moment)}
        for place, moment in zip(places, memory.moments, strict=True)
    ]
    peak = memory.moments[memory.peak]
    mark = {
        "at": places[memory.peak],
        "top": memory.peak_bytes / unit,
        "label": f"peak {size(memory.peak_bytes)}",
        "tip": tip(f"Peak {size(memory.peak_bytes)}: owners", *_owner_rows(memory.owners)),
    }
    says = (
        f"Allocated memory over step {memory.step}, by kind; its peak is {size(memory.peak_bytes)}."
    )
    spec = chart(300, says, layer=[
        *_phase_layers(memory),
        areas(
            rows,
            x("at", _ACROSS, scale={"domain": [0, 100], "nice": False}),
            y("from", f"allocated ({name})", scale={"domainMin": 0}),
            color("name", titles, [MEMORY_KINDS[kind][1] for kind in kinds]),
            "step-after",
        ),
        hover_rule(wide, _ACROSS),
        *_peak_layers(mark),
    ])  # fmt: skip
    shown = thinned(range(len(memory.moments)), _ROWS, (memory.peak,))
    moments = [memory.moments[place] for place in shown]
    table = figures(
        ("Events", "Phase", "Allocated", *map(kind_title, kinds)),
        [
            (str(m.event), m.phase, size(m.allocated_bytes),
             *(size(m.by_kind_bytes.get(kind, 0)) for kind in kinds))
            for m in moments
        ],
        "Allocated memory over the step",
        (0, *range(2, 3 + len(kinds))),
        [place for place, m in enumerate(moments) if m is peak],
    )  # fmt: skip
    note = ""
    if memory.events > len(memory.moments):
        each = memory.events / len(memory.moments)
        note = (
            f"{memory.events} allocations and frees are drawn as {len(memory.moments)} points, "
            f"each the largest of about {each:.0f}: no maximum is left out."
        )
    return Chart("Allocated memory over the step, by kind", says, spec, table, note)


def _moment_tip(moment: StepMoment) -> list[list[str]]:
    parts = sorted(moment.by_kind_bytes.items(), key=lambda item: -item[1])
    return tip(
        f"{size(moment.allocated_bytes)} in {moment.phase}",
        *((kind_title(kind), size(nbytes)) for kind, nbytes in parts),
    )


def _phase_layers(memory: StepMemory) -> list[Spec]:
    """Lines where a phase begins, with its name at the top."""
    begins: list[dict[str, Any]] = []
    for moment in memory.moments:
        if not begins or begins[-1]["phase"] != moment.phase:
            begins.append(
                {"at": moment.event / max(1, memory.events - 1) * 100, "phase": moment.phase}
            )
    # Between two modules an operator of another phase can come: names only where there is room.
    ends = [each["at"] for each in begins[1:]] + [100.0]
    named = [each for each, end in zip(begins, ends, strict=True) if end - each["at"] >= 8]
    position = x("at", _ACROSS)
    return [
        {
            "data": values(named),
            "mark": {"type": "rule", "strokeDash": [3, 3], "color": "var(--muted)"},
            "encoding": {"x": position},
        },
        {
            "data": values(named),
            "mark": {"type": "text", "align": "left", "dx": 4, "dy": -6, "color": "var(--muted)"},
            "encoding": {"x": position, "y": {"value": 0}, "text": {"field": "phase"}},
        },
    ]


def _peak_layers(mark: Mapping[str, Any]) -> list[Spec]:
    right = mark["at"] > 70
    place = {"x": x("at", _ACROSS), "y": {"field": "top", "type": "quantitative"}}
    return [
        {
            "data": values([mark]),
            "mark": {"type": "point", "filled": True, "size": 90, "color": "var(--text)", **TIP},
            "encoding": place,
        },
        {
            "data": values([mark]),
            "mark": {
                "type": "text",
                "align": "right" if right else "left",
                "dx": -9 if right else 9,
                "dy": -5,
                "fontWeight": "bold",
                "fontSize": 12,
            },
            "encoding": {**place, "text": {"field": "label"}},
        },
    ]


def _owner_rows(owners: Sequence[Owner]) -> list[tuple[str, str]]:
    rows = [
        (f"{owner.module or '(no module)'} · {kind_title(owner.kind)}", size(owner.nbytes))
        for owner in owners[:_HOVER]
    ]
    left = sum(owner.nbytes for owner in owners[_HOVER:])
    return rows + ([(f"{len(owners) - _HOVER} others", size(left))] if left else [])


def owners(memory: StepMemory) -> Table | None:
    total = memory.peak_bytes
    shown = memory.owners[:_OWNERS]
    return table_of(
        ("Owner at the peak", "Kind", "Memory", "Share", "Largest by", "Line"),
        [
            (
                owner.module or "(no module)",
                kind_title(owner.kind),
                size(owner.nbytes),
                percent(owner.nbytes / total),
                owner.operator,
                short_place(owner.line) if owner.line else "-",
            )
            for owner in shown
        ],
        f"The {len(shown)} largest of {len(memory.owners)} owners of the peak",
        (2, 3),
    )


# -- by module ---------------------------------------------------------------------------------


def modules_chart(memory: StepMemory) -> Chart | None:
    """Who holds the memory at the peak, as a treemap."""
    sizes: dict[str, dict[str, int]] = {}
    for owner in memory.owners:
        kinds = sizes.setdefault(owner.module, {})
        kinds[kind_title(owner.kind)] = kinds.get(kind_title(owner.kind), 0) + owner.nbytes
    return treemap(sizes, dict(MEMORY_KINDS.values()))


# -- by batch size -----------------------------------------------------------------------------


def by_batch(result: PlanResult, detail: JobDetail) -> Chart | None:
    """Device memory over the batch size, with the capacity of several GPUs."""
    points = detail.batches
    if len(points) < 2:
        return None
    top = max(point.device_bytes for point in points)
    limits = {
        name: nbytes
        for name, nbytes in detail.gpu_bytes.items()
        if nbytes <= 1.1 * top or name == result.gpu
    }
    largest, best = result.chosen.largest_batch, result.chosen.recommended_batch
    says = (
        f"Device memory grows from {size(points[0].device_bytes)} at batch size "
        f"{points[0].batch_size} to {size(points[-1].device_bytes)} at {points[-1].batch_size}; "
        f"{result.gpu} has {size(result.gpu_memory_bytes)}."
    )
    if largest:
        says += f" The largest batch is {largest}."
    marks = [
        {"batch": batch, "label": f"{word} {batch}"}
        for word, batch in (("recommended", best), ("largest", largest))
        if batch and batch <= points[-1].batch_size
    ]
    table = figures(
        ("Batch size", "Allocated", "Reserved", "Device", "Fits on"),
        [
            (
                str(point.batch_size),
                size(point.allocated_bytes),
                size(point.reserved_bytes),
                size(point.device_bytes),
                ", ".join(n for n, b in detail.gpu_bytes.items() if point.device_bytes <= b) or "-",
            )
            for point in points
        ],
        "Memory by batch size, with PyTorch's allocator simulated at each (no GPU limit)",
        (0, 1, 2, 3),
    )
    spec = chart(300, says, layer=memory_layers(points, limits, marks, result.gpu))
    return Chart("Memory against batch size, and what GPUs have", says, spec, table)


# ---
# How memory grows with the batch size.


def memory_growth(report: MemoryReport) -> list[Facts | Table | Text | Snippet | None]:
    """The linear model, what grows, figures for batch sizes, and where the model ends."""
    law = report.batches
    if law is None and report.step is not None and report.step.is_whole:
        text = "the job has no batch size: each step is of the same tensors, all samples at once"
        return [Text(text, detail=9)]
    if law is None:
        words, *commands = _missing(report)
        return [Text(words, detail=9), *(Snippet(command, detail=9) for command in commands)]
    low, high = law.batches
    if law.law == "none":
        return [Text(f"no linear model from batch sizes {low} and {high}: {law.reason}", detail=9)]
    return [
        facts(
            ("device", f"{size(law.device_base_bytes)} + batch x "
                       f"{size(round(law.device_per_sample_bytes))} (least squares of the figures "
                       f"from the recordings at {low} and {high})", 9),
            ("allocated", f"{size(law.allocated_base_bytes)} + batch x "
                          f"{size(round(law.allocated_per_sample_bytes))} (what is at the peak of "
                          f"{high})"),
        ),
        _grown("Kind", law.per_sample_by_kind_bytes, law.allocated_per_sample_bytes),
        _grown("Module", law.per_sample_by_module_bytes, law.allocated_per_sample_bytes),
        _points(law),
        facts(*(("where it ends", line) for line in _ends(law))),
    ]  # fmt: skip


def _missing(report: MemoryReport) -> list[str]:
    """What figures for other batch sizes need, and the commands that give it, where known."""
    if report.second_run:
        return [
            "other batch sizes need a second recording: record another batch size and give both:",
            report.second_run,
            f"trainfit memory {report.file} {shlex.quote(report.second_file)}",
        ]
    return [
        "other batch sizes need a second recording: record the script at a second batch size with "
        "`trainfit simulate --batch-size N` and give both recordings (with --batch-size A,B "
        "if they do not contain theirs)"
    ]


def _grown(what: str, parts: Mapping[str, float], total: float) -> Table | None:
    rows: list[tuple[str, str, str]] = []
    rest = 0.0
    for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
        if len(rows) >= _GROWING or nbytes < _GROWING_SHARE * total:
            rest += nbytes
            continue
        title = kind_title(name) if what == "Kind" else name or "outside of modules"
        rows.append((title, size(round(nbytes)), share(nbytes, total)))
    if round(rest):
        rows.append(("others", size(round(rest)), ""))
    return table_of((what, "A sample adds", "Share"), rows, numeric=(1, 2))


def _points(law: BatchLaw) -> Table | None:
    rows = []
    for point in law.points:
        off = (point.device_bytes - point.line_bytes) / max(point.line_bytes, 1)
        rows.append(
            (
                str(point.batch_size),
                *map(size, (point.allocated_bytes, point.reserved_bytes, point.device_bytes)),
                f"{100 * off:+.1f}%",
                point.where + ("" if point.fits else " (does not fit)"),
            )
        )
    head = ("Batch", "Allocated", "Reserved", "Device", "- line", "Peak in")
    return table_of(head, rows, numeric=range(5))


def _ends(law: BatchLaw) -> Iterator[str]:
    """Sentences on where the linear model ends."""
    for move in law.moves:
        yield (
            f"from batch size {move.batch_size} on the peak is in the {move.after}, below it in "
            f"the {move.before}"
        )
    if law.largest_jump_at is not None:
        yield (
            f"reserved memory goes up in steps: the allocator requests whole segments and reuses "
            f"what it has; the largest step near {law.batches[1]} is "
            f"{size(law.largest_jump_bytes)}, from batch size {law.largest_jump_at - 1} to "
            f"{law.largest_jump_at}"
        )
    if law.largest_batch:
        yield f"the largest batch on this GPU is {law.largest_batch}"
    elif law.largest_batch == 0:
        yield "not even one sample fits this GPU"
