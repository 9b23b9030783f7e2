"""Options of ``trainfit batch``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.common import add_explain, add_result, whole_number
from trainfit.cli.values import decay, noise_scale, rate

PARSER: dict[str, Any] = {
    "usage": "trainfit batch explain [RESULT] --to B [options]",
    "description": "Explain the trade between two batch sizes: steps and time to the same loss, "
    "learning rate, accumulation, BatchNorm, uneven batches; each with its source. Batch sizes are "
    "samples of an optimizer step: micro-batch × accumulation × GPUs.",
    "epilog": "example: trainfit batch explain noise.json --to 16 --optimizer adam --lr 1e-4",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("action", choices=("explain",), metavar="explain", help="the trade")
    parser.add_argument(
        "result",
        nargs="?",
        type=Path,
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
        type=Path,
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
