"""``trainfit calibrate``: measure this machine's GPU and write its profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainfit.cli.common import memory_size, progress, seconds
from trainfit.cli.output import output_file
from trainfit.cli.screen import add_explain, print_shown
from trainfit.hardware import device_constants, find_gpu
from trainfit.plan.real_machine.calibrate import calibrate
from trainfit.plan.real_machine.processes import Processes
from trainfit.report.gpus.profile import profile_screen, profile_text
from trainfit.results.runs.measurement import StandIn
from trainfit.results.text import printable

PARSER: dict[str, Any] = {
    "help": "measure this machine's GPU and write a profile for plan and simulate",
    "description": "Measure the GPU: the CUDA context and what libraries add to it, workspaces, "
    "rates of matmuls and copies, the cost of a kernel launch. Needs less than three minutes, "
    "during which nothing else should use the GPU.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="profile.json",
        help="file to write the profile to (default profile.json)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=180.0,
        metavar="S",
        help="time limit in seconds; what has not been measured by then is left out (default 180)",
    )
    parser.add_argument(
        "--rehearse",
        metavar="GPU",
        help="run everything on a simulated GPU instead; plan refuses such a profile",
    )
    parser.add_argument(
        "--other-processes",
        type=memory_size,
        default=0,
        metavar="SIZE",
        help="with --rehearse: memory of the simulated GPU that other processes use",
    )
    parser.add_argument("--json", action="store_true", help="print the profile's JSON instead")
    add_explain(parser, "convolution workspaces, notes")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


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
    print_shown(profile, options, profile_screen, profile_text)
    if not options.json:
        print(f"Profile: {printable(str(output))}")
        print("(use it with `trainfit plan --profile FILE …`, show it with `trainfit show FILE`)")
    return 0
