"""A sweep: the cheapest and the fastest of its cells, their table, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.report.blocks import (
    WHOLE,
    Facts,
    Headline,
    Subject,
    Table,
    Tile,
    facts,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.gpu_counts import as_fast
from trainfit.report.notes import plain
from trainfit.report.sections.sweep.front import NAME, answered, cell_name, figure, front_chart
from trainfit.results.runs.sweep import SweepCell, SweepResult
from trainfit.results.text import count, duration, rate, short, size, three_digits, with_prefix


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
        [[cell for _, make in columns for cell in (make(each),)] for each in cells],
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
    """With the letter of thousands and millions."""
    return "-" if value is None else with_prefix(value, "").strip()


def _failures(result: SweepResult) -> Facts | None:
    rows = [(cell_name(cell, result), cell.failure, 10) for cell in result.cells if cell.failure]
    return facts(*rows, lines=2, noun="cell")


def _launches(result: SweepResult) -> Facts | None:
    rows = [(cell_name(cell, result), cell.launch) for cell in answered(result) if cell.fits]
    return facts(*rows, detail=WHOLE, lines=3)


def _legend(result: SweepResult) -> Facts | None:
    batch = "the recommended one" if result.verb == "plan" else "the command's"
    run = f"{result.samples} samples" if result.samples else "an epoch of the cell's data set"
    return facts(
        ("memory", "of one GPU, as nvidia-smi shows it", 30),
        ("batch", f"of one GPU: {batch}", 30),
        ("samples/s", "of all GPUs together, if the DataLoader keeps up", 30),
        ("the run", run if any(cell.run_s for cell in result.cells) else "", 30),
        ("results", f"a file of each cell in {result.folder}: trainfit show FILE", 20),
    )
