"""``trainfit verify`` and ``calibrate``: real runs, to check a prediction or measure the GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    progress,
    sandbox_request,
)
from trainfit.cli.job import check_others
from trainfit.cli.output import give, given_output, output_file, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.calibration import Processes, calibrate
from trainfit.plan.verification import ThisMachine, read_prediction, verify
from trainfit.report.sections.real_runs import prediction_subject, profile_subject
from trainfit.results.runs.measurement import StandIn
from trainfit.results.text import printable


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
    give(result, options, prediction_subject, output)
    return gated(options, result, 0 if result.good else 1)


# ---
# ``trainfit calibrate``: measure this machine's GPU and write its profile.


def run_calibrate(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, save and print; returns the exit code."""
    stand_in = None
    if options.rehearse is not None:
        gpu = find_gpu(options.rehearse)
        others = options.other_processes
        check_others(others or 0, gpu)
        stand_in = StandIn(gpu, device_constants(gpu, other_processes_bytes=others))
    output = output_file(options.output)
    profile = calibrate(Processes(stand_in), options.time_limit, progress)
    profile.save(output)
    print_subject(profile, options, profile_subject)
    if not options.json:
        print(f"Profile: {printable(str(output))}")
        print("(use it with `trainfit plan --profile FILE …`, show it with `trainfit show FILE`)")
    return 0
