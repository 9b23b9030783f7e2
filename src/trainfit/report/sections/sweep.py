"""A sweep: the cheapest and the fastest of its cells, their table, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    PAGE,
    WHOLE,
    Chart,
    Facts,
    Headline,
    Subject,
    Table,
    Tile,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, chart, color, tip, values, x, y
from trainfit.report.gpu_counts import as_fast
from trainfit.report.notes import plain
from trainfit.results.runs.sweep import SweepCell, SweepResult
from trainfit.results.text import GIB, count, duration, rate, short, size, three_digits, with_prefix

#: Characters of a command's name.
NAME: Final = 32
_FRONT: Final = {"Pareto front": COLORS[1], "others": COLORS[6]}


# ---
# Time, cost and memory of a sweep's cells, drawn with their Pareto front; how cells are named.


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


# ---
# The subject.


def sweep_subject(result: SweepResult) -> Subject:
    """What is best, then a row for each cell, then why others have none."""
    fitting = sum(bool(cell.fits) for cell in result.cells)
    failed = sum(bool(cell.failure) for cell in result.cells)
    fits = f"{fitting or 'none'} of {count(len(result.cells), 'cell')} fit"
    best = _best(result)
    limit = [*best[1:], fits] if best else []
    if failed:
        limit.append(f"{failed} without a result")
    answer = best[0] if best else fits[0].upper() + fits[1:]
    return Subject(
        Headline(
            kind="Sweep",
            tone="good" if result.fits else "bad",
            text=answer,
            limit="; ".join(limit),
            subject=f"{result.sweep}, by `trainfit {result.verb}`",
            tiles=_tiles(result, fitting),
        ),
        (
            *section("Cells", _table(result), front_chart(result)),
            *section("Without a result", _failures(result)),
            *section("Launch commands", _launches(result)),
            *section("The columns", _legend(result)),
        ),
        tuple(plain(result.notes)),
    )


def _best(result: SweepResult) -> list[str]:
    """The cheapest, the best for the money and the fastest, each said once."""
    unit = result.currency or "unit"
    rates = [cell.samples_per_s for cell in result.cells]
    alike = "" if result.fastest is None else as_fast(rates[result.fastest], rates)
    said: dict[int, list[str]] = {}
    for what, place in (
        ("cheapest", result.cheapest),
        (f"best per {unit}", result.best_per_unit),
        (f"fastest{alike}", result.fastest),
    ):
        if place is not None:
            said.setdefault(place, []).append(what)
    lines = [
        f"{' and '.join(words)}: {_verdict(result.cells[place], result)}"
        for place, words in said.items()
    ]
    return [line[0].upper() + line[1:] if not n else line for n, line in enumerate(lines)]


def _verdict(cell: SweepCell, result: SweepResult) -> str:
    parts = [cell_name(cell, result)]
    if cell.samples_per_s is not None:
        parts.append(f"{rate(cell.samples_per_s)} samples/s")
    if cell.run_s is not None:
        parts.append(f"the run in {duration(cell.run_s)}")
    if cell.cost is not None:
        parts.append(f"for {three_digits(cell.cost)} {result.currency}".rstrip())
    elif cell.price_per_hour is not None:
        parts.append(f"{three_digits(cell.price_per_hour)} {result.currency or 'unit'}/h")
    return ", ".join(parts)


def _tiles(result: SweepResult, fitting: int) -> tuple[Tile, ...]:
    tiles = [Tile("Fits", str(fitting), f"of {len(result.cells)}")]
    for word, place in (("Cheapest", result.cheapest), ("Fastest", result.fastest)):
        if place is not None:
            cell = result.cells[place]
            per_s = f"{rate(cell.samples_per_s)} samples/s" if cell.samples_per_s else ""
            cost = ""
            if cell.cost is not None:
                cost = f"{three_digits(cell.cost)} {result.currency}".rstrip()
            tiles.append(Tile(word, cell.gpu, "; ".join(filter(None, (per_s, cost)))))
    return tuple(tiles)


def _table(result: SweepResult) -> Table | None:
    cells, unit = answered(result), result.currency or "unit"
    columns: list[tuple[str, Callable[[SweepCell], str]]] = [("Machine", lambda c: c.gpu)]
    if len({cell.command for cell in cells}) > 1:
        columns.append(("Command", lambda c: short(c.command, NAME)))
    for name in dict.fromkeys(name for cell in cells for name in cell.values):
        columns.append((name, lambda c, name=name: c.values.get(name, "-")))  # type: ignore[misc]
    texts = len(columns)
    if not any("batch_size" in cell.values for cell in cells):
        columns.append(("Batch", lambda c: "-" if c.batch_size is None else str(c.batch_size)))
    columns += [
        ("Memory", lambda c: "-" if c.device_bytes is None else size(c.device_bytes)),
        ("Step", _step),
        ("Samples/s", lambda c: rate(c.samples_per_s) if c.samples_per_s else "-"),
    ]
    if any(cell.run_s is not None for cell in cells):
        columns.append(("The run", lambda c: duration(c.run_s) if c.run_s else "-"))
    if any(cell.price_per_hour is not None for cell in cells):
        columns += [
            (f"{unit}/h", lambda c: figure(c.price_per_hour)),
            (f"per {unit}", lambda c: _many(c.samples_per_unit)),
        ]
    if any(cell.cost is not None for cell in cells):
        columns.append((f"Run ({unit})", lambda c: figure(c.cost)))
    columns.append(("Front", lambda c: "*" if c.on_front else ""))
    best = {result.cheapest, result.fastest, result.best_per_unit}
    return table_of(
        [name for name, _ in columns],
        [[cell for _, make in columns for cell in (make(sweep_cell),)] for sweep_cell in cells],
        "The best first (predicted; *: on the Pareto front of time, cost and memory)",
        range(texts, len(columns) - 1),
        [place for place in range(len(cells)) if place in best],
        spare=(f"{unit}/h", f"per {unit}", "Step", "Batch"),
        detail=5,
        noun="cell",
    )


def _step(cell: SweepCell) -> str:
    if not cell.fits:
        return "too large"
    return "-" if cell.step_s is None else duration(cell.step_s)


def _many(value: float | None) -> str:
    """A number with the letter of thousands or millions."""
    return "-" if value is None else with_prefix(value, "").strip()


def _failures(result: SweepResult) -> Facts | None:
    rows = [(cell_name(cell, result), cell.failure, 10) for cell in result.cells if cell.failure]
    return facts(*rows, lines=2, noun="cell")


def _launches(result: SweepResult) -> Facts | None:
    rows = [(cell_name(cell, result), cell.launch) for cell in answered(result) if cell.fits]
    return facts(*rows, detail=WHOLE, lines=3)


def _legend(result: SweepResult) -> Facts | None:
    batch = "the recommended one" if result.verb == "plan" else "the command's"
    run = (
        f"{result.samples} samples"
        if result.samples
        else "all epochs of the cell's (one where no loop tells their number)"
    )
    return facts(
        ("memory", "of one GPU, as nvidia-smi shows it", 30),
        ("batch", f"of one GPU: {batch}", 30),
        ("samples/s", "of all GPUs together, if the DataLoader keeps up", 30),
        ("the run", run if any(cell.run_s for cell in result.cells) else "", 30),
        ("results", f"a file of each cell in {result.folder}: trainfit show FILE", 20),
    )
