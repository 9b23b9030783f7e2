"""``trainfit report`` and ``show``: results as a page, Markdown, JSON, a picture; or a screen."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.cli.automation import formatted, gated
from trainfit.cli.common import UsageError
from trainfit.cli.output import output_file, print_plan, print_subject
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.results_options import ends
from trainfit.cli.verbs.watched import print_result
from trainfit.memory.explanation import summarize
from trainfit.plan.growth_findings import with_growth
from trainfit.plan.job_detail import explained, timeline_of
from trainfit.report.blocks import Entry
from trainfit.report.page import page_of, subject_of
from trainfit.report.sections.memory import recording_subject
from trainfit.report.writers.html import html, svg
from trainfit.report.writers.markdown import markdown
from trainfit.report.writers.trace import run_trace, step_trace
from trainfit.results.batch import BatchExplanation, NoiseResult
from trainfit.results.doctor import DoctorResult
from trainfit.results.files import documents
from trainfit.results.files.writing import write_file
from trainfit.results.gpus import GpusResult, Profile
from trainfit.results.kinds import JOINED, joined, of_text, parted, read
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import SnapshotReport
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.real_runs import Verification
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.sweep import SweepResult
from trainfit.results.runs.watched import load_run
from trainfit.results.speed import GpuComparison
from trainfit.results.text import printable, size
from trainfit.results.watch import AdviceVerification, Comparison, WatchResult
from trainfit.watch.judge import judge

# ---
# What a report is written as: a page, Markdown, JSON, a picture, a trace.


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of file that a report is written as; ``binary`` is never written to a terminal."""

    render: Callable[[Sequence[Entry]], str | bytes]
    what: str
    binary: bool = False


def _entries(sources: Sequence[Entry]) -> list[Entry]:
    return [Entry(source.name, *explained(source.result, source.name)) for source in sources]


def _html(sources: Sequence[Entry]) -> str:
    return html(page_of(_entries(sources)))


def _markdown(sources: Sequence[Entry]) -> str:
    return markdown(page_of(_entries(sources)))


def _json(sources: Sequence[Entry]) -> str:
    """Recordings are no JSON: their figures are in the page alone."""
    texts = [(source.name, source.result.to_json()) for source in sources
             if hasattr(source.result, "to_json")]  # fmt: skip
    if not texts:
        raise UsageError("a recording has no JSON document; give its plan, or write .html or .md")
    return joined(texts) + "\n"


def _svg(sources: Sequence[Entry]) -> str:
    charts = page_of(_entries(sources)).charts
    if not charts:
        raise UsageError(f"{sources[0].name} has no chart; write .html or .md")
    return svg(charts[0])


def _trace(sources: Sequence[Entry]) -> str:
    """The trace of one result: a simulated step, or a watched run, whose tables lie in its
    folder."""
    source, *others = sources
    if others:
        raise UsageError("a trace is of one result; give one")
    result = source.result
    if isinstance(result, WatchResult):
        folder = Path(result.folder)
        if not folder.is_dir():
            raise UsageError(f"the run's folder {result.folder!r} is not there; give its path")
        return run_trace(load_run(folder), result.findings)
    if isinstance(result, PlanResult | Recording):
        timeline = timeline_of(result, source.name)
        if timeline is not None:
            return step_trace(timeline, result.command if isinstance(result, PlanResult) else "")
    raise UsageError(
        f"{source.name} has no step over time; give a plan of --output, a recording or the folder "
        "of a watched run"
    )


#: By the end of the file's name; a longer end goes before a shorter one.
FORMS: Final[Mapping[str, Form]] = {
    ".html": Form(_html, "report, opens in a browser"),
    ".md": Form(_markdown, "report as Markdown"),
    ".json": Form(_json, "all results in one document"),
    ".svg": Form(_svg, "picture of the first chart"),
    ".trace.json": Form(_trace, "trace, opens in ui.perfetto.dev or chrome://tracing"),
}


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Read, render, write; returns the exit code."""
    to_stdout = options.output == "-"
    target = None if to_stdout else _target(options.output, options.results)
    form = _form(options.format, target)
    if form.binary and to_stdout and sys.stdout.isatty():
        raise UsageError(f"{form.what} is binary: give a file (-o FILE), or pipe it")
    with shown_progress() as progress:
        progress(f"reading {options.results[0]}")
        sources = [entry for path in options.results for entry in _read(path)]
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
        if documents.format_of(text) == JOINED.name:
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
    """The file to write: without a name here, under the name of the first result."""
    if given is None:
        first = Path(os.path.abspath(results[0]))  # "." has no name
        given = (first.name if first.is_dir() else first.stem) + ".html"
    return output_file(given, results)


def _print(content: str | bytes) -> None:
    if isinstance(content, bytes):
        sys.stdout.buffer.write(content)
        return
    print(content, end="" if content.endswith("\n") else "\n")


# ---
# ``trainfit show``: render a result file.


def run_show(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the file's content; returns the exit code."""
    path: Path = options.file
    result = read(path)
    if isinstance(result, Recording):
        summary = with_growth(summarize(result, str(path)))
        code = gated(options, summary, 0)
        if (form := formatted(summary, options)) is not None:
            print(form)
        else:
            print_subject(summary, options, recording_subject)
        return code
    code = gated(options, result, 0)
    if (form := formatted(result, options)) is not None:
        print(form)
    elif isinstance(result, PlanResult):
        print_plan(result, options)
    elif isinstance(result, WatchResult | Comparison | AdviceVerification):
        print_result(result, json=options.json, whole=options.explain)
    elif isinstance(result, _SECTIONED):
        print_subject(result, options, lambda found: subject_of(Entry(str(path), found)))
    else:
        print(result.to_json())
    return code


_SECTIONED: Final = (
    LoaderResult,
    PaceResult,
    NoiseResult,
    BatchExplanation,
    Profile,
    GpuComparison,
    SweepResult,
    GpusResult,
    Verification,
    SnapshotReport,
    DoctorResult,
    Rehearsal,
)
