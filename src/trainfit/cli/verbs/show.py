"""``trainfit show``: render a result file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.cli.automation import formatted, gated
from trainfit.cli.output import print_plan, print_subject
from trainfit.cli.verbs.watched import print_result
from trainfit.memory.explanation import summarize
from trainfit.plan.growth_findings import with_growth
from trainfit.report.blocks import Entry
from trainfit.report.page import subject_of
from trainfit.report.sections.memory import recording_subject
from trainfit.results.batch import BatchExplanation, NoiseResult
from trainfit.results.doctor import DoctorResult
from trainfit.results.gpus import GpusResult, Profile
from trainfit.results.kinds import read
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import SnapshotReport
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.real_runs import Verification as PlanVerification
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.sweep import SweepResult
from trainfit.results.speed import GpuComparison
from trainfit.results.watch import Comparison, Verification, WatchResult


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the file's content; returns the exit code."""
    path: Path = options.file
    result = read(path)
    if isinstance(result, Recording):
        summary = with_growth(summarize(result, str(path)))
        code = gated(options, summary, 0)
        if (form := formatted(summary, options)) is not None:
            print(form)
        else:
            print_subject(summary, options, recording_subject)
        return code
    code = gated(options, result, 0)
    if (form := formatted(result, options)) is not None:
        print(form)
    elif isinstance(result, PlanResult):
        print_plan(result, options)
    elif isinstance(result, WatchResult | Comparison | Verification):
        print_result(result, json=options.json, whole=options.explain)
    elif isinstance(result, _SECTIONED):
        print_subject(result, options, lambda found: subject_of(Entry(str(path), found)))
    else:
        print(result.to_json())
    return code


_SECTIONED: Final = (
    LoaderResult,
    PaceResult,
    NoiseResult,
    BatchExplanation,
    Profile,
    GpuComparison,
    SweepResult,
    GpusResult,
    PlanVerification,
    SnapshotReport,
    DoctorResult,
    Rehearsal,
)
