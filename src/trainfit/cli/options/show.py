"""Options of ``trainfit show``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainfit.cli.automation import METRICS, SARIF, add_fail_if, add_format
from trainfit.cli.common import add_explain

PARSER: dict[str, Any] = {
    "usage": "trainfit show [options] FILE",
    "description": "Show a result file: of `trainfit plan --output`, `trainfit simulate`, "
    "`trainfit calibrate`, or of `trainfit loader`, `rehearse`, `watch`, `compare`, `pace`, "
    "`batch` or `doctor` with --output; of NoiseScale.save.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_explain(parser)
    add_fail_if(parser)
    add_format(parser, METRICS, SARIF)
