"""Charts (Vega-Lite): colours, axes, hovering; layers over the batch size, lanes of findings.

Colours are CSS variables of the page, so that a chart follows its light, dark and printed forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from trainfit.findings.out_of_memory import KINDS
from trainfit.report.blocks import TONES
from trainfit.report.watch import evidence_text, title
from trainfit.results.findings import Finding
from trainfit.results.memory import BatchMemory
from trainfit.results.text import GIB, size
from trainfit.results.watch import TimelinePoint

Spec = dict[str, Any]
_T = TypeVar("_T")

_SCHEMA: Final = "https://vega.github.io/schema/vega-lite/v6.json"
_VEGA: Final = "https://vega.github.io/schema/vega/v6.json"

#: The page's colours as values, for a picture that stands alone (page.css has the same).
LIGHT: Final[Mapping[str, str]] = {
    "--c1": "#3568d4",
    "--c2": "#e0822a",
    "--c3": "#2b9a68",
    "--c4": "#8a57cf",
    "--c5": "#cf4a64",
    "--c6": "#1d98ab",
    "--c7": "#8792a2",
    "--c8": "#a5804f",
    "--c9": "#b5489a",
    "--c10": "#8a8f1f",
    "--c11": "#7a4b3a",
    "--good": "#177a4c",
    "--bad": "#c22f3d",
    "--warn": "#935500",
    "--text": "#1b2330",
    "--muted": "#5a6576",
    "--grid": "#e4e8ee",
    "--card": "#ffffff",
}
COLORS: Final = tuple(f"var(--c{number})" for number in range(1, 12))

#: Kinds of memory in the order in which they are stacked, each with its colour.
MEMORY_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    kind: (KINDS[kind], COLORS[number])
    for kind, number in (
        *(("parameter", 0), ("buffer", 7), ("optimizer_state", 3), ("gradient", 2)),
        *(("kv_cache", 8), ("data", 9), ("bucket", 10)),
        *(("input", 6), ("activation", 1), ("temporary", 4), ("workspace", 5)),
    )
}


def config() -> Spec:
    """How all charts look."""
    axis = {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11,
        "gridColor": "var(--grid)",
        "domainColor": "var(--grid)",
        "tickColor": "var(--grid)",
        "labelOverlap": True,
        "labelFlush": False,
    }
    legend = {
        "labelColor": "var(--text)",
        "titleColor": "var(--muted)",
        "labelFontSize": 12,
        "orient": "top",
        "title": None,
        "symbolType": "square",
        "columns": {"signal": "max(width < 260 ? 1 : 2, floor(width / 130))"},
        "labelLimit": 260,
    }
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"tickCount": {"signal": "ceil(width / 70)"}},
        "legend": legend,
        "bar": {"color": COLORS[0]},
        "text": {"color": "var(--text)"},
        "rule": {"color": "var(--muted)"},
    }


def chart(height: int, description: str, **parts: Any) -> Spec:
    """A chart as wide as its place on the page."""
    return {
        "$schema": _SCHEMA,
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": config(),
        **parts,
    }


def vega_chart(height: int, description: str, **parts: Any) -> Spec:
    """One in Vega itself; ``width`` is a signal that follows its place."""
    width = "isFinite(containerSize()[0]) && containerSize()[0] > 0 ? containerSize()[0] : 760"
    return {
        "$schema": _VEGA,
        "description": description,
        "height": height,
        "autosize": "none",
        "config": {"background": "transparent"},
        **{key: part for key, part in parts.items() if key != "signals"},
        "signals": [
            {
                "name": "width",
                "init": width,
                "on": [{"events": "window:resize", "update": width}],
            },
            *parts.get("signals", ()),
        ],
    }


def values(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """Data of a chart, numbers with as many digits as can be seen."""
    return {"values": [{key: _short(value) for key, value in row.items()} for row in rows]}


def x(field: str, title: str | None = None, **more: Any) -> Spec:
    """A position along an axis of numbers."""
    axis = {"title": title, "grid": False, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "axis": axis, **more}


def y(field: str, title: str | None = None, **more: Any) -> Spec:
    """A height on an axis of numbers."""
    axis = {"title": title, "tickCount": 5, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "axis": axis, **more}


def nominal(field: str, **more: Any) -> Spec:
    """A name; in the order of the data."""
    return {"field": field, "type": "nominal", "sort": None, **more}


#: How wide the names along an axis may be: a part of the chart.
NAMES: Final[Spec] = {
    "title": None,
    "labelLimit": {"signal": "(containerSize()[0] || 860) * 0.36"},
}


def color(field: str, names: Sequence[str], colors: Sequence[str], **more: Any) -> Spec:
    """A colour by name."""
    scale = {"domain": list(names), "range": list(colors)}
    return {"field": field, "type": "nominal", "scale": scale, **more}


def tip(title: str, *rows: tuple[str, str]) -> list[list[str]]:
    """What is shown on hover: a title, and labels with their texts."""
    return [[title, ""], *([label, text] for label, text in rows if text)]


#: A mark's properties that show its datum's ``tip``.
TIP: Final[Mapping[str, Any]] = {"tooltip": {"content": "data"}}


def hover_rule(data: Sequence[Mapping[str, Any]], title: str) -> Spec:
    """A vertical line at the point next to the pointer, with that point's ``tip``; a point lies
    ``at`` a place."""
    return {
        "data": values(data),
        "params": [
            {
                "name": "hover",
                "select": {
                    "type": "point",
                    "fields": ["at"],
                    "nearest": True,
                    "on": "pointerover",
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "rule", "strokeWidth": 1, **TIP},
        "encoding": {
            "x": x("at", title),
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
        },
    }


def parts_bar(
    rows: Sequence[Mapping[str, Any]], says: str, title: str, whole: str, hue: Spec
) -> Spec:
    """One bar of the parts of a time: each row has its ``ms`` and ``tip``; ``whole`` is the field
    of what all are parts of, ``hue`` their colour."""
    return chart(
        44,
        says,
        data=values(rows),
        mark={"type": "bar", **TIP},
        encoding={
            "x": x("ms", title, stack="zero"),
            "y": nominal(whole, axis=None),
            "color": hue,
        },
    )


def named_bars(
    rows: Sequence[Mapping[str, Any]], says: str, across: Spec, name: str, hue: Spec, each: int
) -> Spec:
    """A bar for each row, in their order, ``each`` pixels high; ``name`` is its name's field."""
    return chart(
        each * len(rows) + 10,
        says,
        data=values(rows),
        mark={"type": "bar", "cornerRadiusEnd": 2, **TIP},
        encoding={"x": across, "y": nominal(name, axis=NAMES), "color": hue},
    )


