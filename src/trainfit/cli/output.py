"""Where a command writes its result: checked before anything is measured."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.results.files.writing import is_replaceable
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
    """The same of an option that may be missing."""
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


def name_report(result: Path | None, *, json: bool = False) -> None:
    """Name the command that opens a saved result as a page; on standard error, as the result alone
    goes to standard output."""
    if result is not None and not json and (result.is_dir() or result.is_file()):
        command = f"trainfit report {shlex.quote(str(result))}"
        print(f"page: {printable(command)}", file=sys.stderr, flush=True)
