"""Time, cost and memory of a sweep's cells, drawn with their Pareto front; how cells are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import PAGE, Chart, figures
from trainfit.report.charts import COLORS, TIP, chart, color, tip, values, x, y
from trainfit.results.runs.sweep import SweepCell, SweepResult
from trainfit.results.text import GIB, count, duration, rate, short, size, three_digits

#: Characters of a command's name.
NAME: Final = 32
_FRONT: Final = {"Pareto front": COLORS[1], "others": COLORS[6]}


def answered(result: SweepResult) -> list[SweepCell]:
    """The cells that have a result."""
    return [cell for cell in result.cells if not cell.failure]


def cell_name(cell: SweepCell, result: SweepResult) -> str:
    """The machine, with what tells the cell from others on it."""
    several = len({each.command for each in result.cells}) > 1
    name = [short(cell.command, NAME)] if several else []
    return ", ".join([cell.gpu, *name, *(f"{key} {value}" for key, value in cell.values.items())])


def figure(value: float | None) -> str:
    """Three digits; a dash where it is not known."""
    return "-" if value is None else three_digits(value)


def front_chart(result: SweepResult) -> Chart | None:
    """Time against cost (or memory, where no price is known); the front is drawn as a line."""
    cells = [cell for cell in answered(result) if cell.fits and cell.samples_per_s]
    if len(cells) < 2:
        return None
    priced = all(cell.samples_per_unit for cell in cells)
    unit = result.currency or "unit"
    run = all(cell.run_s for cell in cells)
    across = "hours of the run" if run else "hours per million samples"
    if not priced:
        up = "device memory of a GPU (GiB)"
    else:
        up = f"{unit} for the run" if run else f"{unit} per million samples"
    rows = [_point(cell, result, priced=priced, run=run) for cell in cells]
    front = sorted((row for row in rows if row["part"] == "Pareto front"), key=lambda r: r["time"])
    says = (
        f"{count(len(front), 'cell')} of {len(cells)} on the Pareto front of time, "
        f"{'cost and memory' if priced else 'and memory'} (predicted)."
    )
    hue = color("part", list(_FRONT), list(_FRONT.values()))
    place = {"x": x("time", across, scale={"zero": False}), "y": y("height", up)}
    spec = chart(
        300,
        says,
        layer=[
            {
                "data": values(front),
                "mark": {"type": "line", "strokeDash": [4, 3], "color": COLORS[1]},
                "encoding": place,
            },
            {
                "data": values(rows),
                "mark": {"type": "point", "filled": True, "opacity": 0.85, **TIP},
                "encoding": {
                    **place,
                    "color": hue,
                    "size": {
                        "field": "memory",
                        "type": "quantitative",
                        "legend": None,
                        "scale": {"range": [40, 400]},
                    },
                },
            },
        ],
    )
    table = figures(
        ("Cell", across, up, "memory (GiB)", "on the front"),
        [
            (
                str(row["name"]),
                three_digits(row["time"]),
                three_digits(row["height"]),
                three_digits(row["memory"]),
                "yes" if row["part"] == "Pareto front" else "",
            )
            for row in rows
        ],
        "Time, cost and memory",
        (1, 2, 3),
    )
    return Chart(
        "Time, cost and memory of the cells",
        says,
        spec,
        table,
        note="A point's size is its memory; the line joins the front in the order of time.",
        detail=PAGE,
    )


def _point(cell: SweepCell, result: SweepResult, *, priced: bool, run: bool) -> dict[str, Any]:
    million = 1e6 / (cell.samples_per_s or 1.0) / 3600
    time = cell.run_s / 3600 if run and cell.run_s else million
    memory = (cell.device_bytes or 0) / GIB
    height = memory
    if priced and cell.samples_per_unit:
        height = cell.cost if run and cell.cost else 1e6 / cell.samples_per_unit
    lines: Sequence[tuple[str, str]] = (
        ("samples/s", rate(cell.samples_per_s)),
        ("the run", duration(cell.run_s) if cell.run_s else ""),
        ("cost", f"{figure(cell.cost)} {result.currency}" if cell.cost is not None else ""),
        ("memory", size(cell.device_bytes) if cell.device_bytes else ""),
    )
    name = cell_name(cell, result)
    return {
        "name": name,
        "time": time,
        "height": height,
        "memory": memory,
        "part": "Pareto front" if cell.on_front else "others",
        "tip": tip(name, *lines),
    }
