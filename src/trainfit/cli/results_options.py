"""Options of the verbs that read results, and of ``trainfit completion``.

Options of ``trainfit watch`` and ``trainfit compare``.
"""

from __future__ import annotations

import argparse
from typing import Final

from trainfit.cli.automation import METRICS, SARIF, add_fail_if, add_format
from trainfit.cli.common import (
    VerbOptions,
    add_explain,
    add_json,
    add_result,
    file_path,
    split_command,
    whole_number,
)
from trainfit.cli.values import decay, noise_scale, rate

# ---
# trainfit show


def _show(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit show``."""
    parser.add_argument("file", type=file_path, metavar="FILE")
    add_json(parser)
    add_explain(parser)
    add_fail_if(parser)
    add_format(parser, METRICS, SARIF)


SHOW: Final = VerbOptions(
    configure=_show,
    usage="trainfit show [options] FILE",
    description="Show a result file: of `trainfit plan --output`, `trainfit simulate`, "
    "`trainfit calibrate`, or of `trainfit loader`, `rehearse`, `watch`, `compare`, `pace`, "
    "`batch` or `doctor` with --output; of NoiseScale.save.",
)


# ---
# trainfit report


#: Ends of names of files that a report is written to: the keys of
#: :data:`trainfit.cli.verbs.report.FORMS`, which takes long to import.
ENDS: Final = (".html", ".md", ".json", ".svg", ".trace.json")


def _report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit report``."""
    parser.add_argument("results", type=file_path, nargs="+", metavar="RESULT")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"file to write, whose name ends in {ends()}; '-' is standard output, as Markdown "
        "unless --format says otherwise (default: the first result's name with .html, here)",
    )
    parser.add_argument(
        "--format",
        choices=[end.removeprefix(".") for end in ENDS],
        help="format to write, regardless of the file name",
    )


def ends() -> str:
    """The ends in words."""
    *first, last = ENDS
    return f"{', '.join(first)} or {last}"


REPORT: Final = VerbOptions(
    configure=_report,
    description="Make one page of the results of any commands: files of --output, recordings, "
    "folders of `trainfit watch`. An HTML page needs no network and no other file. With -o out.md "
    "the page as Markdown, out.json all results in one document, out.svg the first chart, "
    "out.trace.json a step or a watched run over time, for Perfetto.",
    epilog="example: trainfit report plan.json loader.json watch.json -o project.html",
    usage="trainfit report [options] RESULT...",
)


# ---
# trainfit batch


def _batch(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit batch``."""
    parser.add_argument("action", choices=("explain",), metavar="explain", help="the trade")
    parser.add_argument(
        "result",
        nargs="?",
        type=file_path,
        metavar="RESULT",
        help="file of trainfit.batch.NoiseScale.save",
    )
    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--noise-scale",
        type=noise_scale,
        metavar="SAMPLES",
        help="noise scale instead of RESULT: 200, or 200:150:280 with its interval",
    )
    batches.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="B",
        help="current batch size (default: that of RESULT)",
    )
    batches.add_argument(
        "--to", type=whole_number, required=True, metavar="B", help="batch size to compare with"
    )
    batches.add_argument(
        "--samples", type=whole_number, metavar="N", help="number of samples in the data set"
    )
    batches.add_argument(
        "--steps", type=whole_number, metavar="N", help="training steps planned at --batch-size"
    )
    batches.add_argument(
        "--accumulation",
        type=whole_number,
        metavar="N",
        help="micro-batches of an optimizer step now (default: those of RESULT, or 1)",
    )
    batches.add_argument(
        "--gpus",
        type=whole_number,
        metavar="N",
        help="GPUs that share a step (default: those of RESULT, of --data, or 1)",
    )
    batches.add_argument(
        "--data",
        type=file_path,
        metavar="FILE",
        help="step times: CSV with micro_batch,accumulation,gpus,seconds, or a plan's result",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--optimizer",
        choices=("sgd", "adam", "adamw", "other"),
        default="other",
        help="decides how the learning rate scales with the batch size",
    )
    training.add_argument("--lr", type=rate, metavar="X", help="current learning rate")
    training.add_argument(
        "--beta1", type=decay, default=0.9, metavar="X", help="Adam's current beta1 (0.9)"
    )
    training.add_argument(
        "--beta2", type=decay, default=0.999, metavar="X", help="Adam's current beta2 (0.999)"
    )
    training.add_argument(
        "--batch-norm",
        choices=("yes", "no"),
        help="does the model have BatchNorm layers? (default: unknown)",
    )
    result = parser.add_argument_group("result")
    add_result(result)
    add_explain(result, "every claim, with its sources in full")


BATCH: Final = VerbOptions(
    configure=_batch,
    usage="trainfit batch explain [RESULT] --to B [options]",
    description="Explain the trade between two batch sizes: steps and time to the same loss, "
    "learning rate, accumulation, BatchNorm, uneven batches; each with its source. Batch sizes are "
    "samples of an optimizer step: micro-batch × accumulation × GPUs.",
    epilog="example: trainfit batch explain noise.json --to 16 --optimizer adam --lr 1e-4",
)


# ---
# trainfit completion


SHELLS: Final = ("bash", "zsh", "fish")


def _completion(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit completion``."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


COMPLETION: Final = VerbOptions(
    configure=_completion,
    description="Print the completion of commands, options, GPUs and files for a shell. For "
    'this session: bash: eval "$(trainfit completion bash)"; zsh: the same with zsh, after '
    "compinit; fish: trainfit completion fish | source.",
    epilog="example: trainfit completion bash > "
    "~/.local/share/bash-completion/completions/trainfit",
    usage="trainfit completion SHELL",
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
