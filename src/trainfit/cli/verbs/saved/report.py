"""``trainfit report``: results as one page, as Markdown, JSON or a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainfit.cli.common import UsageError
from trainfit.cli.options.saved.report import ends
from trainfit.cli.output import output_file
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.verbs.saved.forms import FORMS, Form
from trainfit.report.page.blocks import Entry
from trainfit.results.files import documents
from trainfit.results.files.joined import FORMAT as JOINED
from trainfit.results.files.joined import parted
from trainfit.results.files.writing import write_file
from trainfit.results.format import size
from trainfit.results.kinds import of_text, read
from trainfit.results.text import printable
from trainfit.results.watch.run import load_run
from trainfit.watch.judge import judge


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Read, render, write; returns the exit code."""
    to_stdout = options.output == "-"
    target = None if to_stdout else _target(options.output, options.results)
    form = _form(options.format, target)
    if form.binary and to_stdout and sys.stdout.isatty():
        raise UsageError(f"{form.what} is binary: give a file (-o FILE), or pipe it")
    with shown_progress() as progress:
        progress(f"reading {options.results[0]}")
        sources = [each for path in options.results for each in _read(path)]
        content = form.render(sources)
    if target is None:
        _print(content)
        return 0
    data = content.encode("utf-8") if isinstance(content, str) else content
    write_file(target, data)
    print(f"{printable(str(target))}: {form.what}, {size(len(data))}")
    return 0


def _read(path: Path) -> list[Entry]:
    """One result, or those of a document that `-o out.json` wrote."""
    if path.is_dir():
        return [Entry(str(path), judge(load_run(path)))]
    if path.is_file() and path.suffix == ".json":
        text = documents.read(path, "re-create it")
        if documents.format_of(text) == JOINED:
            return [Entry(name, of_text(each, path)) for name, each in parted(text, path)]
        return [Entry(path.name, of_text(text, path))]
    return [Entry(path.name, read(path))]


def _form(asked: str | None, target: Path | None) -> Form:
    if asked is not None:
        return FORMS[f".{asked}"]
    if target is None:
        return FORMS[".md"]
    for end in sorted(FORMS, key=len, reverse=True):
        if target.name.endswith(end):
            return FORMS[end]
    raise UsageError(
        f"output file {str(target)!r}: its name shows no known format; end it in {ends()}, or "
        "give --format"
    )


def _target(given: str | None, results: Sequence[Path]) -> Path:
    """Where to write: without a name here, under the name of the first result."""
    if given is None:
        first = Path(os.path.abspath(results[0]))  # "." has no name
        given = (first.name if first.is_dir() else first.stem) + ".html"
    return output_file(given, results)


def _print(content: str | bytes) -> None:
    if isinstance(content, bytes):
        sys.stdout.buffer.write(content)
        return
    print(content, end="" if content.endswith("\n") else "\n")
