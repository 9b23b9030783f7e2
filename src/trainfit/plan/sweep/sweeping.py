"""``trainfit sweep``: runs the cells that have no result yet, and makes a table of all.

A cell's result is a row, with its price; the table says what is best of all rows, and their front.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from trainfit.memory.explanation import recorded_settings, summarize
from trainfit.plan.command.tunables import LOADER_TUNABLES
from trainfit.plan.prices import Prices
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.speed import speed
from trainfit.plan.sweep.cell_run import CellJob, Ends, Jobs, key_of, own_variables
from trainfit.plan.sweep.grid import Cell, Sweep
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import write_file
from trainfit.results.plan import PlanResult
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.sweep import SweepCell, SweepResult, SweepVerb
from trainfit.results.speed import StepSpeed

#: Differences of a time or a cost that are none: figures are predictions.
_ALIKE: Final = 1e-9


def row_of(cell: Cell) -> SweepCell:
    """The cell's, without a result."""
    return SweepCell(
        command=cell.name,
        values=cell.values,
        gpu=cell.gpu,
        gpus=cell.spec.count * cell.spec.machines,
        memory_bytes=cell.spec.memory_bytes,
    )


def failed(cell: Cell, failure: str) -> SweepCell:
    """The cell's, with the reason why it has no result."""
    return dataclasses.replace(row_of(cell), failure=failure)


def read_row(
    cell: Cell, verb: SweepVerb, file: Path, prices: Prices | None, samples: int | None
) -> SweepCell:
    """The cell's, from its result's ``file``; ``samples`` are those of the whole run (``None``: as
    many as the script's loop has, or an epoch's).

    Raises:
        ResultFileError: it cannot be read (:mod:`trainfit.results.files.errors`).
    """
    row = dataclasses.replace(row_of(cell), result=file.name)
    if verb == "plan":
        plan = PlanResult.load(file)
        found, samples = _planned(row, plan), samples or plan.all_samples
    else:
        found = _simulated(row, cell, whole(Recording.load(file)))
    return _priced(found, cell, prices, samples)


def _planned(row: SweepCell, plan: PlanResult) -> SweepCell:
    """The row at the recommended batch size; at the command's where the sweep sets that, or none is
    recommended."""
    ranks = plan.ranks.count if plan.ranks is not None else 1
    best = None if "batch_size" in row.values else plan.chosen.recommended_batch
    needed, batch, fits = plan.needed_bytes, plan.now.batch_size, plan.fits_now
    step = plan.speed.now if plan.speed is not None else None
    if best and plan.recommended is not None:
        needed, batch, fits = plan.needed_then_bytes or needed, best, True
        step = plan.speed.at(best) if plan.speed is not None else None
    row = dataclasses.replace(
        row,
        fits=fits,
        batch_size=batch,
        device_bytes=needed,
        launch=plan.launch if best else plan.command,
    )
    return _with_step(row, step, ranks)


def _simulated(row: SweepCell, cell: Cell, recording: Recording) -> SweepCell:
    """The row of the command as it is written."""
    batch = recording.header.get("batch_size")
    row = dataclasses.replace(row, batch_size=batch, launch=cell.command.line())
    if recording.header.get("out_of_memory"):
        return dataclasses.replace(row, fits=False)
    summary = summarize(recording, row.result, settings=recorded_settings(recording))
    row = dataclasses.replace(row, fits=True, device_bytes=summary.memory.device_bytes)
    found = speed(recording, batch, machine_of(cell.spec))
    return _with_step(row, None if found is None else found.now, recording.ranks)


def _with_step(row: SweepCell, step: StepSpeed | None, ranks: int) -> SweepCell:
    if step is None or not row.fits:
        return row
    rate = step.samples_per_s
    return dataclasses.replace(
        row, step_s=step.seconds, samples_per_s=None if rate is None else ranks * rate
    )


def _priced(row: SweepCell, cell: Cell, prices: Prices | None, samples: int | None) -> SweepCell:
    rate, each = row.samples_per_s, None if prices is None else prices.per_hour.get(cell.spec.key)
    run_s = samples / rate if rate and samples else None
    price = None if each is None else each * row.gpus
    return dataclasses.replace(
        row,
        run_s=run_s,
        price_per_hour=price,
        samples_per_unit=3600 * rate / price if rate and price else None,
        cost=run_s / 3600 * price if run_s is not None and price is not None else None,
    )


# ---
# What is best.


def best_first(rows: Sequence[SweepCell]) -> tuple[SweepCell, ...]:
    """What fits, by cost, then by rate; what does not fit; what failed. With the Pareto front."""
    return tuple(sorted(_with_front(rows), key=_order))


def _order(row: SweepCell) -> tuple[object, ...]:
    rank = 3 if row.failure else 2 if not row.fits else 0 if row.samples_per_unit else 1
    return rank, _cost(row) or 0.0, -(row.samples_per_s or 0.0), row.device_bytes or 0


def _time(row: SweepCell) -> float | None:
    """Seconds of the run, or of a sample where its length is not known."""
    return row.run_s or (1 / row.samples_per_s if row.samples_per_s else None)


def _cost(row: SweepCell) -> float | None:
    return row.cost or (1 / row.samples_per_unit if row.samples_per_unit else None)


def _memory(row: SweepCell) -> float | None:
    return row.device_bytes


def _with_front(rows: Sequence[SweepCell]) -> list[SweepCell]:
    """Cells of which a measure is not known that others have are not on the front."""
    measures = [
        measure
        for measure in (_time, _cost, _memory)
        if any(row.fits and measure(row) is not None for row in rows)
    ]
    points = {
        place: [float(measure(row) or 0.0) for measure in measures]
        for place, row in enumerate(rows)
        if row.fits and all(measure(row) is not None for measure in measures)
    }
    return [
        dataclasses.replace(
            row,
            on_front=place in points
            and not any(_is_better(other, points[place]) for other in points.values()),
        )
        for place, row in enumerate(rows)
    ]


