"""``trainfit sweep``: runs the cells that have no result yet, and makes a table of all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trainfit.plan.command.tunables import LOADER_TUNABLES
from trainfit.plan.prices import Prices
from trainfit.plan.sweep.cell_run import CellJob, Ends, Jobs, key_of, own_variables
from trainfit.plan.sweep.figures import best_first, failed, place_of_least, read_row
from trainfit.plan.sweep.grid import Cell, Sweep
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import write_file
from trainfit.results.runs.sweep import SweepCell, SweepResult

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
