"""``trainfit show``: render a result file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainfit.cli.automation.fail_if import add_fail_if, gated
from trainfit.cli.automation.formats import METRICS, SARIF, add_format, formatted
from trainfit.cli.common import only_ascii
from trainfit.cli.screen import add_explain, print_plan
from trainfit.cli.verbs.watched.printing import print_result
from trainfit.memory.explain.summary import summarize
from trainfit.report.batch.explanation import explanation_text
from trainfit.report.batch.noise import noise_text
from trainfit.report.gpus.catalogue import gpus_text
from trainfit.report.gpus.comparison import comparison_text
from trainfit.report.gpus.profile import profile_text
from trainfit.report.loader.rehearsal import rehearsal_text
from trainfit.report.loader.text import loader_text
from trainfit.report.machine.doctor import doctor_screen, doctor_text
from trainfit.report.machine.pace import pace_text
from trainfit.report.machine.pace_screen import pace_screen
from trainfit.report.memory.recording import recording_json, recording_text
from trainfit.report.plan.verification import verification_text
from trainfit.results.batch.explanation import BatchExplanation
from trainfit.results.batch.noise import NoiseResult
from trainfit.results.kinds import read
from trainfit.results.loader.rehearsal import Rehearsal
from trainfit.results.loader.result import LoaderResult
from trainfit.results.machine.doctor import DoctorResult
from trainfit.results.machine.gpus import GpusResult
from trainfit.results.machine.pace import PaceResult
from trainfit.results.machine.profile import Profile
from trainfit.results.plan.gpu_comparison import GpuComparison
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.verification import Verification as PlanVerification
from trainfit.results.runs.recording import Recording
from trainfit.results.watch.comparison import Comparison
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.verification import Verification

PARSER: dict[str, Any] = {
    "help": "show a result file",
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


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the file's content; returns the exit code."""
    path: Path = options.file
    result = read(path)
    if isinstance(result, Recording):
        summary = summarize(result, str(path))
        code = gated(options, summary, 0)
        print(
            formatted(summary, options)
            or (recording_json if options.json else recording_text)(summary)
        )
        return code
    code = gated(options, result, 0)
    if (form := formatted(result, options)) is not None:
        print(form)
    elif isinstance(result, PlanResult):
        print_plan(result, options)
    elif isinstance(result, WatchResult | Comparison | Verification):
        print_result(result, json=options.json, whole=options.explain)
    else:
        shown = _TEXTS if options.explain else {**_TEXTS, **_SCREENS}
        text = None if options.json else shown.get(type(result))
        print(result.to_json() if text is None else text(result))
    return code


def _rehearsal(result: Rehearsal) -> str:
    return rehearsal_text(result, ascii_only=only_ascii())


def _pace(result: PaceResult) -> str:
    return pace_text(result, ascii_only=only_ascii())


def _batch(result: BatchExplanation) -> str:
    return explanation_text(result, ascii_only=only_ascii())


#: How a result is shown that has no options of its own; one that no text exists for, as JSON.
_TEXTS: Final[Mapping[type, Callable[[Any], str]]] = {
    Profile: profile_text,
    DoctorResult: doctor_text,
    Rehearsal: _rehearsal,
    LoaderResult: loader_text,
    PaceResult: _pace,
    NoiseResult: noise_text,
    BatchExplanation: _batch,
    GpuComparison: comparison_text,
    GpusResult: gpus_text,
    PlanVerification: verification_text,
}
#: The shorter ones where the whole text is not asked for.
_SCREENS: Final[Mapping[type, Callable[[Any], str]]] = {
    DoctorResult: doctor_screen,
    PaceResult: pace_screen,
}
