"""``trainfit simulate``: record a script on a simulated GPU, and its memory figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import (
    UsageError,
    add_gpu,
    chosen_gpu,
    output_file,
    progress,
    seconds,
    whole_number,
)
from trainfit.plan.command import parse_command
from trainfit.plan.simulation import simulate_command
from trainfit.report.recording_text import recording_json, recording_text

PARSER: dict[str, Any] = {
    "help": "record a script on a simulated GPU and show its memory",
    "description": "Run a script on a simulated GPU for a few optimizer steps, record what it "
    "allocates, and show the memory figures. The GPU's capacity holds: a script that does "
    "not fit meets torch.cuda.OutOfMemoryError as it would there.",
    "usage": "trainfit simulate [options] SCRIPT.py [ARGS …]  |  -m MODULE [ARGS …]",
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_gpu(parser)
    parser.add_argument(
        "--steps", type=whole_number, default=3, help="optimizer steps to simulate (default 3)"
    )
    parser.add_argument(
        "--time-limit", type=seconds, default=600.0, metavar="S", help="seconds for the run"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="recording.trainfit",
        help="where the recording goes (default recording.trainfit)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    words = [*options.words, *command]
    if options.module is not None:
        words = ["python", "-m", options.module, *words]
    elif words and words[0].endswith(".py"):
        words = ["python", *words]
    if not words:
        raise UsageError("no script: write `trainfit simulate SCRIPT.py` or `-m MODULE`")
    gpu, name = chosen_gpu(options.gpu)
    output = output_file(options.output)
    assert output is not None
    summary = simulate_command(
        parse_command(words),
        gpu,
        name,
        steps=options.steps,
        time_limit_s=options.time_limit,
        output=Path(output),
        progress=progress,
    )
    render = recording_json if options.json else recording_text
    print(render(summary))
    return 1 if summary.out_of_memory else 0
