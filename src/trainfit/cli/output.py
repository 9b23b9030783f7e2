"""Where a result goes: standard output as a screen or a report, or a file checked beforehand."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from trainfit.cli.common import UsageError
from trainfit.report.blocks import Subject
from trainfit.report.layout import Line, Style, lines_of, plain_text
from trainfit.report.sections.plan import plan_subject
from trainfit.report.writers.terminal import screen, whole
from trainfit.results.files.writing import is_replaceable
from trainfit.results.plan import PlanResult
from trainfit.results.text import printable


def output_file(text: str, inputs: Iterable[Path] = ()) -> Path:
    """A path that can be written to, and where nothing is lost.

    An existing file is replaced only if it is an earlier result or report, and not one of the
    command's ``inputs``. Raises :class:`UsageError`.
    """
    path = Path(text)
    if text == "-":
        raise UsageError("output file '-': give --json for standard output, or name a file")
    if path.is_dir():
        raise UsageError(f"output file {text!r} is a folder; name a file in it")
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise UsageError(f"output file {text!r}: its folder does not exist; create it first")
    if path.exists():
        _check_existing(path, inputs)
    elif not os.access(folder, os.W_OK):
        raise UsageError(f"output file {text!r}: its folder is not writable; name another")
    return path


def given_output(text: str | None, inputs: Iterable[Path] = ()) -> Path | None:
    """The output file of an option that may be missing (``None``)."""
    return output_file(text, inputs) if text is not None else None


def _check_existing(path: Path, inputs: Iterable[Path]) -> None:
    name = str(path)
    if not os.access(path, os.W_OK):
        raise UsageError(f"output file {name!r} is not writable; name another")
    if any(each.exists() and path.samefile(each) for each in inputs):
        raise UsageError(f"output file {name!r} is one of the inputs; name another")
    if not is_replaceable(path):
        raise UsageError(
            f"output file {name!r} exists and is not a result of trainfit; name another, or "
            "delete it first"
        )


def name_report(result: Path | None, *, json: bool) -> None:
    """Name the command that opens a saved result as a page; on standard error, as the result alone
    goes to standard output."""
    if result is not None and not json and (result.is_dir() or result.is_file()):
        command = f"trainfit report {shlex.quote(str(result))}"
        print(f"page: {printable(command)}", file=sys.stderr, flush=True)


# ---
# Prints results on standard output: one screen, in colour on a terminal, or the whole report.


#: In rich's words; NO_COLOR leaves none of it, nor does a pipe.
STYLES: Final[dict[Style, str]] = {
    "good": "bold green",
    "bad": "bold red",
    "title": "bold",
    "plain": "",
    "quiet": "dim",
}


def print_subject(
    result: Any,
    options: argparse.Namespace,
    subject: Callable[[Any], Subject],
    json: str = "",
    *,
    explain: bool | None = None,
) -> None:
    """Print a result as ``--json`` (``json`` or the result's own) and ``--explain`` ask for it;
    ``explain`` in the place of the option."""
    if options.json:
        print(json or result.to_json(), flush=True)
    else:
        is_whole = options.explain if explain is None else explain
        print_lines((whole if is_whole else screen)(subject(result)))


def give(
    result: Any,
    options: argparse.Namespace,
    subject: Callable[[Any], Subject],
    output: Path | None,
    *,
    explain: bool | None = None,
    page: bool = False,
) -> None:
    """Save a result where ``output`` says so and print it as :func:`print_subject` does; ``page``:
    name the command that opens the file as a page, too."""
    if output is not None:
        result.save(output)
    print_subject(result, options, subject, explain=explain)
    if page:
        name_report(output, json=options.json)


def print_plan(result: PlanResult, options: argparse.Namespace) -> None:
    """Print a plan as the options ask for it; its printed document has no timeline."""
    json = result.printed() if options.json else ""
    print_subject(result, options, plan_subject, json)


def print_lines(shown: Sequence[Line] | str, *, stderr: bool = False) -> None:
    """Lines in their styles on a terminal; as they are in a pipe, and with NO_COLOR."""
    lines = lines_of(shown) if isinstance(shown, str) else shown
    console = make_console(stderr=stderr)
    if not console.is_terminal:
        print(plain_text(lines), file=console.file, flush=True)
        return
    for line in lines:
        # A command that is too long stays one line when it is copied.
        console.print(_text(line), soft_wrap=True)


def make_console(*, stderr: bool) -> Console:
    """The terminal; NO_COLOR, of which rich leaves bold and dim, means no styles at all."""
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=colors, highlight=False, markup=False, emoji=False)


def _text(line: Line) -> Text:
    return Text(line.text, STYLES[line.style])
