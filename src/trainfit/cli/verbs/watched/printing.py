"""Prints what was said of watched runs, as every verb does that has such a result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.screen import print_lines
from trainfit.report.batch.noise import METHODS
from trainfit.report.screen import Line
from trainfit.report.watch.comparison import comparison_lines, comparison_screen
from trainfit.report.watch.screen import watch_screen
from trainfit.report.watch.verification import verification_lines, verification_screen
from trainfit.results.batch.noise import NoiseResult
from trainfit.results.text import printable, wrapped
from trainfit.results.watch.comparison import Comparison
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.run import noise_path
from trainfit.results.watch.verification import Verification

Result = WatchResult | Comparison | Verification


def print_result(
    result: Result, *, json: bool = False, whole: bool = False, stderr: bool = False
) -> None:
    """One JSON document on stdout, or a screen, in colour on a terminal; ``whole``: with every
    finding, its cause and evidence."""
    if json:
        print(result.to_json(), flush=True)
    else:
        print_lines(_lines(result, whole), stderr=stderr)


def print_noise(folder: Path, *, wanted: bool, stderr: bool) -> None:
    """A line on the noise scale of a run's first rank, and what explains it; nothing where it was
    not ``wanted``, nor measured."""
    path = noise_path(folder / "rank0")
    stream = sys.stderr if stderr else sys.stdout
    if path.is_file():
        result = NoiseResult.load(path)
        print(wrapped(result.line, "", "  "), file=stream)
        print(f"  measured on {METHODS[result.method]}", file=stream)
        if result.noise is not None:
            name = shlex.quote(printable(str(path)))
            print(f"trainfit batch explain {name} --to BATCH", file=stream)
    elif wanted:
        print("noise scale not measured; -v gives the reason", file=stream)


def _lines(result: Result, whole: bool) -> Sequence[Line]:
    if isinstance(result, WatchResult):
        return watch_screen(result, whole=whole)
    if isinstance(result, Comparison):
        return comparison_lines(result) if whole else comparison_screen(result)
    return verification_lines(result) if whole else verification_screen(result)
