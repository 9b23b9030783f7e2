"""Layers of charts over the batch size: memory with the capacity of GPUs, and lines with names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainfit.report.page.charts import TIP, Spec, color, tip, values, x, y
from trainfit.results.format import GIB, size
from trainfit.results.memory.step_memory import BatchMemory

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
            "batch": each.batch_size,
            "name": name,
            "gib": getattr(each, f"{name}_bytes") / GIB,
            "tip": tip(
                f"batch size {each.batch_size}",
                ("allocated", size(each.allocated_bytes)),
                ("reserved", size(each.reserved_bytes)),
                ("device", size(each.device_bytes)),
            ),
        }
        for name in names
        for each in points
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
