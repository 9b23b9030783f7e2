"""``trainfit rehearse``: GPU utilization with a command's DataLoader."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    UsageError,
    sandbox_request,
)
from trainfit.cli.output import given_output, name_report, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.verbs.loader import given_step, source
from trainfit.hardware import GpuSpec, find_gpu, local_gpu
from trainfit.plan.dataloader.measurement import rehearse_command
from trainfit.report.sections.rehearsal import rehearsal_subject
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.spec import LoaderSpec, RehearsalSpec, RunSpec, TuningSpec
from trainfit.torch_private import needed

_SETTINGS = (
    *("num_workers", "prefetch_factor", "pin_memory"),
    *("persistent_workers", "in_order", "start_method"),
)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
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
    needed.saw(result.torch)
    print_subject(result, options, rehearsal_subject)
    if output is not None:
        result.save(output)
    name_report(output, json=options.json)
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
