"""Options of ``trainfit rehearse``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    add_explain,
    add_gpu,
    add_protection,
    add_result,
    duration,
    seconds,
    split_command,
    whole_number,
)
from trainfit.cli.options.loader import add_source, step_time

PARSER: dict[str, Any] = {
    "description": "Run a training command on the simulated GPU until its first step, then its "
    "real DataLoader, epoch after epoch, with a GPU step of the given time; show "
    "the utilization that nvidia-smi would show, where it dips and why. A step "
    "keeps the GPU busy from its start to its end, and the loop waits for it (like "
    "one that reads its loss).",
    "epilog": "example: trainfit rehearse --step-time 40ms -- python train.py",
    "usage": "trainfit rehearse [options] -- COMMAND\n"
    "       trainfit rehearse [options] --loader MODULE:CALLABLE",
}
#: The user's command follows the options.
split = split_command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    step = parser.add_argument_group("training step")
    add_gpu(step)
    step.add_argument(
        "--step-time",
        type=step_time,
        metavar="TIME",
        help="time of a training step, such as 40ms (default: the lower bound of the simulated "
        "step on the GPU)",
    )
    rehearsal = parser.add_argument_group("rehearsal")
    rehearsal.add_argument(
        "--duration",
        type=duration,
        default=30.0,
        metavar="TIME",
        help="length of the rehearsal, such as 60s (default 30s)",
    )
    rehearsal.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="a result of `trainfit loader --output`, whose prediction is shown for comparison",
    )
    rehearsal.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit until the script's first step in seconds (default 600)",
    )
    _add_settings(parser)
    add_source(parser)
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "rehearsal:Rehearsal")
    add_explain(result, "every cause of idle time, notes")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings of the DataLoader", "default: the script's own")
    group.add_argument("--num-workers", type=_from_zero, metavar="N")
    group.add_argument("--prefetch-factor", type=whole_number, metavar="N")
    for name in ("--pin-memory", "--persistent-workers", "--in-order"):
        group.add_argument(name, action=argparse.BooleanOptionalAction)
    group.add_argument("--start-method", choices=("fork", "spawn", "forkserver"))


def _from_zero(text: str) -> int:
    """An argparse type: 0, 1, 2 …"""
    return 0 if text == "0" else whole_number(text)
