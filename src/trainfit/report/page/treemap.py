"""A treemap of memory by module (Vega)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainfit.report.page.blocks import Chart, figures
from trainfit.report.page.charts import tip, vega_chart
from trainfit.results.format import percent, size

#: Rectangles at most, and the share from which one has its own.
_MOST, _LEAST = 400, 0.0004
_ROWS: Final = 30
_NO_MODULE: Final = "(no module)"
_HEIGHT: Final = 420


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
        [(path, size(nbytes), percent(nbytes / total)) for path, nbytes in ranked[:_ROWS]],
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
