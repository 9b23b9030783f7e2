"""``trainfit pace``: inference at a fixed rate, why it is slow, and a trial of the fix."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from trainfit.cli.automation import gated
from trainfit.cli.common import (
    UsageError,
)
from trainfit.cli.output import give, given_output
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System
from trainfit.pace.callee import CommandCallee, PacedCallee, function_of
from trainfit.pace.fixes import Fixer
from trainfit.pace.host import RealHost
from trainfit.pace.measuring import PaceOptions, measure
from trainfit.pace.settings import SystemSettings, power_facts
from trainfit.plan.dataloader.process import Stage
from trainfit.report.sections.pace import pace_subject
from trainfit.results.text import printable


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    if options.undo:
        return _undo(options, command)
    output = given_output(options.output)
    callee = _callee(options, command)
    name = options.target or " ".join(command)
    wanted = PaceOptions(options.hz, options.duration, not options.no_attribution, options.fix)
    try:
        facts = power_facts(survey(System(), imports_torch=False))
        with shown_progress() as shown:
            began = time.monotonic()

            def progress(text: str, share: float) -> None:
                stage = Stage(text, time.monotonic() - began, share)
                shown.stage(stage)
                shown.tick(stage)

            result = measure(
                callee,
                RealHost(),
                wanted,
                target=name,
                progress=progress,
                say=shown.warn,
                machine=facts,
            )
    finally:
        callee.close()
    give(result, options, pace_subject, output, page=True)
    if result.ended == "interrupted":
        sys.stdout.flush()
        raise KeyboardInterrupt
    unfixed = wanted.fix is not None and result.fix_trial is None
    if result.ended == "failed" or unfixed or not (result.rates or result.unheld):
        return gated(options, result, 2)
    return gated(options, result, 1 if result.unheld else 0)


def _callee(options: argparse.Namespace, command: Sequence[str]) -> PacedCallee:
    if options.target is not None and command:
        raise UsageError("give either a callable or a command, not both")
    if options.target is None and not command:
        raise UsageError(
            "nothing to call: name a callable, as in `trainfit pace policy.py:act`, or write a "
            "command that answers line by line after --"
        )
    why = Fixer().why_not(options.fix) if options.fix is not None else ""
    if why:
        raise UsageError(f"--fix {options.fix}: {why}")
    if command:
        for name in ("setup", "rehearse"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for a callable; leave it out with a command")
        return CommandCallee(command)
    return function_of(options.target, options.setup, options.rehearse)


def _undo(options: argparse.Namespace, command: Sequence[str]) -> int:
    if options.target is not None or command or options.fix is not None:
        raise UsageError("--undo restores what --fix governor changed; remove all other options")
    settings = SystemSettings()
    back = settings.undo()
    for path, value in back.items():
        print(f"{printable(path)}: {printable(value)}")
    if not back:
        print(f"nothing to undo ({printable(str(settings.state))} has no settings of this boot)")
    return 0
