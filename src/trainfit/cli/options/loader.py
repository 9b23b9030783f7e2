"""Options of ``trainfit loader``."""

from __future__ import annotations

import argparse
from typing import Any

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    OptionGroup,
    add_explain,
    add_protection,
    add_result,
    duration,
    seconds,
    split_command,
    whole_number,
)

PARSER: dict[str, Any] = {
    "description": "Run a training command on a simulated GPU up to its first step, measure the "
    "DataLoader that fed it, predict its rate for every setting and confirm the "
    "best settings in real runs.",
    "epilog": "example: trainfit loader --step-time 40ms -- python train.py --epochs 3",
    "usage": "trainfit loader [options] -- COMMAND\n"
    "       trainfit loader [options] --loader MODULE:CALLABLE",
}
#: The user's command follows the options.
split = split_command


#: Most real runs of the loader to confirm predictions with.
_CONFIRM = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_step(parser.add_argument_group("training step"))
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--probe-time",
        type=seconds,
        default=20.0,
        metavar="S",
        help="seconds spent on measuring the cost of a batch (default 20)",
    )
    measurement.add_argument(
        "--confirm",
        type=_confirm,
        default=_CONFIRM,
        metavar="N",
        help="number of real runs of the best settings, 0 to 4 (default 4)",
    )
    measurement.add_argument(
        "--max-workers", type=whole_number, metavar="N", help="recommend no more than N workers"
    )
    measurement.add_argument(
        "--any-order",
        action="store_true",
        help="allow batches to arrive out of the sampler's order (in_order=False)",
    )
    add_ranks(measurement)
    measurement.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of the whole command in seconds; when it is reached after the probe, the "
        "results so far are shown (default 600)",
    )
    add_source(parser)
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "loader:LoaderResult")
    add_explain(result, "what a batch costs, the machine, all settings, threads, notes")


def add_step(group: OptionGroup) -> None:
    """Add the options for the time of a GPU step."""
    group.add_argument(
        "--step-time",
        type=step_time,
        metavar="S",
        help="time of a training step without the DataLoader, 0.04 or 40ms (default: the lower "
        "bound of the prediction for --gpu; 0 without --gpu)",
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate the script on ("RTX 4090"); without --step-time, the lower bound of '
        "its predicted step time is used",
    )


def add_ranks(group: OptionGroup) -> None:
    """Add the option for other training processes on the machine."""
    group.add_argument(
        "--ranks",
        type=whole_number,
        default=1,
        metavar="N",
        help="training processes on this machine, each with its own DataLoader (default 1)",
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a DataLoader."""
    group = parser.add_argument_group("DataLoader instead of a command")
    group.add_argument(
        "--loader",
        metavar="MODULE:CALLABLE",
        help="instead of a command: a callable without arguments that returns a DataLoader or a "
        "data set; also path/to/file.py:CALLABLE",
    )
    group.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size, if --loader returns a data set",
    )


def step_time(text: str) -> float:
    """An argparse type: as :func:`duration`, said of a step."""
    return duration(text, "time of a step", "0.04 or 40ms")


def _confirm(text: str) -> int:
    """An argparse type: 0 to 4."""
    if text not in map(str, range(_CONFIRM + 1)):
        raise argparse.ArgumentTypeError(
            f"expected a number of runs from 0 to {_CONFIRM}, got {text!r}"
        )
    return int(text)
