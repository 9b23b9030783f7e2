"""``trainfit watch``: run a training command and explain what limits it."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.cli.common import (
    UsageError,
    only_ascii,
    split_command,
)
from trainfit.cli.live_view import Terminal, attached, follow_lines
from trainfit.cli.output import given_output, name_report
from trainfit.cli.screen import make_console
from trainfit.cli.verbs.watched.printing import print_noise, print_result
from trainfit.cli.verbs.watched.verify_change import add_verify, verified
from trainfit.plan.command.tunables import fill, placeholders
from trainfit.results.text import printable
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.run import exit_words, load_machines
from trainfit.watch.judge import judge
from trainfit.watch.launch import WatchedCommand
from trainfit.watch.run_folder import new_folder, remove_empty
from trainfit.watch.sampler.start import SamplerHandle, start_sampler
from trainfit.watch.tail import tail_run

PARSER: dict[str, Any] = {
    "help": "run a training command and explain what limits it",
    "description": "Run a training command unchanged, record what its steps spend their time on, "
    "and say what limits it and what to change. The script is not edited; its output, its exit "
    "code and its results stay the same. TRAINFIT_WATCH=0 switches the recorder off.",
    "epilog": "example: trainfit watch -- python train.py --epochs 1",
    "usage": "trainfit watch [options] -- COMMAND\n       trainfit watch --read FOLDER",
}

_WITH_VALUE = ("--folder", "--output", "--read", "--attach", "--verify-steps", "--verify-runs")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="record into DIR, a new or empty folder"
    )
    parser.add_argument(
        "--read",
        type=Path,
        action="append",
        metavar="DIR",
        help="analyze a recorded run instead of running one; repeat the option for each other "
        "machine of the same run",
    )
    parser.add_argument(
        "--attach", type=Path, metavar="DIR", help="show a run in progress in another terminal"
    )
    parser.add_argument(
        "--noise-scale",
        action="store_true",
        help="also measure the gradient noise scale: which batch size learns fastest",
    )
    add_verify(parser)
    parser.add_argument("--plain", action="store_true", help="print lines instead of the live view")
    parser.add_argument("--quiet", action="store_true", help="print nothing until the end")
    parser.add_argument("--output", metavar="FILE", help="write the result to FILE as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")
    parser.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show every finding with its cause and evidence",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the command."""
    return split_command(words, _WITH_VALUE)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Watch, judge, print; returns the command's exit code (0 where a recorded run is read)."""
    output = given_output(options.output)
    given = [name for name in ("read", "attach") if getattr(options, name) is not None]
    if len(given) + bool(command) != 1:
        raise UsageError(
            "give a command (trainfit watch -- python train.py), or --read DIR, or --attach DIR"
        )
    of_verify = options.verify_steps or options.verify_runs
    if (options.verify and not command) or (of_verify and not options.verify):
        raise UsageError("--verify runs a command: trainfit watch --verify -- python train.py")
    if options.noise_scale and (options.verify or not command):
        raise UsageError(
            "--noise-scale measures a whole run: trainfit watch --noise-scale -- python train.py"
        )
    if options.verify:
        return verified(options, command, _new_folder(options, command))
    if command:
        folder = _new_folder(options, command)
        code = _watched(options, command, folder)
    else:
        folder, code = options.attach or options.read[0], 0
        if options.attach is not None:
            _follow_attached(options, folder)
    result = judge(load_machines(options.read or [folder]))
    if output is not None:
        result.save(output)
    trained = result.header.torch is not None  # a full disk may have left nothing else
    kept = trained or options.json or options.folder is not None
    if command and not kept and remove_empty(folder):
        print(
            f"trainfit watch: the command ended {exit_words(code)} before a training step; "
            "nothing was recorded",
            file=sys.stderr,
        )
        return code
    _print(result, options, folder)
    name_report(output or folder, json=options.json)
    return code


def _new_folder(options: argparse.Namespace, command: Sequence[str]) -> Path:
    if options.folder is None:
        script = next((word for word in command if word.endswith(".py")), command[0])
        return new_folder(script)
    folder: Path = options.folder
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--folder {str(folder)!r} is a file; name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"--folder {str(folder)!r} is not empty; name a new folder, or empty it")
    return folder


def _watched(options: argparse.Namespace, command: Sequence[str], folder: Path) -> int:
    """Run the command, its placeholders filled with their current values, to its end; returns its
    exit code."""
    present = placeholders(command)
    words = [fill(word, present) for word in command]
    drawn = _is_drawn(options)
    terminal = Terminal() if drawn else None
    sampler: SamplerHandle | None = None
    try:
        output = None if terminal is None else terminal.output
        with WatchedCommand(
            words, folder, output, typed=command, measures_noise=options.noise_scale
        ) as watched:
            if watched.recorded:
                with contextlib.suppress(OSError):  # the run goes on without samples
                    sampler = start_sampler(folder, watched.pid)
            if terminal is not None:
                return terminal.follow(watched, lambda: _seen(folder), make_console(stderr=True))
            return follow_lines(watched, lambda: _seen(folder), quiet=options.quiet)
    finally:
        if sampler is not None:
            sampler.stop()
        if terminal is not None:
            terminal.close()


def _follow_attached(options: argparse.Namespace, folder: Path) -> None:
    running = attached(folder)
    if _is_drawn(options):
        terminal = Terminal()
        with contextlib.closing(terminal):
            terminal.follow(running, lambda: _seen(folder), make_console(stderr=True))
    else:
        follow_lines(running, lambda: _seen(folder), quiet=options.quiet)


def _is_drawn(options: argparse.Namespace) -> bool:
    """A live view where both streams are a terminal: a redirected one gets what the script wrote,
    byte for byte."""
    asked = not (options.plain or options.quiet)
    return asked and sys.stdout.isatty() and sys.stderr.isatty() and not only_ascii()


def _seen(folder: Path) -> WatchResult | None:
    run = tail_run(folder)
    return judge(run) if run is not None else None


def _print(result: WatchResult, options: argparse.Namespace, folder: Path) -> None:
    print_result(result, json=options.json, whole=options.explain, stderr=not options.read)
    if not options.json:
        print_noise(folder, wanted=options.noise_scale, stderr=not options.read)
    if not (options.read or options.json):
        again = f"trainfit watch --read {shlex.quote(printable(str(folder)))}"
        print(f"recorded: {again}", file=sys.stderr)
