"""``trainfit memory``: explain a recording, or two at two batch sizes."""

from __future__ import annotations

import argparse
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import UsageError, whole_number
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.screen import add_explain, print_shown
from trainfit.memory.by_hand.hand_formula import by_hand
from trainfit.memory.explain.explanation import Source, explain, source
from trainfit.report.memory.by_hand import by_hand_screen, by_hand_text
from trainfit.report.memory.explain import explain_text
from trainfit.report.memory.screen import memory_screen
from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError
from trainfit.results.plan.result import FORMAT as PLAN
from trainfit.results.plan.result import PlanResult

PARSER: dict[str, Any] = {
    "help": "explain what uses the memory at the peak, between steps and by batch size",
    "description": "Explain a recording of `trainfit simulate`: when memory peaks and what is "
    "allocated then, what stays allocated between steps, a comparison of optimizers, "
    "fragmentation and the allocator settings that would help. With a second "
    "recording of the same script at another batch size, also how memory grows "
    "with the batch size, and up to which batch size that holds.",
    "usage": "trainfit memory [options] RECORDING [RECORDING2]",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "file", type=Path, metavar="RECORDING", help="file of `trainfit simulate --output`"
    )
    parser.add_argument(
        "second",
        type=Path,
        metavar="RECORDING2",
        nargs="?",
        help="recording of the same script at another batch size",
    )
    parser.add_argument(
        "--batch-size",
        type=batch_sizes,
        metavar="N[,N2]",
        default=(),
        help="batch sizes of recordings that do not contain theirs",
    )
    parser.add_argument(
        "--by-hand",
        action="store_true",
        help="compare the usual formula (parameters x 16 bytes, each layer's result, 10 to 30%%) "
        "with the simulated peak, with the reason for each difference",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_explain(
        parser, "all kinds, modules, single allocations, optimizers, allocator settings, notes"
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Explain and print; returns the exit code."""
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
        print_shown(comparison, options, by_hand_screen, by_hand_text)
        return 0
    print_shown(report, options, memory_screen, explain_text)
    return 0 if report.fits else 1


def batch_sizes(text: str) -> tuple[int, ...]:
    """An argparse type: ``8`` or ``8,16``."""
    sizes = tuple(whole_number(part.strip()) for part in text.split(","))
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} names more than two batch sizes")
    return sizes


def _source(path: Path, batch_size: int | None) -> Source:
    """A recording; a plan's file is refused with the command that makes one."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise _no_recording(path)
    return source(path, batch_size)


def _no_recording(path: Path) -> ResultFileError:
    record_it = "record the run: trainfit simulate --gpu GPU -- python train.py"
    text = documents.read(path, record_it)
    if documents.format_of(text) != PLAN:
        return ResultFileError(path, "damaged, or not a recording", record_it)
    result = PlanResult.from_json(text, path)
    return ResultFileError(
        path,
        "a plan has figures only, no allocations",
        f"record the run: trainfit simulate --gpu {shlex.quote(result.gpu)} -- {result.command}",
    )
