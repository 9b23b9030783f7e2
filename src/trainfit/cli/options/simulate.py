"""Options of ``trainfit simulate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    add_device_memory,
    add_explain,
    add_gpu,
    add_json,
    add_protection,
    add_simulation,
    split_command,
    whole_number,
)

PARSER: dict[str, Any] = {
    "description": "Run a script on a simulated GPU for a few optimizer steps, record what it "
    "allocates, and show the memory figures. The GPU's capacity applies: a script that does not "
    "fit gets torch.cuda.OutOfMemoryError.",
    "usage": "trainfit simulate [options] SCRIPT.py [ARGS …]  |  -m MODULE [ARGS …]",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    hardware = parser.add_argument_group("hardware")
    add_gpu(hardware)
    add_device_memory(hardware)
    simulation = parser.add_argument_group("simulation")
    add_simulation(simulation)
    simulation.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size to simulate: replaces {batch_size:…} in the command, or else that of "
        "its DataLoader",
    )
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_json(result)
    add_fail_if(result, "memory:RecordingSummary")
    add_explain(result, "all kinds and modules, memory over the step, notes")
    result.add_argument(
        "--output",
        metavar="FILE",
        default="recording.trainfit",
        help="file to write the recording to (default recording.trainfit)",
    )


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command; it may begin with a script or ``-m MODULE``."""
    return split_command(parser, words, module=True)
