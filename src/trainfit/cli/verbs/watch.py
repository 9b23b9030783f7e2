"""``trainfit watch``: run a training command and explain what limits it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainfit.cli.automation.fail_if import gated
from trainfit.cli.bug_report import fault_of, report_aside
from trainfit.cli.common import UsageError, only_ascii
from trainfit.cli.live_view import Terminal, attached, follow_lines
from trainfit.cli.output import given_output, name_report
from trainfit.cli.screen import make_console
from trainfit.cli.verbs.watched.next_command import accepted
from trainfit.cli.verbs.watched.printing import print_noise, print_result
from trainfit.cli.verbs.watched.verify_change import verified
from trainfit.plan.command.prefix import words_to_start
from trainfit.plan.command.tunables import fill, placeholders
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import printable
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.run import exit_words, load_machines
from trainfit.torch_private import tested
from trainfit.watch.judge import judge
from trainfit.watch.launch import WatchedCommand
from trainfit.watch.recorder.process import switched_off
from trainfit.watch.run_folder import new_folder, remove_empty, why_unwritable
from trainfit.watch.sampler.start import SamplerHandle, start_sampler
from trainfit.watch.tail import tail_run


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
    if options.fail_if and options.verify:
        raise UsageError("--fail-if is about one run; remove --verify, which compares several")
    if options.noise_scale and (options.verify or not command):
        raise UsageError(
            "--noise-scale measures a whole run: trainfit watch --noise-scale -- python train.py"
        )
    if options.verify:
        return verified(options, command, _new_folder(options, command))
    if command:
        return _run(options, command, output)
    folder = options.attach or options.read[0]
    if options.attach is not None:
        _follow_attached(options, folder)
    result, _ = _tell(options, command, folder, output)
    return gated(options, result, 0)


def _run(options: argparse.Namespace, command: Sequence[str], output: Path | None) -> int:
    """Returns the command's exit code, whatever can be recorded and said of it."""
    folder = _new_folder(options, command)
    if reason := _why_not(options, folder):
        print(f"trainfit watch: not recorded: {reason}", file=sys.stderr)
        return _ungated(options, _watched(options, command, None))
    code = _watched(options, command, folder)
    try:
        result, is_told = _tell(options, command, folder, output)
        if not is_told:
            print(
                f"trainfit watch: the command ended {exit_words(code)} before a training step; "
                "nothing was recorded",
                file=sys.stderr,
            )
        sys.stdout.flush()
        return gated(options, result, code)
    except BrokenPipeError:
        # Nothing may be flushed at exit to a pipe that its reader has closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TrainfitError, OSError) as error:  # a disk that has become full
        print(f"trainfit watch: {printable(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        again = f"trainfit watch --read {shlex.quote(printable(str(folder)))}"
        print(f"trainfit watch: interrupted; the report: {again}", file=sys.stderr)
    except Exception as error:
        report_aside(fault_of(error), "watch")
    return _ungated(options, code, "the run was not judged")


def _ungated(options: argparse.Namespace, code: int, why: str = "nothing was recorded") -> int:
    """The command's exit code; 1 in place of 0 where --fail-if asks for what is not known."""
    if options.fail_if:
        print(f"trainfit: --fail-if: cannot tell: {why}", file=sys.stderr)
    return code or int(bool(options.fail_if))


def _why_not(options: argparse.Namespace, folder: Path) -> str:
    """Why the command runs without the recorder; empty if it is recorded. A folder that the user
    has named is an error of its own."""
    if switched_off():
        return "TRAINFIT_WATCH switches the recorder off; unset it"
    reason = "" if options.folder is not None else why_unwritable(folder)
    return reason and f"{reason}; name another folder with --folder DIR or XDG_STATE_HOME"


def _tell(
    options: argparse.Namespace, command: Sequence[str], folder: Path, output: Path | None
) -> tuple[WatchResult, bool]:
    """Judge, save and print; ``False``: nothing was recorded, and nothing is left."""
    result = accepted(judge(load_machines(options.read or [folder])))
    tested.saw(result.header.torch or "")
    if output is not None:
        result.save(output)
    trained = result.header.torch is not None  # a full disk may have left nothing else
    kept = trained or options.json or options.folder is not None
    if command and not kept and remove_empty(folder):
        return result, False
    _print(result, options, folder)
    name_report(output or folder, json=options.json)
    return result, True


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


def _watched(options: argparse.Namespace, command: Sequence[str], folder: Path | None) -> int:
    """Run the command, its placeholders filled with their current values, to its end; returns its
    exit code. ``folder`` is where it is recorded; ``None``: it is not."""
    present = placeholders(command)
    words, said = words_to_start([fill(word, present) for word in command])
    if said:
        print(f"trainfit watch: {said}", file=sys.stderr, flush=True)
    drawn = folder is not None and _is_drawn(options)
    terminal = Terminal() if drawn else None
    sampler: SamplerHandle | None = None
    try:
        output = None if terminal is None else terminal.output
        with WatchedCommand(
            words, folder, output, typed=command, measures_noise=options.noise_scale
        ) as watched:
            try:
                if watched.recorded and folder is not None:
                    with contextlib.suppress(OSError):  # the run goes on without samples
                        sampler = start_sampler(folder, watched.pid)
                if terminal is None:
                    return follow_lines(watched, lambda: _seen(folder), quiet=options.quiet)
                return terminal.follow(watched, lambda: _seen(folder), make_console(stderr=True))
            except Exception as error:  # the command goes on, without a view
                report_aside(fault_of(error), "watch")
                return watched.wait() if terminal is None else terminal.copy(watched)
    finally:
        with _reported():
            if sampler is not None:
                sampler.stop()
            if terminal is not None:
                terminal.close()


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """A fault of trainfit's own is told, and does not take the command's exit code."""
    try:
        yield
    except Exception as error:
        report_aside(fault_of(error), "watch")


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


def _seen(folder: Path | None) -> WatchResult | None:
    run = None if folder is None else tail_run(folder)
    return judge(run) if run is not None else None


def _print(result: WatchResult, options: argparse.Namespace, folder: Path) -> None:
    print_result(result, json=options.json, whole=options.explain, stderr=not options.read)
    if not options.json:
        print_noise(folder, wanted=options.noise_scale, stderr=not options.read)
    if not (options.read or options.json):
        again = f"trainfit watch --read {shlex.quote(printable(str(folder)))}"
        print(f"recorded: {again}", file=sys.stderr)
