"""``trainfit simulate``: record a script on a simulated GPU, and its memory figures."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import (
    UsageError,
    add_device_memory,
    add_gpu,
    add_protection,
    add_simulation,
    chosen_device,
    read_command,
    sandbox_request,
    split_command,
    whole_number,
)
from trainfit.cli.output import output_file
from trainfit.cli.progress_bar import shown_progress
from trainfit.plan.runs.simulation import simulate_command
from trainfit.report.memory.recording import recording_json, recording_text

PARSER: dict[str, Any] = {
    "help": "record a script on a simulated GPU and show its memory",
    "description": "Run a script on a simulated GPU for a few optimizer steps, record what it "
    "allocates, and show the memory figures. The GPU's capacity applies: a script that does not "
    "fit gets torch.cuda.OutOfMemoryError.",
    "usage": "trainfit simulate [options] SCRIPT.py [ARGS …]  |  -m MODULE [ARGS …]",
}

_WITH_VALUE = (
    *("--gpu", "--profile", "--other-processes"),
    *("--steps", "--time-limit", "--output", "--batch-size", "--keep-writes"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_gpu(parser)
    add_device_memory(parser)
    add_simulation(parser)
    add_protection(parser)
    parser.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size to simulate: replaces {batch_size:…} in the command, or else that of "
        "its DataLoader",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="recording.trainfit",
        help="file to write the recording to (default recording.trainfit)",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command; it may begin with a script or ``-m MODULE``."""
    return split_command(words, _WITH_VALUE, module=True)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Simulate and print; returns the exit code."""
    if not command:
        raise UsageError("no script: write `trainfit simulate SCRIPT.py` or `-m MODULE`")
    is_bare = command[0].startswith("-m") or _is_script(command[0])
    parsed = read_command(["python", *command] if is_bare else command)
    parsed = dataclasses.replace(parsed, sandbox=sandbox_request(options))
    device = chosen_device(options, {**os.environ, **parsed.environment()})
    output = output_file(options.output)
    with shown_progress() as progress:
        summary, failure = simulate_command(
            parsed,
            device.gpu,
            steps=options.steps,
            time_limit_s=options.time_limit,
            output=output,
            batch_size=options.batch_size,
            progress=progress,
            constants=device.constants,
        )
    print((recording_json if options.json else recording_text)(summary))
    if failure is not None:
        raise failure
    return 1 if summary.out_of_memory else 0


def _is_script(word: str) -> bool:
    return word.endswith(".py") or Path(word).is_dir()
