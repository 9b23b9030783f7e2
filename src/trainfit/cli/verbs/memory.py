"""``trainfit memory``: explain a recording, two at two batch sizes, or PyTorch's snapshot."""

from __future__ import annotations

import argparse
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.cli.output import print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.memory.explanation import RecordingSource, explain, source
from trainfit.memory.hand_formula import by_hand
from trainfit.memory.snapshot.file import is_snapshot
from trainfit.memory.snapshot.report import explain_snapshot
from trainfit.report.sections.by_hand import by_hand_subject
from trainfit.report.sections.memory import memory_subject
from trainfit.report.sections.snapshot import snapshot_subject
from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError
from trainfit.results.plan import PlanResult


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
        progress("explaining " + " and ".join(each.file for each in sources))
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
