"""``trainfit batch explain``: what a smaller or larger batch does to learning."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.batch.trade.explain import Question, explain
from trainfit.cli.common import UsageError, add_result, only_ascii, whole_number
from trainfit.cli.noise_input import decay, noise_scale, rate, read_noise
from trainfit.cli.output import given_output
from trainfit.cli.screen import add_explain, print_shown
from trainfit.report.batch.explanation import explanation_screen, explanation_text
from trainfit.results.batch import step_times
from trainfit.results.batch.noise import NoiseResult
from trainfit.results.batch.step_times import StepTime

PARSER: dict[str, Any] = {
    "help": "what a smaller or larger batch does to learning, from your own numbers",
    "description": "Explain the trade between two batch sizes: steps and time to the same loss, "
    "learning rate, accumulation, BatchNorm, uneven batches; each with its source. Batch sizes are "
    "samples of an optimizer step: micro-batch × accumulation × GPUs.",
    "epilog": "example: trainfit batch explain noise.json --to 16 --optimizer adam --lr 1e-4",
}

_SWITCHES = ("--json", "--help", "-h", "--explain", "-v")


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
    parser.add_argument(
        "--noise-scale",
        type=noise_scale,
        metavar="SAMPLES",
        help="noise scale instead of RESULT: 200, or 200:150:280 with its interval",
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="B",
        help="current batch size (default: that of RESULT)",
    )
    parser.add_argument(
        "--to", type=whole_number, required=True, metavar="B", help="batch size to compare with"
    )
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "adam", "adamw", "other"),
        default="other",
        help="decides how the learning rate scales with the batch size",
    )
    parser.add_argument("--lr", type=rate, metavar="X", help="current learning rate")
    parser.add_argument(
        "--beta1", type=decay, default=0.9, metavar="X", help="Adam's current beta1 (0.9)"
    )
    parser.add_argument(
        "--beta2", type=decay, default=0.999, metavar="X", help="Adam's current beta2 (0.999)"
    )
    parser.add_argument(
        "--samples", type=whole_number, metavar="N", help="number of samples in the data set"
    )
    parser.add_argument(
        "--steps", type=whole_number, metavar="N", help="training steps planned at --batch-size"
    )
    parser.add_argument(
        "--accumulation",
        type=whole_number,
        metavar="N",
        help="micro-batches of an optimizer step now (default: those of RESULT, or 1)",
    )
    parser.add_argument(
        "--gpus",
        type=whole_number,
        metavar="N",
        help="GPUs that share a step (default: those of RESULT, of --data, or 1)",
    )
    parser.add_argument(
        "--batch-norm",
        choices=("yes", "no"),
        help="does the model have BatchNorm layers? (default: unknown)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="step times: CSV with micro_batch,accumulation,gpus,seconds, or a plan's result",
    )
    add_result(parser)
    add_explain(parser, "every claim, with its sources in full")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """There is no command: all words are ours, RESULT first wherever it stands.

    argparse gives an optional positional its value only where it follows the one before it.
    """
    options: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(words):
        is_option = words[at].startswith("-") and len(words[at]) > 1
        has_value = is_option and "=" not in words[at] and words[at] not in _SWITCHES
        length = 2 if has_value else 1
        (options if is_option else others).extend(words[at : at + length])
        at += length
    return [*others, *options], []


def _files(options: argparse.Namespace) -> list[Path]:
    given = (options.result, options.noise_scale, options.data)
    return [each for each in given if isinstance(each, Path)]


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Explain and print; returns the exit code."""
    output = given_output(options.output, _files(options))
    if options.result is not None and options.noise_scale is not None:
        raise UsageError("give either RESULT or --noise-scale, not both")
    given = options.result if options.result is not None else options.noise_scale
    noise, source, measured = read_noise(given)
    before = options.batch_size or (measured.batch_size if measured is not None else None)
    if before is None:
        raise UsageError("the current batch size is not known; give --batch-size")
    if before == options.to:
        raise UsageError(f"--to {options.to} is the current batch size; give another")
    times = step_times.read(options.data) if options.data is not None else ()
    gpus = options.gpus or _gpus(measured, times)
    if min(before, options.to) < gpus:
        raise UsageError(
            f"{min(before, options.to)} samples a step on {gpus} GPUs: expected at least "
            "one sample for each GPU"
        )
    result = explain(
        Question(
            before=before,
            after=options.to,
            noise=noise,
            noise_source=source,
            optimizer="adam" if options.optimizer == "adamw" else options.optimizer,
            rate=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            samples=options.samples,
            steps=options.steps,
            gpus=gpus,
            accumulation=_accumulation(options, before, gpus, measured),
            has_batch_norm={"yes": True, "no": False, None: None}[options.batch_norm],
            times=times,
        )
    )
    if output is not None:
        result.save(output)
    screen, whole = (
        functools.partial(shown, ascii_only=only_ascii())
        for shown in (explanation_screen, explanation_text)
    )
    print_shown(result, options, screen, whole)
    return 0


def _gpus(measured: NoiseResult | None, times: Sequence[StepTime]) -> int:
    if measured is not None:
        return measured.ranks
    found = {each.gpus for each in times}
    return found.pop() if len(found) == 1 else 1


def _accumulation(
    options: argparse.Namespace, before: int, gpus: int, measured: NoiseResult | None
) -> int:
    """Of the current step; that of the measured run, unless another step is asked about."""
    given: int | None = options.accumulation
    if given is None:
        is_its = measured is not None and (before, gpus) == (measured.batch_size, measured.ranks)
        return measured.accumulation if measured is not None and is_its else 1
    if before % (given * gpus):
        on = f" on {gpus} GPUs" if gpus > 1 else ""
        raise UsageError(
            f"a step of {before} samples is not {given} equal micro-batches{on}: expected a "
            "divisor in --accumulation; --batch-size is micro-batch × accumulation × GPUs"
        )
    return given
