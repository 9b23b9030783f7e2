"""Options of ``trainfit memory``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.common import add_explain, whole_number

PARSER: dict[str, Any] = {
    "description": "Explain a recording of `trainfit simulate`: when memory peaks and what is "
    "allocated then, what stays allocated between steps, a comparison of optimizers, "
    "fragmentation and the allocator settings that would help. With a second "
    "recording of the same script at another batch size, also how memory grows "
    "with the batch size, and up to which batch size that holds. Or explain a memory snapshot that "
    "PyTorch wrote on a GPU (torch.cuda.memory._dump_snapshot): where memory ran out, or was at "
    "its most, what it consisted of, why, and what would have helped.",
    "usage": "trainfit memory [options] RECORDING [RECORDING2]\n"
    "       trainfit memory [options] SNAPSHOT.pickle",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="RECORDING",
        help="file of `trainfit simulate --output`, or of torch.cuda.memory._dump_snapshot",
    )
    parser.add_argument(
        "second",
        type=Path,
        metavar="RECORDING2",
        nargs="?",
        help="recording of the same script at another batch size",
    )
    parser.add_argument(
        "--batch-size",
        type=batch_sizes,
        metavar="N[,N2]",
        default=(),
        help="batch sizes of recordings that do not contain theirs",
    )
    parser.add_argument(
        "--by-hand",
        action="store_true",
        help="compare the usual formula (parameters x 16 bytes, each layer's result, 10 to 30%%) "
        "with the simulated peak, with the reason for each difference",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_explain(
        parser, "all kinds, modules, single allocations, optimizers, allocator settings, notes"
    )


def batch_sizes(text: str) -> tuple[int, ...]:
    """An argparse type: ``8`` or ``8,16``."""
    sizes = tuple(whole_number(part.strip()) for part in text.split(","))
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} names more than two batch sizes")
    return sizes
