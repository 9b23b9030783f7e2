"""``trainfit watch``: run a training command live and explain what limits it; ``compare``."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import os
import pty
import re
import select
import shlex
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainfit.cli.automation import gated
from trainfit.cli.bug_report import fault_of, report_aside
from trainfit.cli.common import UsageError, discard_output, only_ascii
from trainfit.cli.output import given_output, make_console, name_report
from trainfit.cli.verbs.watched import print_noise, print_result, verified, with_memory
from trainfit.findings.ranking import STANDSTILL
from trainfit.plan.command.parsing import CommandError, parse_command
from trainfit.plan.command.prefix import words_to_start
from trainfit.plan.command.tunables import fill, placeholders
from trainfit.report.watch import live_view, progress_line
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.watched import RunRecord, exit_words, load_machines, load_run
from trainfit.results.text import printable
from trainfit.results.watch import WatchResult
from trainfit.torch_private import needed
from trainfit.watch.compare import compare
from trainfit.watch.judge import judge
from trainfit.watch.launch import WatchedCommand
from trainfit.watch.rank_folder import (
    new_folder,
    prune,
    remove_empty,
    runs_folder,
    seconds_without_step,
    why_unwritable,
)
from trainfit.watch.recorder.process import switched_off
from trainfit.watch.sampler.start import SamplerHandle, start_sampler
from trainfit.watch.view import tail_run

# ---
# Shows a run while it goes on: redrawn on a terminal, a line now and then elsewhere.
#
# On a terminal the command writes to a pseudo-terminal, so that it still sees one: its whole lines
# are printed above the view, and a line that it has not ended (a progress bar) in it.


#: Seconds between two drawings at least, and between two lines.
DRAWN_S: Final = 1.0
#: Share of the machine's cores that reading and drawing may take: the training may need all of
#: them.
_MOST_CPU: Final = 0.003
LINE_S: Final = 30.0
#: Seconds without a step after which it is asked whether the run stands still, and again.
STANDSTILL_S: Final = 5.0
#: Control sequences other than colours: a progress bar moves its cursor with them.
_MOVES: Final = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")

Look = Callable[[], WatchResult | None]


class Running(Protocol):
    """A command that runs."""

    def poll(self) -> int | None: ...


def follow_lines(
    running: Running, look: Look, *, quiet: bool, silent_s: Callable[[], float] = float
) -> int:
    """A line on stderr every half minute until it ends, and at once where it stands still;
    ``silent_s`` gives the seconds since its last step. Returns its exit code."""
    began = told = time.monotonic()
    due = STANDSTILL_S
    while (code := running.poll()) is None:
        time.sleep(0.1 if time.monotonic() - began < 2 else 0.5)
        silent = silent_s()
        if silent < STANDSTILL_S:
            due = STANDSTILL_S
        result = None
        if not quiet and silent >= due:
            due = silent + STANDSTILL_S
            result = look()
            if result is not None and not stands_still(result):
                result = None
        if not quiet and result is None and time.monotonic() - told >= LINE_S:
            result = look()
        if result is not None:
            told = time.monotonic()
            due = max(due, silent + LINE_S) if stands_still(result) else due
            print(f"trainfit: {progress_line(result)}", file=sys.stderr, flush=True)
    return code


#: Seconds that an interrupted command has to end by itself, before it is told how to end it.
_ENDS_S: Final = 10.0


class InterruptedRun:
    """A command that runs; tells once, on stderr, that it goes on after Ctrl-C: code in C does not
    look at it before it is done (a collective that waits for another rank)."""

    def __init__(self, watched: WatchedCommand, folder: Path | None) -> None:
        self._watched, self._folder, self._told = watched, folder, False

    def poll(self) -> int | None:
        code, since = self._watched.poll(), self._watched.interrupted_s
        if code is None and since is not None and time.monotonic() - since >= _ENDS_S:
            self._tell()
        return code

    def _tell(self) -> None:
        if self._told:
            return
        self._told = True
        read = "" if self._folder is None else f"; the report so far: {_reads(self._folder)}"
        print(
            f"trainfit watch: the command has not ended {_ENDS_S:.0f} s after the interrupt; "
            f"`kill -KILL {self._watched.pid}` in another terminal ends it{read}",
            file=sys.stderr,
            flush=True,
        )


def _reads(folder: Path) -> str:
    return f"trainfit watch --read {shlex.quote(printable(str(folder)))}"


def stands_still(result: WatchResult) -> bool:
    """Does the first finding say so, or that a rank or a worker is gone?"""
    return bool(result.findings) and result.findings[0].kind in STANDSTILL


class Terminal:
    """A pseudo-terminal for what the command prints; ``output`` is the end that it writes to."""

    def __init__(self) -> None:
        self._ours, self.output = pty.openpty()
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetwinsize(self.output, termios.tcgetwinsize(sys.stderr.fileno()))
            tty.setraw(self.output, termios.TCSANOW)  # lines as they were written
        os.set_blocking(self._ours, False)
        # Bytes of a character may come in two pieces.
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""

    def follow(self, running: Running, look: Look, console: Console) -> int:
        """Draw until the command ends; returns its exit code."""
        began = drawn = time.monotonic()
        pause = DRAWN_S
        with Live(console=console, auto_refresh=False, transient=True) as live:
            result = None
            while (code := running.poll()) is None:
                self._pass_on(console, 0.1)
                if time.monotonic() - drawn >= pause:
                    drawn, cpu_s = time.monotonic(), time.process_time()
                    result = look()
                    view = live_view(result, drawn - began, self._unfinished)
                    live.update(view, refresh=True)
                    spent = time.process_time() - cpu_s
                    pause = max(DRAWN_S, spent / _MOST_CPU / (os.cpu_count() or 1))
            while self._pass_on(console, 0.0):
                pass
            if self._unfinished:
                console.print(Text.from_ansi(self._unfinished))
        return code

    def copy(self, running: Running) -> int:
        """Print what the command prints as it is, until it ends; returns its exit code."""
        sys.stdout.write(self._unfinished)
        sys.stdout.flush()
        while (code := running.poll()) is None:
            self._copied(0.1)
        while self._copied(0.0):
            pass
        return code

    def _copied(self, seconds: float) -> bool:
        data = self._read(seconds)
        with contextlib.suppress(OSError):  # nobody reads our own output any more
            return bool(data and os.write(sys.stdout.fileno(), data))
        return False

    def _read(self, seconds: float) -> bytes:
        """What comes in this time; empty: nothing."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self._ours, 65536)
        except OSError:  # nobody has the other end any more
            return b""

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.output)

    def _pass_on(self, console: Console, seconds: float) -> bool:
        """Print the lines that have come; was there anything?"""
        data = self._read(seconds)
        if not data:
            return False
        text = self._unfinished + _MOVES.sub("", self._text.decode(data))
        *whole, last = text.split("\n")
        for line in whole:
            console.print(Text.from_ansi(_shown(line)), soft_wrap=True)
        self._unfinished = _shown(last)
        return True


