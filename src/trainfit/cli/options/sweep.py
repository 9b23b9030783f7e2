"""Options of ``trainfit sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.common import add_explain, add_result, whole_number

PARSER: dict[str, Any] = {
    "usage": "trainfit sweep [options] FILE.toml",
    "description": "Plan or simulate commands on GPUs, with counts of them and values of tunables, "
    "and say which is cheapest and fastest. The file has commands = [LINE, …], gpus = [NAME, …], "
    "and may have counts = [1, 8], verb = 'simulate', [values] and [options]. A cell that has a "
    "result is not run a second time: the same command goes on where a sweep ended. Exit code 1: "
    "no cell fits; 2: none has a result.",
    "epilog": "example: trainfit sweep sweep.toml --price prices.toml --samples 1000000",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="what to sweep")
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder of the results of cells (default: the file's name with -cells, next to it)",
    )
    runs.add_argument(
        "--jobs",
        type=whole_number,
        metavar="N",
        help="cells at a time on this machine (default: as many as its cores and RAM allow)",
    )
    runs.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the cells on the Ray cluster at ADDRESS ('auto': the one of this machine), whose "
        "nodes have trainfit, and the command's files at the same place (needs trainfit[ray])",
    )
    runs.add_argument(
        "--fresh", action="store_true", help="also run the cells that have a result already"
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument(
        "--price",
        type=Path,
        metavar="FILE",
        help="prices of a GPU-hour, as of `trainfit gpus --price`: a TOML file, or gpuhunt",
    )
    cost.add_argument(
        "--samples",
        type=whole_number,
        metavar="N",
        help="samples in the whole run (default: an epoch, if the size of the data set is known)",
    )
    result = parser.add_argument_group("result")
    add_result(result)
    add_explain(result, "every cell, with its launch command")
