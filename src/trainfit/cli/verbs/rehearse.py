"""``trainfit rehearse``: GPU utilization with a command's DataLoader."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.automation.fail_if import add_fail_if, gated
from trainfit.cli.common import (
    UsageError,
    add_gpu,
    add_protection,
    add_result,
    duration,
    only_ascii,
    sandbox_request,
    seconds,
    split_command,
    whole_number,
)
from trainfit.cli.output import given_output, name_report
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.verbs.loader import add_source, given_step, source, step_time
from trainfit.hardware import GpuSpec, find_gpu, local_gpu
from trainfit.plan.dataloader.measure import LoadingOptions
from trainfit.plan.dataloader.rehearse import rehearse_command
from trainfit.report.loader.rehearsal import rehearsal_text
from trainfit.results.loader.result import LoaderResult

PARSER: dict[str, Any] = {
    "help": "run a command's real DataLoader with a simulated GPU step and show the GPU "
    "utilization",
    "description": "Run a training command on the simulated GPU until its first step, then its "
    "real DataLoader, epoch after epoch, with a GPU step of the given time; show "
    "the utilization that nvidia-smi would show, where it dips and why. A step "
    "keeps the GPU busy from its start to its end, and the loop waits for it (like "
    "one that reads its loss).",
    "epilog": "example: trainfit rehearse --step-time 40ms -- python train.py",
    "usage": "trainfit rehearse [options] -- COMMAND\n"
    "       trainfit rehearse [options] --loader MODULE:CALLABLE",
}

_SETTINGS = (
    *("num_workers", "prefetch_factor", "pin_memory"),
    *("persistent_workers", "in_order", "start_method"),
)
_WITH_VALUE = (
    *("--gpu", "--step-time", "--duration", "--time-limit", "--output"),
    *("--num-workers", "--prefetch-factor", "--start-method", "--loader", "--batch-size"),
    *("--compare", "--keep-writes", "--fail-if"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_gpu(parser)
    parser.add_argument(
        "--step-time",
        type=step_time,
        metavar="TIME",
        help="time of a training step, such as 40ms (default: the lower bound of the simulated "
        "step on the GPU)",
    )
    parser.add_argument(
        "--duration",
        type=duration,
        default=30.0,
        metavar="TIME",
        help="length of the rehearsal, such as 60s (default 30s)",
    )
    _add_settings(parser)
    add_source(parser)
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="a result of `trainfit loader --output`, whose prediction is shown for comparison",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit until the script's first step in seconds (default 600)",
    )
    add_protection(parser)
    add_result(parser)
    add_fail_if(parser, "loader.rehearsal:Rehearsal")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings of the DataLoader", "default: the script's own")
    group.add_argument("--num-workers", type=_from_zero, metavar="N")
    group.add_argument("--prefetch-factor", type=whole_number, metavar="N")
    for name in ("--pin-memory", "--persistent-workers", "--in-order"):
        group.add_argument(name, action=argparse.BooleanOptionalAction)
    group.add_argument("--start-method", choices=("fork", "spawn", "forkserver"))


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the training command."""
    return split_command(words, _WITH_VALUE)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Rehearse and print; returns the exit code."""
    output = given_output(options.output)
    compare = LoaderResult.load(options.compare) if options.compare is not None else None
    parsed = source(options, command, "rehearse")
    loading = LoadingOptions(
        given_step(options.step_time),
        _gpu(options),
        time_limit_s=options.time_limit,
        loader=options.loader or "",
        batch_size=options.batch_size,
        sandbox=sandbox_request(options),
    )
    given = {name: getattr(options, name) for name in _SETTINGS}
    settings = {name: value for name, value in given.items() if value is not None}
    with shown_progress() as progress:
        rehearsed = rehearse_command(parsed, loading, options.duration, settings, progress, compare)
    result = rehearsed.result
    text = result.to_json() if options.json else rehearsal_text(result, ascii_only=only_ascii())
    print(text, flush=True)
    if output is not None:
        result.save(output)
    name_report(output, json=options.json)
    if rehearsed.interrupt is not None:
        raise rehearsed.interrupt
    return gated(options, result, 0 if result.ended == "duration" else 2)


def _gpu(options: argparse.Namespace) -> GpuSpec | None:
    """The GPU to simulate; this machine's where neither it nor the step's time is given."""
    named = find_gpu(options.gpu) if options.gpu is not None else None
    if options.step_time is not None:
        return named
    if options.loader is not None:
        raise UsageError(
            "--loader has no training step to simulate: give the step time, as in --step-time 40ms"
        )
    if named is not None:
        return named
    here = local_gpu()
    if here is None:
        raise UsageError(
            "the GPU's step time is not known, and this machine has no GPU: give it, as "
            'in --step-time 40ms, or name a GPU, as in --gpu "RTX 4090"'
        )
    return here


def _from_zero(text: str) -> int:
    """An argparse type: 0, 1, 2 …"""
    return 0 if text == "0" else whole_number(text)
