"""``trainfit calibrate``: measure this machine's GPU and write its profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainfit.cli.common import progress
from trainfit.cli.output import output_file, print_subject
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.calibration import Processes, calibrate
from trainfit.report.sections.real_runs import profile_subject
from trainfit.results.runs.measurement import StandIn
from trainfit.results.text import printable


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, save and print; returns the exit code."""
    stand_in = None
    if options.rehearse is not None:
        gpu = find_gpu(options.rehearse)
        others = options.other_processes
        stand_in = StandIn(gpu, device_constants(gpu, other_processes_bytes=others))
    output = output_file(options.output)
    profile = calibrate(Processes(stand_in), options.time_limit, progress)
    profile.save(output)
    print_subject(profile, options, profile_subject)
    if not options.json:
        print(f"Profile: {printable(str(output))}")
        print("(use it with `trainfit plan --profile FILE …`, show it with `trainfit show FILE`)")
    return 0
