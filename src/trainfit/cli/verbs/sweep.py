"""``trainfit sweep``: many plans at once, and which of them is cheapest and fastest."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from trainfit.cli.common import UsageError
from trainfit.cli.config import defaults_text
from trainfit.cli.output import give, given_output
from trainfit.cli.parser import VERBS, OptionParser
from trainfit.cli.progress_bar import shown_progress
from trainfit.plan.prices import given_prices
from trainfit.plan.sweep.cell_run import cells_at_once, run_here, run_on_ray
from trainfit.plan.sweep.grid import read_sweep
from trainfit.plan.sweep.sweeping import sweep
from trainfit.report.sections.sweep import sweep_subject


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the cells and print; returns the exit code."""
    if options.ray is not None and options.jobs is not None:
        raise UsageError("--jobs is for cells on this machine: leave it out with --ray")
    output = given_output(options.output, [options.file])
    prices = given_prices(options.price)
    given = read_sweep(options.file)
    _OptionsParser(VERBS[given.verb]).parse_known_args(list(given.options))
    folder = options.folder or _folder_of(options.file)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--folder {str(folder)!r} is a file; name another")
    with shown_progress() as progress:
        if options.ray is not None:
            cells = functools.partial(run_on_ray, address=options.ray)
        else:
            at_once = options.jobs or cells_at_once()
            cells = functools.partial(run_here, at_once=at_once, warn=progress.warn)
        swept = sweep(
            given,
            folder,
            cells,
            prices=prices,
            samples=options.samples,
            defaults=defaults_text(),
            fresh=options.fresh,
            progress=progress.warn,
        )
    result = swept.result
    give(result, options, sweep_subject, output, page=True)
    if swept.interrupt is not None:
        raise swept.interrupt
    if all(cell.failure for cell in result.cells):
        return 2
    return 0 if result.fits else 1


class _OptionsParser(OptionParser):
    """Checks a sweep's options before its first cell is run with them."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"[options] of the sweep's file: {message}")


def _folder_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}-cells")
