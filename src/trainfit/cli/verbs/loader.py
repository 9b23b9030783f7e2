"""``trainfit loader`` and ``rehearse``: a DataLoader's settings, and GPU utilization with them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    UsageError,
    sandbox_request,
)
from trainfit.cli.job import read_command
from trainfit.cli.output import give, given_output
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import GpuSpec, find_gpu, local_gpu
from trainfit.plan.command.parsing import Command
from trainfit.plan.dataloader.measurement import rehearse_command, tune_command
from trainfit.plan.runs.failures import ScriptError
from trainfit.report.blocks import Subject
from trainfit.report.sections.loader import loader_subject
from trainfit.report.sections.rehearsal import rehearsal_subject
from trainfit.results.loader import LoaderResult
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RehearsalSpec, RunSpec, TuningSpec
from trainfit.results.text import short
from trainfit.torch_private import needed


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
        tuned = tune_command(
            parsed,
            loader_run(options),
            progress,
            sandbox=sandbox_request(options),
            fills_options=True,
        )
    result = tuned.result
    _tell(result, options, loader_subject, output)
    if tuned.interrupt is not None:
        raise tuned.interrupt
    _check_ran(result)
    return gated(options, result, 0)


def _tell(
    result: LoaderResult | Rehearsal,
    options: argparse.Namespace,
    subject: Callable[[Any], Subject],
    output: Path | None,
) -> None:
    """Save a result where that is asked for, and print it."""
    needed.saw(result.torch)
    give(result, options, subject, output, page=True)


def _check_ran(result: LoaderResult) -> None:
    """Raise :class:`ScriptError` where no settings of the loader gave a batch."""
    if not result.candidates and result.faults:
        fix = short(result.faults[-1].fix.action)
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
        return dataclasses.replace(_parse(command, verb), sandbox=sandbox_request(options))
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


def loader_run(options: argparse.Namespace) -> RunSpec:
    """What is asked of the measurement."""
    tuning = TuningSpec(
        step=given_step(options.step_time),
        seconds=options.probe_time,
        confirm=options.confirm,
        max_workers=options.max_workers,
        any_order=options.any_order,
        ranks=options.ranks,
    )
    return RunSpec(
        gpu=find_gpu(options.gpu) if options.gpu is not None else None,
        time_limit_s=options.time_limit,
        loading=LoaderSpec(tuning, place=options.loader or "", batch_size=options.batch_size),
    )


def given_step(step_s: float | None) -> Consumer | None:
    """What ``--step-time`` says; nothing is known of how busy it keeps a core."""
    return Consumer(step_s, source="given") if step_s is not None else None


# ---
# ``trainfit rehearse``: GPU utilization with a command's DataLoader.


_SETTINGS = (
    *("num_workers", "prefetch_factor", "pin_memory"),
    *("persistent_workers", "in_order", "start_method"),
)


def run_rehearse(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Rehearse and print; returns the exit code."""
    output = given_output(options.output)
    compare = LoaderResult.load(options.compare) if options.compare is not None else None
    parsed = source(options, command, "rehearse")
    spec = RunSpec(
        gpu=_gpu(options),
        time_limit_s=options.time_limit,
        loading=LoaderSpec(
            TuningSpec(given_step(options.step_time)),
            place=options.loader or "",
            batch_size=options.batch_size,
        ),
    )
    rehearsal = RehearsalSpec(
        options.duration, **{name: getattr(options, name) for name in _SETTINGS}
    )
    with shown_progress() as progress:
        rehearsed = rehearse_command(
            parsed, spec, rehearsal, progress, compare, sandbox_request(options)
        )
    result = rehearsed.result
    _tell(result, options, rehearsal_subject, output)
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
