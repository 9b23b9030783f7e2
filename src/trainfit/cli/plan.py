"""``trainfit plan``: from a training command to a batch size that fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainfit.cli.common import (
    UsageError,
    add_gpu,
    chosen_gpu,
    output_file,
    progress,
    seconds,
    whole_number,
)
from trainfit.plan.command import parse_command
from trainfit.plan.planner import Settings, plan
from trainfit.report.plan_text import plan_text

PARSER: dict[str, Any] = {
    "help": "what a training command needs of GPU memory, and its best batch size",
    "description": "Simulate a training command on a GPU and plan its batch size. "
    "Write tunables into the command with their present values.",
    "epilog": "example: trainfit plan --gpu 'RTX 4090' -- "
    "python train.py --batch_size={batch_size:8} --amp={amp:true}",
    "usage": "trainfit plan [options] -- COMMAND",
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_gpu(parser)
    parser.add_argument(
        "--headroom",
        type=_share,
        default=0.10,
        metavar="SHARE",
        help="share of the GPU's memory to leave free (default 0.10, also 10%%)",
    )
    parser.add_argument(
        "--steps", type=whole_number, default=3, help="optimizer steps to simulate (default 3)"
    )
    parser.add_argument(
        "--time-limit", type=seconds, default=600.0, metavar="S", help="seconds for one simulation"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--output", metavar="FILE", help="also write the result to FILE")


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    parsed = parse_command(command)
    gpu, name = chosen_gpu(options.gpu)
    output = output_file(options.output)
    settings = Settings(options.headroom, options.steps, options.time_limit)
    result = plan(parsed, gpu, name, settings, progress)
    if output is not None:
        result.save(output)
    print(result.to_json() if options.json else plan_text(result), end="\n" if options.json else "")
    fits = result.now.fits if result.now.largest_batch is None else result.now.largest_batch > 0
    return 0 if fits else 1


def _share(text: str) -> float:
    """``0.1`` or ``10%``; from 0 to below 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to below 1")
    return value


__all__ = ["PARSER", "UsageError", "configure", "run"]
