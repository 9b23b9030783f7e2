"""``trainfit verify``: run a predicted command for real and compare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.automation.fail_if import add_fail_if, gated
from trainfit.cli.common import (
    add_protection,
    add_result,
    sandbox_request,
    seconds,
    share,
    whole_number,
)
from trainfit.cli.output import given_output
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.real_machine.verify import ThisMachine, read_prediction, verify
from trainfit.report.plan.verification import verification_text
from trainfit.results.runs.measurement import StandIn

PARSER: dict[str, Any] = {
    "help": "run a planned command for a few real steps and compare with the prediction",
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
    add_result(parser)
    add_fail_if(parser, "plan.verification:Verification")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, compare, print; returns the exit code."""
    output = given_output(options.output, [options.result])
    prediction = read_prediction(options.result, recommended=options.recommended)
    stand_in = None
    if options.rehearse is not None:
        gpu = find_gpu(options.rehearse)
        stand_in = StandIn(gpu, device_constants(gpu))
    with shown_progress() as progress:
        result = verify(
            prediction,
            ThisMachine(stand_in, sandbox_request(options)),
            steps=options.steps,
            tolerance=options.tolerance,
            time_limit_s=options.time_limit,
            progress=progress,
        )
    if output is not None:
        result.save(output)
    print(result.to_json() if options.json else verification_text(result))
    return gated(options, result, 0 if result.good else 1)
