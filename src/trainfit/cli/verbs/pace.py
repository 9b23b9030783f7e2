"""``trainfit pace``: inference at a fixed rate, why it is slow, and a trial of the fix."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from trainfit.cli.automation.fail_if import add_fail_if, gated
from trainfit.cli.common import (
    UsageError,
    add_result,
    duration,
    only_ascii,
)
from trainfit.cli.output import given_output, name_report
from trainfit.cli.progress_bar import shown_progress
from trainfit.hardware.host.system import System
from trainfit.hardware.machine.survey import survey
from trainfit.pace.calls.callee import Callee, Command, function_of
from trainfit.pace.machine.fixes import Fixer
from trainfit.pace.machine.host import RealHost
from trainfit.pace.machine.power_settings import power_facts
from trainfit.pace.machine.settings import Settings
from trainfit.pace.measuring import Options, measure
from trainfit.plan.dataloader.loading_process import Stage
from trainfit.report.machine.pace import pace_text
from trainfit.report.machine.pace_screen import pace_screen
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import printable

PARSER: dict[str, Any] = {
    "help": "inference at a fixed rate: why paced calls are slower, and which fix helps",
    "description": "Time calls back to back and at fixed rates. Where paced calls are slower, "
    "keep the core, the GPU or neither busy between calls, in turns, to find the "
    "cause.",
    "epilog": "example: trainfit pace policy.py:act --setup policy.py:load --hz 15,30,60",
    "usage": "trainfit pace [options] MODULE:CALLABLE\n"
    "       trainfit pace [options] -- COMMAND     (answers each line with one)\n"
    "       trainfit pace --undo",
}
_MOST_RATES, _MOST_HZ = 8, 2000.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("target", nargs="?", metavar="MODULE:CALLABLE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--hz",
        type=rates,
        default=(15.0, 30.0, 60.0),
        metavar="HZ,…",
        help="calls a second, one rate or several (default 15,30,60)",
    )
    parser.add_argument(
        "--duration",
        type=duration,
        default=10.0,
        metavar="S",
        help="seconds at each rate: 10, 10s, 500ms (default 10)",
    )
    parser.add_argument(
        "--setup",
        metavar="MODULE:FN",
        help="called once before the measurement; its return value is the callable's argument",
    )
    parser.add_argument(
        "--fix",
        choices=("spin", "qos", "governor"),
        help="apply a fix and measure before and after: busy-wait, forbid deep idle states, or "
        "set the performance governor (kept if it helped)",
    )
    parser.add_argument(
        "--undo", action="store_true", help="restore what --fix governor changed, and exit"
    )
    parser.add_argument(
        "--no-attribution", action="store_true", help="only measure, without looking for the cause"
    )
    parser.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the whole report: calls over time and as a histogram, evidence, all fixes",
    )
    add_result(parser)
    add_fail_if(parser, "machine.pace:PaceResult")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command behind ``--``; a name alone is ours."""
    if "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    if options.undo:
        return _undo(options, command)
    output = given_output(options.output)
    callee = _callee(options, command)
    name = options.target or " ".join(command)
    wanted = Options(options.hz, options.duration, not options.no_attribution, options.fix)
    try:
        facts = power_facts(survey(System()))
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
    if output is not None:
        result.save(output)
    if options.json:
        print(result.to_json())
    else:
        whole = options.explain
        print(pace_text(result, ascii_only=only_ascii()) if whole else pace_screen(result))
    name_report(output, json=options.json)
    if result.ended == "interrupted":
        sys.stdout.flush()
        raise KeyboardInterrupt
    unfixed = wanted.fix is not None and result.fix_trial is None
    bad = result.ended == "failed" or unfixed or not result.rates
    return gated(options, result, 2 if bad else 0)


class _TargetError(UsageError):
    """Exception in the user's code; ``script_output`` is shown below as its output."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.script_output = traceback.format_exc()


def _callee(options: argparse.Namespace, command: Sequence[str]) -> Callee:
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
        if options.setup is not None:
            raise UsageError("--setup is for a callable; leave it out with a command")
        return Command(command)
    try:
        return function_of(options.target, options.setup)
    except TrainfitError:
        raise
    except (Exception, SystemExit) as error:
        named = f"{options.target!r}" + (f" or --setup {options.setup!r}" if options.setup else "")
        raise _TargetError(
            f"{named} failed before the first call ({type(error).__name__}: {error}); its "
            "traceback is below"
        ) from error


def _undo(options: argparse.Namespace, command: Sequence[str]) -> int:
    if options.target is not None or command or options.fix is not None:
        raise UsageError("--undo restores what --fix governor changed; remove all other options")
    settings = Settings()
    back = settings.undo()
    for path, value in back.items():
        print(f"{printable(path)}: {printable(value)}")
    if not back:
        print(f"nothing to undo ({printable(str(settings.state))} has no settings of this boot)")
    return 0


def rates(text: str) -> tuple[float, ...]:
    """An argparse type: ``30`` or ``15,30,60``, each above 0."""
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not 0 < len(found) <= _MOST_RATES or not all(0 < each <= _MOST_HZ for each in found):
        raise argparse.ArgumentTypeError(
            f"expected up to {_MOST_RATES} rates above 0 and up to {_MOST_HZ:g}, such as "
            f"15,30,60, got {text!r}"
        )
    return tuple(dict.fromkeys(found))
