"""``trainfit memory``: explain a recording, two at two batch sizes, or PyTorch's snapshot.

``trainfit simulate``: record a script on a simulated GPU, and its memory figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    UsageError,
    sandbox_request,
)
from trainfit.cli.job import chosen_device, read_command
from trainfit.cli.output import output_file, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.memory.explanation import RecordingSource, explain, source
from trainfit.memory.hand_formula import by_hand
from trainfit.memory.snapshot_file import is_snapshot
from trainfit.memory.snapshot_report import explain_snapshot
from trainfit.plan.growth_findings import with_growth
from trainfit.plan.job_detail import with_generation
from trainfit.plan.runs.failures import ScriptError, with_stand_ins
from trainfit.plan.runs.simulation import simulate_command
from trainfit.report.sections.by_hand import by_hand_subject
from trainfit.report.sections.memory import memory_subject, recording_subject
from trainfit.report.sections.snapshot import snapshot_subject
from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError
from trainfit.results.plan import PlanResult
from trainfit.results.runs.continuation import whole


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Explain and print; returns the exit code."""
    if is_snapshot(options.file):
        return _snapshot(options)
    files = [each for each in (options.file, options.second) if each is not None]
    if len(options.batch_size) > len(files):
        raise UsageError(
            f"--batch-size names {len(options.batch_size)} batch sizes for "
            f"{len(files)} recording; give a second recording, or one batch size"
        )
    if options.by_hand and options.second is not None:
        raise UsageError("--by-hand expects one recording; leave the second out")
    given = [*options.batch_size, None, None]
    sources = [_source(file, batch) for file, batch in zip(files, given, strict=False)]
    with shown_progress() as progress:
        progress(
            "explaining " + " and ".join(recording_source.file for recording_source in sources)
        )
        if options.by_hand:
            comparison = by_hand(sources[0])
        else:
            report = explain(*sources)
    if options.by_hand:
        print_subject(comparison, options, by_hand_subject)
        return 0
    print_subject(report, options, memory_subject)
    return 0 if report.fits else 1


def _snapshot(options: argparse.Namespace) -> int:
    """Explain what PyTorch wrote on a real GPU."""
    given = {
        "a second file": options.second is not None,
        "--batch-size": bool(options.batch_size),
        "--by-hand": options.by_hand,
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{str(options.file)!r} is a memory snapshot of PyTorch, which is explained by "
                f"itself; leave {name} out"
            )
    with shown_progress() as progress:
        progress(f"explaining {options.file}")
        report = explain_snapshot(options.file)
    print_subject(report, options, snapshot_subject)
    return 0 if report.fits else 1


def _source(path: Path, batch_size: int | None) -> RecordingSource:
    """A recording; a plan's file is refused with the command that makes one."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise _no_recording(path)
    return source(path, batch_size)


def _no_recording(path: Path) -> ResultFileError:
    record_it = "record the run: trainfit simulate --gpu GPU -- python train.py"
    text = documents.read(path, record_it)
    name = documents.format_of(text)
    if name != PlanResult.FILE.name:
        reason = (
            f"its format is {name!r}, not a recording" if name else "damaged, or not a recording"
        )
        return ResultFileError(path, reason, record_it)
    result = PlanResult.from_json(text, path)
    return ResultFileError(
        path,
        "a plan has figures only, no allocations",
        f"record the run: trainfit simulate --gpu {shlex.quote(result.gpu)} -- {result.command}",
    )


def run_simulate(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Simulate and print; returns the exit code."""
    if not command:
        raise UsageError("no script: write `trainfit simulate SCRIPT.py` or `-m MODULE`")
    is_bare = command[0].startswith("-m") or _is_script(command[0])
    parsed = read_command(["python", *command] if is_bare else command, several=True)
    parsed = dataclasses.replace(
        parsed, sandbox=sandbox_request(options), stand_ins=options.assume_installed
    )
    environment = {**os.environ, **parsed.environment()}
    device = chosen_device(options, environment, parsed.processes, parsed.machines)
    parsed = parsed.on(device.gpu.count)
    output = output_file(options.output)
    with shown_progress() as progress:
        made = functools.partial(
            simulate_command,
            gpu=device.gpu,
            steps=options.steps,
            time_limit_s=options.time_limit,
            output=output,
            batch_size=options.batch_size,
            progress=progress,
            constants=device.constants,
        )
        try:
            summary, recording, failure = made(parsed)
        except ScriptError as error:
            summary, recording, failure = made(with_stand_ins(parsed, error, progress))
    summary = with_growth(with_generation(summary, whole(recording)))
    print_subject(summary, options, recording_subject)
    if failure is not None:
        raise failure
    return gated(options, summary, 1 if summary.out_of_memory else 0)


def _is_script(word: str) -> bool:
    return word.endswith(".py") or Path(word).is_dir()
