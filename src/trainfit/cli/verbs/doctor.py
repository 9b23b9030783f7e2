"""``trainfit doctor``: what this machine is, what is wrong with it, and how to fix it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence

from trainfit.cli.common import UsageError
from trainfit.cli.machine_options import SCRIPT
from trainfit.cli.output import give, given_output, print_lines
from trainfit.doctor.checks import chosen, diagnose
from trainfit.hardware.machine.recorded import RecordingSystem, replayed
from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System
from trainfit.lint.api import read_scripts
from trainfit.report.sections.doctor import (
    CPU_CHECKS,
    cpu_subject,
    doctor_subject,
    script_subject,
)
from trainfit.report.writers.sarif import sarif_text
from trainfit.report.writers.terminal import whole
from trainfit.results.doctor import DoctorResult
from trainfit.results.files import documents
from trainfit.version import __version__


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
    if not options.script and (options.format or SCRIPT in (options.only or ())):
        raise UsageError("nothing to read: name the scripts, as in --script train.py")
    only = [name for name in options.only or () if name != SCRIPT]
    if (options.only and not only) or options.format:
        return _scripts_alone(options)
    names = chosen(CPU_CHECKS if options.cpu else only or None, options.skip)
    output = given_output(options.output, options.script or ())
    record = given_output(options.record)
    script, unreadable = read_scripts(options.script or ())
    if unreadable and script is None:
        raise unreadable[0]
    system = _system(options)
    began = time.monotonic()
    machine = survey(system, options.data)
    if record is not None and isinstance(system, RecordingSystem):
        documents.save(record, json.dumps(system.document(), indent=1))
    result = DoctorResult(
        checks=diagnose(machine, names, script.pools if script is not None else None),
        machine=machine,
        script=script,
        seconds=time.monotonic() - began,
        trainfit=__version__,
    )
    give(result, options, cpu_subject if options.cpu else doctor_subject, output)
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
        print_lines(sarif_text(report) if options.format else whole(script_subject(report)))
    if unreadable:
        raise unreadable[0]
    return 1 if report is not None and report.findings else 0


def _system(options: argparse.Namespace) -> System:
    if options.machine is not None:
        return replayed(options.machine)
    return RecordingSystem() if options.record is not None else System()
