"""What the scripts share that read files of the truth campaign (bench/gpu)."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from _bench import ABSENT, parser, say
from _truth_files import AnyTruth, read_truth

from trainfit.hardware.context_memory import gpu_of_profile
from trainfit.plan.calibration import of_this_model
from trainfit.results.gpus import Profile

TRUTH = Path(__file__).resolve().parent / "gpu" / "truth"

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


def truth_options(about: str | None, quick: str) -> argparse.ArgumentParser:
    """The options of such a script; ``quick`` is what ``--quick`` does."""
    made = parser(about, quick=quick)
    made.add_argument("--truth", type=Path, default=TRUTH, help="folder of truth files")
    made.add_argument("--only", default="*", metavar="PATTERN", help="names to compare")
    made.add_argument("--jobs", type=_jobs, default=2, help="processes (2)")
    made.add_argument(
        "--rehearsal", action="store_true",
        help="compare files that were recorded on a simulated GPU: checks the machinery only",
    )  # fmt: skip
    return made


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def read_truths(options: argparse.Namespace) -> Iterator[AnyTruth]:
    """What the folder holds, of a real GPU or (``--rehearsal``) of a simulated one.

    Raises ``ResultFileError`` for a damaged file.
    """
    for path in sorted(options.truth.glob("*.json*")):
        name = path.name.partition(".")[0]
        other = name == "campaign" or path.name.endswith(".part")
        if other or not fnmatch.fnmatch(name, options.only):
            continue
        found = read_truth(path)
        if found is not None and found.simulated is options.rehearsal:
            yield found


def read_profile(path: Path) -> Profile:
    """With its programs' kernels as a plan would have them.

    Raises ``ResultFileError``, or ``CalibrationError`` where they cannot be simulated.
    """
    profile = Profile.load(path)
    rates = of_this_model(profile.rates, gpu_of_profile(profile))
    return dataclasses.replace(profile, rates=rates)


def say_none(text: str, options: argparse.Namespace) -> int:
    """Nothing was recorded: print how to; returns the exit status."""
    text = text.format(folder=options.truth)
    if options.json:
        print(json.dumps({"figures": [], "details": {"truth": "none was recorded yet"}}))
        print(text, file=sys.stderr)
    else:
        print(text)
    return ABSENT


def say_rehearsal(options: argparse.Namespace) -> None:
    """Above the tables, and not within them: stdout has the results alone."""
    if options.rehearsal:
        say("a rehearsal: the simulation compared with itself, no truth\n")


def prefix(options: argparse.Namespace) -> str:
    """Of the names of figures."""
    return "rehearsal" if options.rehearsal else "truth"


def in_processes(
    function: Callable[[_Given], _Found], given: Sequence[_Given], jobs: int
) -> list[_Found]:
    """A process for each: a simulation leaves nothing behind for the next."""
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        return pool.map(function, given, chunksize=1)
