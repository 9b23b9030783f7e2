"""``trainfit doctor``: what this machine is, what is wrong with it, and how to fix it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import UsageError
from trainfit.cli.output import given_output
from trainfit.doctor.diagnose import NAMES, chosen, diagnose
from trainfit.hardware.host.recorded import Recorder, replayed
from trainfit.hardware.host.system import System
from trainfit.hardware.machine.survey import survey
from trainfit.lint.api import read_scripts
from trainfit.report.machine.cpu import CHECKS, cpu_text
from trainfit.report.machine.doctor import doctor_screen, doctor_text
from trainfit.report.machine.sarif import sarif_text
from trainfit.report.machine.script import script_text
from trainfit.results.files import documents
from trainfit.results.machine.doctor import DoctorResult
from trainfit.version import __version__

PARSER: dict[str, Any] = {
    "help": "find out why PyTorch sees no GPU, and what makes jobs slow or short of memory",
    "description": "Check this machine (and a script): why PyTorch sees no GPU, and what makes a "
    "job slow or short of memory. Each finding has its evidence, the command that "
    "fixes it, its undo and its cost. Changes nothing. Exit code 1 if something is "
    "bad.",
    "usage": "trainfit doctor [options]",
}

#: Of --only: the scripts, without any check of the machine.
_SCRIPT = "script"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--script",
        type=Path,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="also read training scripts for costly habits (--only script: nothing else)",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="file or folder of training data: its storage is checked, its read rate measured",
    )
    known = ", ".join((*NAMES, _SCRIPT))
    parser.add_argument(
        "--only", type=_names, metavar="NAMES", help=f"run only these checks, of: {known}"
    )
    parser.add_argument(
        "--skip", type=_names, default=(), metavar="NAMES", help="skip these checks"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="show the processor as a table: governor and clocks by group of cores, C-states",
    )
    parser.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the good checks with their figures, and what each GPU does now",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--json", action="store_true", help="print one JSON document instead")
    choice.add_argument(
        "--format",
        choices=("sarif",),
        help="print what was found in the scripts, and nothing else, as SARIF 2.1.0",
    )
    parser.add_argument("--output", metavar="FILE", help="also write the result to a file")
    parser.add_argument(
        "--record", metavar="FILE", help="also record the machine to a file that --machine reads"
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="check a recorded machine instead of this one"
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Without a command: all words are options."""
    return list(words), []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Check and print; returns the exit code."""
    if options.machine is not None and options.record is not None:
        raise UsageError("--record records this machine; remove --machine")
    if options.data is not None and options.machine is None and not os.path.exists(options.data):
        raise UsageError(f"--data {options.data!r}: there is no such file; check the path")
    if options.cpu and (options.only or options.skip or options.script or options.data):
        raise UsageError(
            "--cpu shows only the processor; remove --only, --skip, --script and --data"
        )
    if not options.script and (options.format or _SCRIPT in (options.only or ())):
        raise UsageError("nothing to read: name the scripts, as in --script train.py")
    only = [name for name in options.only or () if name != _SCRIPT]
    if (options.only and not only) or options.format:
        return _scripts_alone(options)
    names = chosen(CHECKS if options.cpu else only or None, options.skip)
    output = given_output(options.output, options.script or ())
    record = given_output(options.record)
    script, unreadable = read_scripts(options.script or ())
    if unreadable and script is None:
        raise unreadable[0]
    system = _system(options)
    began = time.monotonic()
    machine = survey(system, options.data)
    if record is not None and isinstance(system, Recorder):
        documents.save(record, json.dumps(system.document(), indent=1))
    result = DoctorResult(
        checks=diagnose(machine, names, script.pools if script is not None else None),
        machine=machine,
        script=script,
        seconds=time.monotonic() - began,
        trainfit=__version__,
    )
    if output is not None:
        result.save(output)
    shown = cpu_text if options.cpu else doctor_text if options.explain else doctor_screen
    print(result.to_json() if options.json else shown(result))
    if unreadable:
        raise unreadable[0]
    return 1 if result.is_bad else 0


def _scripts_alone(options: argparse.Namespace) -> int:
    """The scripts' findings without a look at the machine; 1 where there are some."""
    for name in ("json", "output", "record", "machine", "data"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is about the machine: remove --format and --only script, or --{name}"
            )
    report, unreadable = read_scripts(options.script)
    if report is not None:
        print(sarif_text(report) if options.format else script_text(report))
    if unreadable:
        raise unreadable[0]
    return 1 if report is not None and report.findings else 0


def _system(options: argparse.Namespace) -> System:
    if options.machine is not None:
        return replayed(options.machine)
    return Recorder() if options.record is not None else System()


def _names(text: str) -> tuple[str, ...]:
    """An argparse type: ``gpu,shm``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
