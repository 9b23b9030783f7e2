"""Options of ``trainfit doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

PARSER: dict[str, Any] = {
    "description": "Check this machine (and a script): why PyTorch sees no GPU, and what makes a "
    "job slow or short of memory. Each finding has its evidence, the command that "
    "fixes it, its undo and its cost. Changes nothing. Exit code 1 if something is "
    "bad.",
    "usage": "trainfit doctor [options]",
}

#: Names of the checks: :data:`trainfit.doctor.checks.NAMES`, which takes long to import.
NAMES: Final = (
    *("gpu", "torchvision", "cuda-compat", "gpu-state", "mig", "compute-mode", "gpu-processes"),
    *("gpu-memory", "gpu-clocks", "gpu-temperature", "gpu-power", "ecc", "persistence", "pcie"),
    *("numa", "cores", "threads", "frequency", "idle", "memory", "shm", "disk", "files"),
    *("processes", "container", "scheduler"),
)
#: Of --only: the scripts, without any check of the machine.
SCRIPT: Final = "script"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--script",
        type=Path,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="also read training scripts for costly habits (--only script: nothing else)",
    )
    checks.add_argument(
        "--data",
        metavar="PATH",
        help="file or folder of training data: its storage is checked, its read rate measured",
    )
    known = ", ".join((*NAMES, SCRIPT))
    checks.add_argument(
        "--only", type=_names, metavar="NAMES", help=f"run only these checks, of: {known}"
    )
    checks.add_argument(
        "--skip", type=_names, default=(), metavar="NAMES", help="skip these checks"
    )
    checks.add_argument(
        "--cpu",
        action="store_true",
        help="show the processor as a table: governor and clocks by group of cores, C-states",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the good checks with their figures, and what each GPU does now",
    )
    choice = result.add_mutually_exclusive_group()
    choice.add_argument("--json", action="store_true", help="print one JSON document instead")
    choice.add_argument(
        "--format",
        choices=("sarif",),
        help="print what was found in the scripts, and nothing else, as SARIF 2.1.0",
    )
    result.add_argument("--output", metavar="FILE", help="also write the result to a file")
    recorded = parser.add_argument_group("recorded machine")
    recorded.add_argument(
        "--record", metavar="FILE", help="also record the machine to a file that --machine reads"
    )
    recorded.add_argument(
        "--machine", type=Path, metavar="FILE", help="check a recorded machine instead of this one"
    )


def _names(text: str) -> tuple[str, ...]:
    """An argparse type: ``gpu,shm``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
