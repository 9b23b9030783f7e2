"""Options of ``trainfit watch`` and ``trainfit compare``."""

from __future__ import annotations

import argparse
from typing import Final

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    VerbOptions,
    add_explain,
    add_result,
    file_path,
    split_command,
    whole_number,
)

# ---
# trainfit watch


#: Steps of a run of --verify, its least runs, and runs between two of those numbers; tests compare
#: them with :mod:`trainfit.watch.verify`, which takes long to import.
VERIFY_STEPS: Final = 100
VERIFY_RUNS: Final = 5
_VERIFY_CYCLE: Final = 4


def _watch(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit watch``."""
    folders = parser.add_argument_group("recorded run")
    folders.add_argument(
        "--folder", type=file_path, metavar="DIR", help="record into DIR, a new or empty folder"
    )
    folders.add_argument(
        "--read",
        type=file_path,
        action="append",
        metavar="DIR",
        help="analyze a recorded run instead of running one; repeat the option for each other "
        "machine of the same run",
    )
    folders.add_argument(
        "--attach", type=file_path, metavar="DIR", help="show a run in progress in another terminal"
    )
    parser.add_argument(
        "--noise-scale",
        action="store_true",
        help="also measure the gradient noise scale: which batch size learns fastest",
    )
    parser.add_argument(
        "--memory-history",
        action="store_true",
        help="also record the history of GPU memory, and say of what it was full where it runs "
        "out (some 2 µs for each allocation, and 100 MB of RAM)",
    )
    _add_verify(parser)
    result = parser.add_argument_group("result")
    result.add_argument("--plain", action="store_true", help="print lines instead of the live view")
    result.add_argument("--quiet", action="store_true", help="print nothing until the end")
    result.add_argument("-o", "--output", metavar="FILE", help="write the result to FILE as JSON")
    add_fail_if(result, "watch:WatchResult")
    result.add_argument("--json", action="store_true", help="print one JSON document at the end")
    result.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show every finding with its cause and evidence",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    """Add ``--verify`` and its options."""
    group = parser.add_argument_group("trial of the recommended change")
    group.add_argument(
        "--verify",
        action="store_true",
        help="measure what the recommended change gains: run the command 5 times for a few "
        "steps each, first unchanged, then alternately with and without the change; mark "
        "a value that is not found by its option's name, as in --loaders={num_workers:4}",
    )
    group.add_argument(
        "--verify-steps",
        type=whole_number,
        metavar="N",
        help=f"training steps of each run of --verify (default {VERIFY_STEPS})",
    )
    group.add_argument(
        "--verify-runs",
        type=_runs,
        metavar="N",
        help=f"runs of --verify: {VERIFY_RUNS} (the default), 9, 13, …; more find smaller gains",
    )


def _runs(text: str) -> int:
    """An argparse type: runs in alternation, after a first one."""
    number = whole_number(text)
    if number < VERIFY_RUNS or (number - 1) % _VERIFY_CYCLE:
        raise argparse.ArgumentTypeError(f"expected 5, 9, 13, … runs, got {text!r}")
    return number


WATCH: Final = VerbOptions(
    configure=_watch,
    split=split_command,
    description="Run a training command unchanged, record what its steps spend their time on, "
    "and say what limits it and what to change. The script is not edited; its output, its exit "
    "code and its results stay the same. TRAINFIT_WATCH=0 switches the recorder off.",
    epilog="example: trainfit watch -- python train.py --epochs 1",
    usage="trainfit watch [options] -- COMMAND\n       trainfit watch --read FOLDER",
)


# ---
# trainfit compare


def _compare(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit compare``."""
    parser.add_argument(
        "before",
        type=file_path,
        metavar="A",
        help="run before the change: its folder or result file",
    )
    parser.add_argument(
        "after", type=file_path, metavar="B", help="run after the change: its folder or result file"
    )
    parser.add_argument(
        "--other-hardware",
        action="store_true",
        help="compare although GPUs, cores or processor differ",
    )
    add_result(parser)
    add_explain(parser, "all measures and notes")


COMPARE: Final = VerbOptions(
    configure=_compare,
    usage="trainfit compare [options] A B",
    description="Compare two runs that `trainfit watch` recorded: what differs in command, "
    "settings and machine, and what that did to step time, phases and memory, with 95% intervals. "
    "Exit code 1: B is slower.",
    epilog="example: trainfit compare runs/before runs/after",
)
