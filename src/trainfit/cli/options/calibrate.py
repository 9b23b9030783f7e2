"""Options of ``trainfit calibrate``."""

from __future__ import annotations

import argparse
from typing import Any

from trainfit.cli.common import add_explain, memory_size, seconds

PARSER: dict[str, Any] = {
    "usage": "trainfit calibrate [options]",
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
