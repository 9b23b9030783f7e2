"""The command ``trainfit``: finds the verb, turns errors into one line and an exit code.

Exit codes: 0 good; 1 bad news (does not fit); 2 bad input or a failed run; 70 a fault of trainfit
itself; 130 and 143 ended by Ctrl-C and SIGTERM; 141 the reader of a pipe is gone. ``watch`` has
those of the command that it runs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from trainfit.cli.common import discard_output
from trainfit.cli.parser import Verb, read_words
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import IN_ASCII, laid_out_for, printable
from trainfit.torch_private import needed

#: Verbs that run the user's code in this process: what it has not yet written may be in a cycle.
_USERS_CODE = ("pace",)
#: Seconds within which a second SIGINT is the first one's, sent to a process and to its group.
_ECHO_S = 1.0
#: Columns of text that goes to a pipe or a file.
_PIPE_COLUMNS = 80


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if argv is None:
        _open_what_is_closed()
    _accept_any_text()
    code = _run(argv)
    needed.saw(getattr(sys.modules.get("torch"), "__version__", ""))
    if newer := needed.newer_seen():
        print(f"trainfit: warning: {newer}", file=sys.stderr)
    return code


def _run(argv: Sequence[str] | None) -> int:
    terminated: list[int] = []
    try:
        with _terminate_as_interrupt(terminated), laid_out_for(_screen_columns()):
            verb, options, command = _read(sys.argv[1:] if argv is None else argv)
            if argv is None and verb.name not in _USERS_CODE:
                atexit.register(_leave)
            code: int = verb.code()(options, command)
        sys.stdout.flush()
        return code
    except TrainfitError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("trainfit: interrupted", file=sys.stderr)
        return 143 if terminated else 130
    except BrokenPipeError:
        discard_output()
        return 141
    except OSError as error:
        print(f"trainfit: error: {_said_of(error)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter would try again when it ends
            discard_output()
        return 2
    except Exception as error:
        from trainfit.cli.bug_report import fault_of, report_fault

        return report_fault(fault_of(error))


def _leave() -> None:
    """End without taking PyTorch apart, which takes a second, and without a word of what is typed
    meanwhile: all is printed."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _said_of(error: OSError) -> str:
    """The error's text with the file that it is of, as far as that is known."""
    if error.filename is not None:
        return f"{error.filename!r}: {error.strerror or error}"
    try:
        os.getcwd()
    except OSError:
        return "the working directory is gone; change to another one"
    return error.strerror or str(error)


def _read(words: Sequence[str]) -> tuple[Verb, argparse.Namespace, list[str]]:
    try:
        return read_words(words)
    except SystemExit:  # help that was printed is to arrive
        sys.stdout.flush()
        raise


def _open_what_is_closed() -> None:
    """Standard streams that the caller closed go nowhere: no file that is opened later takes their
    place, to which a child process would print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the least number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _screen_columns() -> int:
    """The columns of the terminal; 80 of a pipe or a file."""
    if not sys.stdout.isatty():
        return _PIPE_COLUMNS
    return shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns


def _report(error: TrainfitError) -> int:
    fault = getattr(error, "own_fault", None)
    if fault is not None:
        from trainfit.cli.bug_report import report_fault

        code = report_fault(fault)
    else:
        code = error.exit_code
        said = printable(" ".join(str(error).splitlines()))
        print(f"trainfit: error: {said}", file=sys.stderr)
    cause = getattr(error, "cause", None)
    if cause is not None:
        print(f"trainfit: cause: {printable(cause.title)}", file=sys.stderr)
        place = str(cause.place or "")
        at = re.escape(place.rpartition("/")[2])
        if place and re.search(rf"{at}\b", str(error)) is None:
            print(f"trainfit: line: {printable(place)}", file=sys.stderr)
        print(f"trainfit: fix: {printable(cause.fix.action)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"trainfit: {printable(note)}", file=sys.stderr)
    output = getattr(error, "script_output", "")
    if output and fault is None:
        print("--- the script's own output ---", file=sys.stderr)
        print(printable(output.rstrip(), lines=True), file=sys.stderr)
        print("--- end of the script's output ---", file=sys.stderr)
    return code


@contextlib.contextmanager
def _terminate_as_interrupt(seen: list[int]) -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: end child processes, print what is known. ``seen`` gets it.

    Only the first: `timeout` sends it to the process and to its group, Slurm to each process, and
    what is known is to be printed all the same. Likewise of SIGINT, but that who types it once more
    later wants an end.
    """
    interrupted: list[float] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise KeyboardInterrupt

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if interrupted and now - interrupted[-1] < _ECHO_S:
            return
        interrupted.append(now)
        raise KeyboardInterrupt

    try:
        former = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    except ValueError:  # not in the main thread
        yield
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        former[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _accept_any_text() -> None:
    """A character that the terminal's encoding lacks is written as its nearest, or its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=IN_ASCII)


if __name__ == "__main__":
    sys.exit(main())
