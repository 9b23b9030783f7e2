"""``trainfit show``: render a result file."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import only_ascii
from trainfit.cli.screen import add_explain, print_plan
from trainfit.memory.explain.summary import summarize
from trainfit.report.gpus.profile import profile_text
from trainfit.report.loader.rehearsal import rehearsal_text
from trainfit.report.loader.text import loader_text
from trainfit.report.machine.doctor import doctor_text
from trainfit.report.machine.pace import pace_text
from trainfit.report.memory.recording import recording_json, recording_text
from trainfit.results.files import documents
from trainfit.results.loader import FORMAT as LOADER
from trainfit.results.loader import LoaderResult
from trainfit.results.machine.doctor import FORMAT as DOCTOR
from trainfit.results.machine.doctor import DoctorResult
from trainfit.results.machine.pace import FORMAT as PACE
from trainfit.results.machine.pace import PaceResult
from trainfit.results.machine.profile import FORMAT as PROFILE
from trainfit.results.machine.profile import Profile
from trainfit.results.plan.result import PlanResult
from trainfit.results.rehearsal import FORMAT as REHEARSAL
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.recording import Recording

PARSER: dict[str, Any] = {
    "help": "show a result file",
    "description": "Show a result file: of `trainfit plan --output`, `trainfit simulate`, "
    "`trainfit calibrate`, or of `trainfit loader`, `rehearse`, `pace` or `doctor` with --output.",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_explain(parser)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the file's content; returns the exit code."""
    path: Path = options.file
    if zipfile.is_zipfile(path):
        summary = summarize(Recording.load(path), str(path))
        print((recording_json if options.json else recording_text)(summary))
        return 0
    text = documents.read(path, "re-create it")
    if documents.format_of(text) == PROFILE:
        profile = Profile.from_json(text, path)
        print(profile.to_json() if options.json else profile_text(profile))
    elif documents.format_of(text) == DOCTOR:
        diagnosis = DoctorResult.from_json(text, path)
        print(diagnosis.to_json() if options.json else doctor_text(diagnosis))
    elif documents.format_of(text) == REHEARSAL:
        rehearsal = Rehearsal.from_json(text, path)
        shown = rehearsal_text(rehearsal, ascii_only=only_ascii())
        print(rehearsal.to_json() if options.json else shown)
    elif documents.format_of(text) == LOADER:
        loader = LoaderResult.from_json(text, path)
        print(loader.to_json() if options.json else loader_text(loader))
    elif documents.format_of(text) == PACE:
        pace = PaceResult.from_json(text, path)
        print(pace.to_json() if options.json else pace_text(pace, ascii_only=only_ascii()))
    else:
        result = PlanResult.from_json(text, path)
        print_plan(result, options)
    return 0
