"""``trainfit batch explain``: what a smaller or larger batch does to learning."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainfit.batch.explain import Question, explain
from trainfit.cli.common import UsageError
from trainfit.cli.output import give, given_output
from trainfit.cli.values import read_noise
from trainfit.report.sections.batch import trade_subject
from trainfit.results import batch
from trainfit.results.batch import NoiseResult, StepTime


def _files(options: argparse.Namespace) -> list[Path]:
    given = (options.result, options.noise_scale, options.data)
    return [path for path in given if isinstance(path, Path)]


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
    times = batch.read(options.data) if options.data is not None else ()
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
    give(result, options, trade_subject, output)
    return 0


def _gpus(measured: NoiseResult | None, times: Sequence[StepTime]) -> int:
    if measured is not None:
        return measured.ranks
    counts = {time.gpus for time in times}
    return counts.pop() if len(counts) == 1 else 1


def _accumulation(
    options: argparse.Namespace, before: int, gpus: int, measured: NoiseResult | None
) -> int:
    """The accumulation of the current step; that of the measured run, unless another step is asked
    about."""
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
