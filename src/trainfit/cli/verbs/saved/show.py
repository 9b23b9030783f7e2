"""``trainfit show``: render a result file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.cli.automation.fail_if import gated
from trainfit.cli.automation.formats import formatted
from trainfit.cli.screen import Report, print_plan, print_shown
from trainfit.cli.verbs.watched.printing import print_result
from trainfit.memory.explain.summary import summarize
from trainfit.report.batch.explanation import explanation_screen, explanation_text
from trainfit.report.batch.noise import noise_screen, noise_text
from trainfit.report.gpus.catalogue import gpus_screen, gpus_text
from trainfit.report.gpus.comparison import comparison_screen, comparison_text
from trainfit.report.gpus.profile import profile_screen, profile_text
from trainfit.report.loader.rehearsal import rehearsal_screen, rehearsal_text
from trainfit.report.loader.screen import loader_screen
from trainfit.report.loader.text import loader_text
from trainfit.report.machine.doctor import doctor_lines, doctor_screen
from trainfit.report.machine.pace import pace_text
from trainfit.report.machine.pace_screen import pace_screen
from trainfit.report.memory.recording import recording_json, recording_text
from trainfit.report.memory.screen import recording_screen
from trainfit.report.plan.verification import verification_screen, verification_text
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


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the file's content; returns the exit code."""
    path: Path = options.file
    result = read(path)
    if isinstance(result, Recording):
        summary = summarize(result, str(path))
        code = gated(options, summary, 0)
        if (form := formatted(summary, options)) is not None:
            print(form)
        else:
            json = recording_json(summary) if options.json else ""
            print_shown(summary, options, recording_screen, recording_text, json)
        return code
    code = gated(options, result, 0)
    if (form := formatted(result, options)) is not None:
        print(form)
    elif isinstance(result, PlanResult):
        print_plan(result, options)
    elif isinstance(result, WatchResult | Comparison | Verification):
        print_result(result, json=options.json, whole=options.explain)
    elif type(result) in _SHOWN:
        print_shown(result, options, *_SHOWN[type(result)])
    else:
        print(result.to_json())
    return code


#: How a result is shown: its screen, and the whole; one that no text exists for is shown as JSON.
_SHOWN: Final[Mapping[type, tuple[Report, Report]]] = {
    Profile: (profile_screen, profile_text),
    DoctorResult: (doctor_screen, doctor_lines),
    Rehearsal: (rehearsal_screen, rehearsal_text),
    LoaderResult: (loader_screen, loader_text),
    PaceResult: (pace_screen, pace_text),
    NoiseResult: (noise_screen, noise_text),
    BatchExplanation: (explanation_screen, explanation_text),
    GpuComparison: (comparison_screen, comparison_text),
    GpusResult: (gpus_screen, gpus_text),
    PlanVerification: (verification_screen, verification_text),
}
