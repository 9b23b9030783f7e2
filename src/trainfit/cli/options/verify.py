"""Options of ``trainfit verify``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    add_explain,
    add_protection,
    add_result,
    seconds,
    share,
    whole_number,
)

PARSER: dict[str, Any] = {
    "usage": "trainfit verify [options] RESULT",
    "description": "Run the command of a result file on this machine's GPU for a few optimizer "
    "steps and compare the measured memory and step time with the predicted ones. "
    "Exit code 0: within the stated "
    "range, 1: not. The script runs for real, but what it writes goes to a scratch layer.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "result", type=Path, metavar="RESULT", help="file of plan --output or of simulate"
    )
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=10,
        metavar="N",
        help="optimizer steps to run (default 10)",
    )
    parser.add_argument(
        "--recommended",
        action="store_true",
        help="verify the recommended batch size instead of the current one",
    )
    parser.add_argument(
        "--tolerance",
        type=share,
        metavar="SHARE",
        help="largest accepted error of a prediction (0.02, 2%%); default: the range that the "
        "result states",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of the script in seconds (default 600)",
    )
    parser.add_argument(
        "--rehearse",
        metavar="GPU",
        help="run on a simulated GPU instead, to test that the script can be measured",
    )
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "real_runs:Verification")
    add_explain(result, "all notes")
