"""``trainfit verify``: run a predicted command for real and compare."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    sandbox_request,
)
from trainfit.cli.output import given_output, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.verification import ThisMachine, read_prediction, verify
from trainfit.report.sections.real_runs import prediction_subject
from trainfit.results.runs.measurement import StandIn


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, compare, print; returns the exit code."""
    output = given_output(options.output, [options.result])
    prediction = read_prediction(options.result, recommended=options.recommended)
    stand_in = None
    if options.rehearse is not None:
        gpu = find_gpu(options.rehearse)
        stand_in = StandIn(gpu, device_constants(gpu))
    with shown_progress() as progress:
        result = verify(
            prediction,
            ThisMachine(stand_in, sandbox_request(options)),
            steps=options.steps,
            tolerance=options.tolerance,
            time_limit_s=options.time_limit,
            progress=progress,
        )
    if output is not None:
        result.save(output)
    print_subject(result, options, prediction_subject)
    return gated(options, result, 0 if result.good else 1)
