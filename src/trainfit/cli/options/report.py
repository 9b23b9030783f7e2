"""Options of ``trainfit report``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

PARSER: dict[str, Any] = {
    "description": "Make one page of the results of any commands: files of --output, recordings, "
    "folders of `trainfit watch`. An HTML page needs no network and no other file. With -o out.md "
    "the page as Markdown, out.json all results in one document, out.svg the first chart, "
    "out.trace.json a step or a watched run over time, for Perfetto.",
    "epilog": "example: trainfit report plan.json loader.json watch.json -o project.html",
    "usage": "trainfit report [options] RESULT...",
}

#: Ends of names of files that a report is written to: the keys of
#: :data:`trainfit.cli.verbs.report.FORMS`, which takes long to import.
ENDS: Final = (".html", ".md", ".json", ".svg", ".trace.json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"file to write, whose name ends in {ends()}; '-' is standard output, as Markdown "
        "unless --format says otherwise (default: the first result's name with .html, here)",
    )
    parser.add_argument(
        "--format",
        choices=[end.removeprefix(".") for end in ENDS],
        help="format to write, regardless of the file name",
    )


def ends() -> str:
    """The ends in words."""
    *first, last = ENDS
    return f"{', '.join(first)} or {last}"
