"""The command ``trainfit``: finds the verb, turns errors into one line and an exit code.

Exit codes: 0 good, 1 bad news (does not fit), 2 bad input or a failed run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from trainfit.cli.automation.config import ConfigError, use_config
from trainfit.hardware import GpuNameError
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import laid_out_for, printable
from trainfit.version import __version__

#: Columns of text that goes to a pipe or a file.
_PIPE_COLUMNS = 80
_VERBS = (
    *(
        "plan",
        "simulate",
        "memory",
        "loader",
        "rehearse",
        "watch",
        "compare",
        "batch",
        "pace",
        "show",
        "report",
    ),
    *("doctor", "calibrate", "verify", "gpus"),
)
#: Verbs whose module is in a room below `verbs`.
_ROOMS = {
    "compare": "watched.compare",
    "report": "saved.report",
    "show": "saved.show",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _accept_any_text()
    try:
        verb, options, command = parsed(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _report(error)
    return _run(verb, options, command)


def parsed(argv: Sequence[str]) -> tuple[ModuleType, argparse.Namespace, list[str]]:
    """The verb's module, its options, and the user's command; exits where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="trainfit", description="Fit a PyTorch job to the hardware it runs on."
    )
    parser.add_argument("--version", action="version", version=f"trainfit {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    words = list(argv)
    # Of the verbs only the one that is asked for is imported; all for the help that lists them.
    wanted = words[:1] if words and words[0] in _VERBS else _VERBS
    modules = {name: _module(name) for name in wanted}

    def parser_of(name: str) -> argparse.ArgumentParser:
        module = modules.setdefault(name, _module(name))
        if name not in verbs.choices:
            added = verbs.add_parser(name, allow_abbrev=False, **module.PARSER)
            module.configure(added)
        found: argparse.ArgumentParser = verbs.choices[name]
        return found

    for name in wanted:
        parser_of(name)
    verb = modules[words[0]] if words and words[0] in modules else None
    own, command = verb.split(words[1:]) if verb is not None else (words[1:], [])
    if verb is not None and not {"-h", "--help"} & set(own):
        use_config(parser_of(words[0]), words[0], own, _VERBS, parser_of)
    options = parser.parse_args([*words[:1], *own])
    return modules[options.verb], options, command


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"trainfit.cli.verbs.{_ROOMS.get(verb, verb)}")


def _run(verb: ModuleType, options: argparse.Namespace, command: Sequence[str]) -> int:
    try:
        with _terminate_as_interrupt(), laid_out_for(_screen_columns()):
            code: int = verb.run(options, command)
        sys.stdout.flush()
        return code
    except (TrainfitError, GpuNameError) as error:
        return _report(error)
    except KeyboardInterrupt as interrupt:
        print("trainfit: interrupted", file=sys.stderr)
        return 143 if isinstance(interrupt, _Terminated) else 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        name = f"{error.filename!r}: " if error.filename is not None else ""
        print(f"trainfit: error: {name}{error.strerror or error}", file=sys.stderr)
        return 2


def _screen_columns() -> int:
    """Of the terminal; of a pipe or a file 80."""
    if not sys.stdout.isatty():
        return _PIPE_COLUMNS
    return shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns


def _report(error: Exception) -> int:
    print(f"trainfit: error: {printable(str(error))}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"trainfit: {printable(note)}", file=sys.stderr)
    output = getattr(error, "script_output", "")
    if output:
        print("--- the script's own output ---", file=sys.stderr)
        print(printable(output.rstrip(), lines=True), file=sys.stderr)
        print("--- end of the script's output ---", file=sys.stderr)
    return getattr(error, "exit_code", 2)


class _Terminated(KeyboardInterrupt):
    """Handle SIGTERM: stop child processes as on Ctrl-C."""


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        former = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _accept_any_text() -> None:
    """A character that the terminal's encoding lacks is written as its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
