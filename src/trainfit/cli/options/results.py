"""Options of the verbs that read results, and of ``trainfit completion``."""

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