def stacked(
    points: Sequence[tuple[float, Mapping[str, float]]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of areas one on the other: of each point its place ``at`` and for each name a row with
    ``from`` and ``to``."""
    rows: list[dict[str, Any]] = []
    for at, parts in points:
        top = 0.0
        for name in names:
            below, top = top, top + parts.get(name, 0.0)
            rows.append({"at": at, "name": name, "from": below, "to": top})
    return rows


def areas(rows: Sequence[Mapping[str, Any]], across: Spec, up: Spec, hue: Spec, step: str) -> Spec:
    """The layer of rows of :func:`stacked`; ``step`` is how points are connected."""
    return {
        "data": values(rows),
        "mark": {"type": "area", "interpolate": step, "opacity": 0.9},
        "encoding": {"x": across, "y": up, "y2": {"field": "to"}, "color": hue},
    }


def thinned(items: Sequence[_T], most: int, keep: Sequence[int] = ()) -> list[_T]:
    """About ``most`` of the items at most, evenly spread: the first, the last and those at ``keep``
    are among them."""
    if len(items) <= most:
        return list(items)
    places = {round(n * (len(items) - 1) / (most - 1)) for n in range(most)}
    return [items[place] for place in sorted(places | set(keep))]


#: Pixels of a picture of a chart whose width is the page's in the page.
_WIDTH: Final = 860


def standalone(spec: Mapping[str, Any]) -> Spec:
    """For a picture of its own: a width, and colours in the place of the page's variables."""
    found: Spec = _colored(dict(spec))
    if found.get("width") == "container":
        found["width"] = _WIDTH
    found.setdefault("config", {})["background"] = LIGHT["--card"]
    return found


def _colored(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("var(--"):
        return LIGHT[value[4:-1]]
    if isinstance(value, Mapping):
        return {key: _colored(each) for key, each in value.items()}
    return [_colored(each) for each in value] if isinstance(value, list) else value


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---
# Layers of charts over the batch size: memory with the capacity of GPUs, and lines with names.


_BATCH: Final = "batch size"


def batch_marks(
    marks: Sequence[Mapping[str, Any]], most: int, title: str, **position: Any
) -> list[Spec]:
    """Lines at batch sizes, with their names on the side with more room; ``most`` is at the right
    end."""
    layers: list[Spec] = [
        {
            "data": values(marks),
            "mark": {"type": "rule", "color": "var(--good)", "strokeWidth": 1.5},
            "encoding": {"x": x("batch", title, **position)},
        }
    ]
    for lane, mark in enumerate(marks):
        left = mark["batch"] <= most / 2
        look = {"align": "left" if left else "right", "dx": 5 if left else -5}
        layers.append(
            {
                "data": values([mark]),
                "mark": {
                    "type": "text",
                    "dy": -7 - 14 * lane,
                    "fontWeight": "bold",
                    "color": "var(--good)",
                    **look,
                },
                "encoding": {
                    "x": x("batch", title, **position),
                    "y": {"value": "height"},
                    "text": {"field": "label"},
                },
            }
        )
    return layers


def memory_layers(
    points: Sequence[BatchMemory],
    limits: Mapping[str, int],
    marks: Sequence[Mapping[str, Any]],
    gpu: str,
) -> list[Spec]:
    """Device and allocated memory of ``points``, a line for each GPU of ``limits`` (bytes by name;
    ``gpu`` is the planned one), and lines at the batch sizes of ``marks``."""
    names = ("device", "allocated")
    rows = [
        {
            "batch": point.batch_size,
            "name": name,
            "gib": getattr(point, f"{name}_bytes") / GIB,
            "tip": tip(
                f"batch size {point.batch_size}",
                ("allocated", size(point.allocated_bytes)),
                ("reserved", size(point.reserved_bytes)),
                ("device", size(point.device_bytes)),
            ),
        }
        for name in names
        for point in points
    ]
    lines = [{"gpu": name, "gib": nbytes / GIB, "planned": name == gpu,
              "tip": tip(name, ("memory", size(nbytes)))}
             for name, nbytes in limits.items()]  # fmt: skip
    height = y("gib", "memory (GiB)", scale={"domainMin": 0})
    limit_color = {"condition": {"test": "datum.planned", "value": "var(--bad)"},
                   "value": "var(--muted)"}  # fmt: skip
    limit_lines: list[Spec] = [
        {
            "data": values(lines),
            "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 1.5, **TIP},
            "encoding": {"y": height, "color": limit_color},
        },
        {
            "data": values(lines),
            "mark": {"type": "text", "align": "left", "dx": 4, "dy": -7, "fontSize": 11},
            "encoding": {
                "y": height,
                "x": {"value": 0},
                "text": {"field": "gpu"},
                "color": limit_color,
            },
        },
    ]
    return [
        *(limit_lines if lines else ()),
        {
            "data": values(rows),
            "mark": {"type": "line", "point": {"size": 45}, **TIP},
            "encoding": {
                "x": x("batch", _BATCH, scale={"nice": False, "zero": True}),
                "y": height,
                "color": color("name", names, ("var(--c1)", "var(--c2)")),
            },
        },
        *batch_marks(marks, points[-1].batch_size, _BATCH),
    ]


# ---
# Lanes above a chart over time: from when to when each finding is about.


#: Pixels of a lane.
LANE: Final = 24
#: Findings with a lane.
_LANES: Final = 6
_HUES: Final = {"bad": "var(--bad)", "warn": "var(--warn)", "plain": "var(--muted)"}


def finding_lanes(
    findings: Sequence[Finding], timeline: Sequence[TimelinePoint]
) -> list[dict[str, Any]]:
    """Findings with their place in time: of those about certain steps, from the first to the
    last."""
    begin, end = timeline[0].time_s, timeline[-1].time_s
    lanes = []
    for finding in findings[:_LANES]:
        first = _time_of(finding.first_step, timeline, begin)
        last = _time_of(finding.last_step, timeline, end)
        rows = (
            ("evidence", "; ".join(map(evidence_text, finding.evidence[:3]))),
            ("fix", finding.fix.action),
        )
        lanes.append(
            {
                "from": first,
                "to": last,
                "title": title(finding),
                "tone": TONES[finding.severity],
                "tip": tip(title(finding), *rows),
            }
        )
    return lanes


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