def _is_better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Is it at least as good in all (less is better), and better in one?"""
    pairs = list(zip(one, other, strict=True))
    return all(a <= b * (1 + _ALIKE) for a, b in pairs) and any(
        a < b * (1 - _ALIKE) for a, b in pairs
    )


def place_of_least(
    rows: Sequence[SweepCell], measure: Callable[[SweepCell], float | None]
) -> int | None:
    """The place of the row that fits with the least of ``measure``; the first of several."""
    known = {
        place: value
        for place, row in enumerate(rows)
        if row.fits and (value := measure(row)) is not None
    }
    return min(known, key=lambda place: known[place]) if known else None


Say = Callable[[str], None]
#: Ends of names of cells' files, by verb.
_ENDS: Final = {"plan": ".json", "simulate": ".trainfit"}
#: Values that leave a sample as much work as it was.
_SAME_WORK: Final = ("batch_size", "grad_accum", "amp", *LOADER_TUNABLES)


@dataclasses.dataclass(frozen=True)
class Swept:
    """A sweep's result, and the user's interrupt that ended it early, if one did."""

    result: SweepResult
    interrupt: KeyboardInterrupt | None = None


def sweep(
    given: Sweep,
    folder: Path,
    run: Callable[[Jobs], Ends],
    *,
    prices: Prices | None = None,
    samples: int | None = None,
    defaults: str = "",
    fresh: bool = False,
    progress: Say = lambda text: None,
) -> Swept:
    """Run what has no result in ``folder``, and read all.

    Args:
        run: who runs cells (:mod:`trainfit.plan.sweep.cell_run`).
        samples: of the whole run (``None``: an epoch, where the data set's size is known).
        defaults: of the verb's options, from a file of the user's.
        fresh: also run the cells that have a result.

    Raises ``OSError`` where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here, variables = str(Path.cwd()), own_variables()
    jobs = {
        place: CellJob(given.verb, given.options, cell.gpu, cell.words, here, variables)
        for place, cell in enumerate(given.cells)
    }
    keys = {place: key_of(job, given.cells[place].command, defaults) for place, job in jobs.items()}
    files = {key: folder / f"{key}{_ENDS[given.verb]}" for key in keys.values()}
    left = {key: jobs[place] for place, key in keys.items() if fresh or not files[key].is_file()}
    kept = len(files) - len(left)
    if kept:
        progress(f"{kept} of {len(files)} cells have a result in {folder}; --fresh re-runs them")
    failures = dict.fromkeys(left, "not run: the sweep was interrupted")
    interrupt = None
    try:
        # Whatever ends the loop ends the cells that go on.
        with contextlib.closing(run(left)) as ends:
            for done, (key, end) in enumerate(ends, 1):
                if end.content is None:
                    failures[key] = end.failure
                else:
                    write_file(files[key], end.content)
                    del failures[key]
                how = f"failed: {end.failure}" if end.failure else "done"
                progress(f"cell {kept + done} of {len(files)} ({left[key].gpu}) {how}")
    except KeyboardInterrupt as error:
        interrupt = error
    rows = [
        _row(cell, files[keys[place]], failures.get(keys[place], ""), given, prices, samples)
        for place, cell in enumerate(given.cells)
    ]
    return Swept(_result(given, folder, rows, prices, samples, interrupt is not None), interrupt)


def _row(
    cell: Cell,
    file: Path,
    failure: str,
    given: Sweep,
    prices: Prices | None,
    samples: int | None,
) -> SweepCell:
    if failure:
        return failed(cell, failure)
    try:
        return read_row(cell, given.verb, file, prices, samples)
    except ResultFileError as error:
        return failed(cell, str(error))


def _result(
    given: Sweep,
    folder: Path,
    rows: list[SweepCell],
    prices: Prices | None,
    samples: int | None,
    interrupted: bool,
) -> SweepResult:
    cells = best_first(rows)
    has_cost = any(cell.cost is not None for cell in cells)
    return SweepResult(
        sweep=str(given.path),
        verb=given.verb,
        folder=str(folder),
        cells=cells,
        currency=prices.currency if prices is not None else "",
        samples=samples,
        cheapest=place_of_least(cells, lambda cell: cell.cost if has_cost else cell.price_per_hour),
        fastest=place_of_least(
            cells, lambda cell: -cell.samples_per_s if cell.samples_per_s else None
        ),
        best_per_unit=place_of_least(
            cells, lambda cell: -cell.samples_per_unit if cell.samples_per_unit else None
        ),
        interrupted=interrupted,
        notes=tuple(_notes(given, cells, prices)),
    )


def _notes(given: Sweep, cells: tuple[SweepCell, ...], prices: Prices | None) -> Iterator[str]:
    work = [name for name in given.names if name not in _SAME_WORK]
    several = len({cell.command for cell in cells}) > 1
    if work or several:
        what = " and ".join([*(["the command"] if several else []), *work])
        yield (
            f"cells that differ in {what} may not do the same work per sample: compare samples/s "
            "and cost among those that do"
        )
    yield "the time is of the GPUs alone: a sweep leaves out the DataLoader; `trainfit plan` has it"
    if prices is not None:
        missing = dict.fromkeys(c.gpu for c in cells if c.price_per_hour is None)
        if missing:
            yield f"no price is known of {', '.join(missing)}"
        yield from prices.notes
