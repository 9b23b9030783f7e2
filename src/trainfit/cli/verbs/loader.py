"""``trainfit loader``: the DataLoader settings that keep the GPU from waiting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainfit.cli.common import (
    UsageError,
    add_protection,
    add_result,
    duration,
    read_command,
    sandbox_request,
    seconds,
    split_command,
    whole_number,
)
from trainfit.cli.output import given_output, name_report
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import Command
from trainfit.plan.dataloader.measure import LoadingOptions, tune_command
from trainfit.plan.runs.failures import ScriptError
from trainfit.report.loader.text import loader_text
from trainfit.results.loader.result import LoaderResult
from trainfit.results.runs.loading import Consumer

PARSER: dict[str, Any] = {
    "help": "the DataLoader settings that keep the GPU from waiting, with the fewest workers",
    "description": "Run a training command on a simulated GPU up to its first step, measure the "
    "DataLoader that fed it, predict its rate for every setting and confirm the "
    "best settings in real runs.",
    "epilog": "example: trainfit loader --step-time 40ms -- python train.py --epochs 3",
    "usage": "trainfit loader [options] -- COMMAND\n"
    "       trainfit loader [options] --loader MODULE:CALLABLE",
}

_WITH_VALUE = (
    *("--step-time", "--gpu", "--probe-time", "--confirm", "--max-workers", "--ranks"),
    *("--time-limit", "--output", "--loader", "--batch-size", "--keep-writes"),
)
#: Most real runs of the loader to confirm predictions with.
_CONFIRM = 4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_step(parser)
    parser.add_argument(
        "--probe-time",
        type=seconds,
        default=20.0,
        metavar="S",
        help="seconds spent on measuring the cost of a batch (default 20)",
    )
    parser.add_argument(
        "--confirm",
        type=_confirm,
        default=_CONFIRM,
        metavar="N",
        help="number of real runs of the best settings, 0 to 4 (default 4)",
    )
    parser.add_argument(
        "--max-workers", type=whole_number, metavar="N", help="recommend no more than N workers"
    )
    parser.add_argument(
        "--any-order",
        action="store_true",
        help="allow batches to arrive out of the sampler's order (in_order=False)",
    )
    add_ranks(parser)
    add_source(parser)
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of the whole command in seconds; when it is reached after the probe, the "
        "results so far are shown (default 600)",
    )
    add_protection(parser)
    add_result(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options for the time of a GPU step."""
    parser.add_argument(
        "--step-time",
        type=step_time,
        metavar="S",
        help="time of a training step without the DataLoader, 0.04 or 40ms (default: the lower "
        "bound of the prediction for --gpu; 0 without --gpu)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate the script on ("RTX 4090"); without --step-time, the lower bound of '
        "its predicted step time is used",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option for other training processes on the machine."""
    parser.add_argument(
        "--ranks",
        type=whole_number,
        default=1,
        metavar="N",
        help="training processes on this machine, each with its own DataLoader (default 1)",
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a DataLoader."""
    parser.add_argument(
        "--loader",
        metavar="MODULE:CALLABLE",
        help="instead of a command: a callable without arguments that returns a DataLoader or a "
        "data set; also path/to/file.py:CALLABLE",
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size, if --loader returns a data set",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the training command."""
    return split_command(words, _WITH_VALUE)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    if options.time_limit <= options.probe_time:
        raise UsageError(
            f"--time-limit {options.time_limit:g} includes --probe-time {options.probe_time:g}: "
            "raise --time-limit or lower --probe-time"
        )
    output = given_output(options.output)
    parsed = source(options, command)
    with shown_progress() as progress:
        tuned = tune_command(parsed, loading_options(options), progress)
    result = tuned.result
    print(result.to_json() if options.json else loader_text(result), flush=True)
    if output is not None:
        result.save(output)
    name_report(output, json=options.json)
    if tuned.interrupt is not None:
        raise tuned.interrupt
    _check_ran(result)
    return 0


def _check_ran(result: LoaderResult) -> None:
    """Raise :class:`ScriptError` where no settings of the loader gave a batch."""
    if not result.candidates and result.faults:
        fix = result.faults[-1].fix
        raise ScriptError(f"{result.loader}: {result.reason}; {fix}")


def source(
    options: argparse.Namespace, command: Sequence[str], verb: str = "loader"
) -> Command | None:
    """The command; ``None`` with ``--loader``. Raises :class:`UsageError` for both or none."""
    if options.loader is None:
        if options.batch_size is not None:
            raise UsageError(
                "--batch-size applies to a data set given by --loader; set the batch size in the "
                "command"
            )
        return _parse(command, verb)
    if command:
        raise UsageError("give either --loader or a command, not both")
    if options.gpu is not None and options.step_time is None:
        raise UsageError(
            "--loader has no training step to simulate: give the step time, as in --step-time 40ms"
        )
    return None


def _parse(command: Sequence[str], verb: str) -> Command:
    if not command:
        raise UsageError(
            f"no command: write the training command after --, as in `trainfit {verb} -- "
            "python train.py`, or name a callable that creates the DataLoader with --loader "
            "MODULE:CALLABLE"
        )
    return read_command(command)


def loading_options(options: argparse.Namespace) -> LoadingOptions:
    """The options of the measurement."""
    return LoadingOptions(
        step=given_step(options.step_time),
        gpu=find_gpu(options.gpu) if options.gpu is not None else None,
        seconds=options.probe_time,
        confirm=options.confirm,
        max_workers=options.max_workers,
        any_order=options.any_order,
        ranks=options.ranks,
        time_limit_s=options.time_limit,
        loader=options.loader or "",
        batch_size=options.batch_size,
        sandbox=sandbox_request(options),
    )


def given_step(step_s: float | None) -> Consumer | None:
    """What ``--step-time`` says; nothing is known of how busy it keeps a core."""
    return Consumer(step_s, source="given") if step_s is not None else None


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
