"""Options of ``trainfit pace``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    add_result,
    duration,
)
from trainfit.results.pace import FixName

PARSER: dict[str, Any] = {
    "description": "Time calls back to back and at fixed rates. Where paced calls are slower, "
    "keep the core, the GPU or neither busy between calls, in turns, to find the "
    "cause. Exit code 1: a rate cannot be held.",
    "epilog": "example: trainfit pace policy.py:act --setup policy.py:load --hz 15,30,60",
    "usage": "trainfit pace [options] MODULE:CALLABLE\n"
    "       trainfit pace [options] -- COMMAND     (answers each line with one)\n"
    "       trainfit pace --undo",
}


_MOST_RATES, _MOST_HZ = 8, 2000.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("target", nargs="?", metavar="MODULE:CALLABLE", help=argparse.SUPPRESS)
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--hz",
        type=rates,
        default=(15.0, 30.0, 60.0),
        metavar="HZ,…",
        help="calls a second, one rate or several (default 15,30,60)",
    )
    measurement.add_argument(
        "--duration",
        type=duration,
        default=10.0,
        metavar="S",
        help="seconds at each rate: 10, 10s, 500ms (default 10)",
    )
    measurement.add_argument(
        "--setup",
        metavar="MODULE:FN",
        help="called once before the measurement; its return value is the callable's argument",
    )
    measurement.add_argument(
        "--rehearse",
        metavar="MODULE:FN",
        help="does the callable's work, gets the same argument and changes no state: needed of a "
        "policy that keeps one, such as a queue of actions",
    )
    measurement.add_argument(
        "--no-attribution", action="store_true", help="only measure, without looking for the cause"
    )
    fixes = parser.add_argument_group("fixes")
    fixes.add_argument(
        "--fix",
        choices=get_args(FixName),
        help="apply a fix and measure before and after: busy-wait, a rehearsal call before each "
        "tick, forbid deep idle states, or set the performance governor (kept if it helped)",
    )
    fixes.add_argument(
        "--undo", action="store_true", help="restore what --fix governor changed, and exit"
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the whole report: calls over time and as a histogram, evidence, all fixes",
    )
    add_result(result)
    add_fail_if(result, "pace:PaceResult")


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command behind ``--``; a name alone is ours."""
    if "--" not in words:
        return list(words), []
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


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
