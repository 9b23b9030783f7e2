"""Options of ``trainfit compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.common import add_explain, add_result

PARSER: dict[str, Any] = {
    "usage": "trainfit compare [options] A B",
    "description": "Compare two runs that `trainfit watch` recorded: what differs in command, "
    "settings and machine, and what that did to step time, phases and memory, with 95% intervals. "
    "Exit code 1: B is slower.",
    "epilog": "example: trainfit compare runs/before runs/after",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "before", type=Path, metavar="A", help="run before the change: its folder or result file"
    )
    parser.add_argument(
        "after", type=Path, metavar="B", help="run after the change: its folder or result file"
    )
    parser.add_argument(
        "--other-hardware",
        action="store_true",
        help="compare although GPUs, cores or processor differ",
    )
    add_result(parser)
    add_explain(parser, "all measures and notes")