def _shown(line: str) -> str:
    """What a terminal shows of a line that begins again with each carriage return."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def attached(folder: Path) -> Running:
    """A run of which only the folder is known: it has ended when its header says so."""
    from trainfit.results.runs.watched import RunHeader

    class _Attached:
        def poll(self) -> int | None:
            header = RunHeader.load(min(folder.glob("rank*.json"), default=folder / "rank0.json"))
            return None if header.ending == "running" and _lives(header.pid) else 0

    return _Attached()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# ---
# Proposes, after a watched run, only what the verb that is named accepts.


#: Verbs that read the command, and may refuse it. The others run any.
_READS: Final = ("plan", "loader")


def accepted(result: WatchResult) -> WatchResult:
    """``result`` without a next command that its verb would refuse: a note says what it needs."""
    verb, command = _parts(result.next_command)
    if verb not in _READS or _is_elsewhere(command):
        return result
    try:
        parse_command(command, several=verb == "plan")
    except CommandError as error:
        note = f"next would be `trainfit {verb}`, which needs another command: {error}"
        return dataclasses.replace(result, next_command="", notes=(note, *result.notes))
    return result


def _parts(line: str) -> tuple[str, list[str]]:
    """Verb and command of "trainfit VERB -- COMMAND"; the verb is empty where that is no such."""
    try:
        words = shlex.split(line)
    except ValueError:
        return "", []
    if words[:1] != ["trainfit"] or words[2:3] != ["--"]:
        return "", []
    return words[1], words[3:]


def _is_elsewhere(command: Sequence[str]) -> bool:
    """Was it run in another folder, where its script is?"""
    return any(word.endswith(".py") and not Path(word).exists() for word in command)


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
    if options.memory_history and (options.verify or not command):
        raise UsageError(
            "--memory-history records a run: trainfit watch --memory-history -- python train.py"
        )
    if command:
        try:
            if options.verify:
                return verified(options, command, _new_folder(options, command))
            return _run(options, command, output)
        finally:
            if options.folder is None:
                with contextlib.suppress(Exception):
                    prune(runs_folder())
    folder = options.attach or options.read[0]
    if options.attach is not None:
        _follow_attached(options, folder)
    result, _ = _tell(options, command, folder, output)
    return gated(options, result, 0)


_INTERRUPTED: Final = "trainfit watch: interrupted; the report: {}"


def _run(options: argparse.Namespace, command: Sequence[str], output: Path | None) -> int:
    """Returns the command's exit code, whatever can be recorded and said of it."""
    folder = _new_folder(options, command)
    if reason := _why_not(options, folder):
        print(f"trainfit watch: not recorded: {reason}", file=sys.stderr)
        return _ungated(options, _watched(options, command, None))
    try:
        code = _watched(options, command, folder)
    except KeyboardInterrupt:
        if any(folder.glob("**/rank*.json")):  # not before the command ran
            print(_INTERRUPTED.format(_reads(folder)), file=sys.stderr)
        raise
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
        discard_output()
    except (TrainfitError, OSError) as error:  # a disk that has become full
        print(f"trainfit watch: {printable(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print(_INTERRUPTED.format(_reads(folder)), file=sys.stderr)
    except Exception as error:
        report_aside(fault_of(error))
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
    folders = options.read or [folder]
    result = with_memory(accepted(judge(load_machines(folders))), folders)
    needed.saw(result.header.torch or "")
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
            words,
            folder,
            output,
            typed=command,
            measures_noise=options.noise_scale,
            keeps_memory_history=options.memory_history,
        ) as watched:
            try:
                if watched.recorded and folder is not None:
                    with contextlib.suppress(OSError):  # the run goes on without samples
                        sampler = start_sampler(folder, watched.pid)
                running = InterruptedRun(watched, folder)
                if terminal is None:
                    return follow_lines(
                        running,
                        lambda: _seen(folder),
                        quiet=options.quiet,
                        silent_s=lambda: 0.0 if folder is None else seconds_without_step(folder),
                    )
                return terminal.follow(running, lambda: _seen(folder), make_console(stderr=True))
            except Exception as error:  # the command goes on, without a view
                report_aside(fault_of(error))
                return watched.wait() if terminal is None else terminal.copy(watched)
    finally:
        # The command has ended: its exit code stays, and the next Ctrl-C ends the report.
        with _reported(), contextlib.suppress(KeyboardInterrupt):
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
        report_aside(fault_of(error))


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
        print(f"recorded: {_reads(folder)}", file=sys.stderr)


# ---
# ``trainfit compare``: say what changed from one watched run to another.


def run_compare(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Compare and print; returns the exit code."""
    output = given_output(options.output, [options.before, options.after])
    result = compare(
        _run_of(options.before),
        _run_of(options.after),
        allow_other_hardware=options.other_hardware,
    )
    if output is not None:
        result.save(output)
    print_result(result, json=options.json, whole=options.explain)
    return {"slower": 1, "cannot tell": 2}.get(result.verdict, 0)


def _run_of(path: Path) -> RunRecord:
    """The run of a folder, or of the folder that a file of `trainfit watch --output` is about."""
    if not path.is_file():
        return load_run(path)
    header, named = (result := WatchResult.load(path)).header, Path(result.folder)
    for folder in dict.fromkeys((named, path.parent / named)):
        if result.folder and (folder / f"rank{header.rank}.json").is_file():
            run = load_run(folder)
            if (run.header.started_unix, run.header.pid) == (header.started_unix, header.pid):
                return run
    raise UsageError(
        f"{str(path)!r} has medians, and a comparison needs every step, which are in the run's "
        f"folder {result.folder!r}: it is not there; give the folder of the run"
    )
