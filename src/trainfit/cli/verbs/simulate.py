"""``trainfit simulate``: record a script on a simulated GPU, and its memory figures."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    UsageError,
    sandbox_request,
)
from trainfit.cli.job import chosen_device, read_command
from trainfit.cli.output import output_file, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.plan.growth_findings import with_growth
from trainfit.plan.job_detail import with_generation
from trainfit.plan.runs.failures import ScriptError, with_stand_ins
from trainfit.plan.runs.simulation import simulate_command
from trainfit.report.sections.memory import recording_subject
from trainfit.results.runs.continuation import whole


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Simulate and print; returns the exit code."""
    if not command:
        raise UsageError("no script: write `trainfit simulate SCRIPT.py` or `-m MODULE`")
    is_bare = command[0].startswith("-m") or _is_script(command[0])
    parsed = read_command(["python", *command] if is_bare else command, several=True)
    parsed = dataclasses.replace(
        parsed, sandbox=sandbox_request(options), stand_ins=options.assume_installed
    )
    environment = {**os.environ, **parsed.environment()}
    device = chosen_device(options, environment, parsed.processes, parsed.machines)
    parsed = parsed.on(device.gpu.count)
    output = output_file(options.output)
    with shown_progress() as progress:
        made = functools.partial(
            simulate_command,
            gpu=device.gpu,
            steps=options.steps,
            time_limit_s=options.time_limit,
            output=output,
            batch_size=options.batch_size,
            progress=progress,
            constants=device.constants,
        )
        try:
            summary, recording, failure = made(parsed)
        except ScriptError as error:
            summary, recording, failure = made(with_stand_ins(parsed, error, progress))
    summary = with_growth(with_generation(summary, whole(recording)))
    print_subject(summary, options, recording_subject)
    if failure is not None:
        raise failure
    return gated(options, summary, 1 if summary.out_of_memory else 0)


def _is_script(word: str) -> bool:
    return word.endswith(".py") or Path(word).is_dir()
