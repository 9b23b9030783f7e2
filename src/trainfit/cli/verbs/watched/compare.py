"""``trainfit compare``: say what changed from one watched run to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trainfit.cli.common import add_result, output_file
from trainfit.cli.screen import STYLES
from trainfit.report.watch.comparison import comparison_screen
from trainfit.results.watch.comparison import Comparison
from trainfit.results.watch.run import load_run
from trainfit.watch.compare.comparing import compare

PARSER: dict[str, Any] = {
    "help": "say what changed from one watched run to another",
    "description": "Compare two runs that `trainfit watch` recorded: what differs in command, "
    "settings and machine, and what that did to step time, phases and memory, with 95% intervals. "
    "Exit code 1: B is slower.",
    "epilog": "example: trainfit compare runs/before runs/after",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("before", type=Path, metavar="A", help="folder of the run before")
    parser.add_argument("after", type=Path, metavar="B", help="folder of the run after")
    parser.add_argument(
        "--other-hardware",
        action="store_true",
        help="compare although GPUs, cores or processor differ",
    )
    add_result(parser)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """There is no command: all words are ours."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Compare and print; returns the exit code."""
    output = output_file(options.output) if options.output else None
    result = compare(
        load_run(options.before),
        load_run(options.after),
        allow_other_hardware=options.other_hardware,
    )
    if output is not None:
        result.save(output)
    if options.json:
        print(result.to_json(), flush=True)
    else:
        _print(result)
    return {"slower": 1, "cannot tell": 2}.get(result.verdict, 0)


def _print(result: Comparison) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    columns = console.width if console.is_terminal else 100
    for line in comparison_screen(result, columns):
        console.print(Text(line.text, STYLES[line.style]), soft_wrap=True)
