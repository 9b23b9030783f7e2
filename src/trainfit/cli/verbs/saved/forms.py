"""What a report is written as: a page, Markdown, JSON, a picture, a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.cli.common import UsageError
from trainfit.plan.job_detail import explained, timeline_of
from trainfit.report.page.blocks import Entry
from trainfit.report.page.compose import page_of
from trainfit.report.page.document import html, svg
from trainfit.report.page.markdown import markdown
from trainfit.report.trace.simulated_step import step_trace
from trainfit.report.trace.watched_run import run_trace
from trainfit.results.files.joined import joined
from trainfit.results.plan.result import PlanResult
from trainfit.results.runs.recording import Recording
from trainfit.results.watch.result import WatchResult
from trainfit.results.watch.run import load_run


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of file that a report is written as; ``binary`` is never written to a terminal."""

    render: Callable[[Sequence[Entry]], str | bytes]
    what: str
    binary: bool = False


def _entries(sources: Sequence[Entry]) -> list[Entry]:
    return [Entry(each.name, *explained(each.result, each.name)) for each in sources]


def _html(sources: Sequence[Entry]) -> str:
    return html(page_of(_entries(sources)))


def _markdown(sources: Sequence[Entry]) -> str:
    return markdown(page_of(_entries(sources)))


def _json(sources: Sequence[Entry]) -> str:
    """Recordings are no JSON: their figures are in the page alone."""
    texts = [(each.name, each.result.to_json()) for each in sources
             if hasattr(each.result, "to_json")]  # fmt: skip
    if not texts:
        raise UsageError("a recording has no JSON document; give its plan, or write .html or .md")
    return joined(texts) + "\n"


def _svg(sources: Sequence[Entry]) -> str:
    charts = page_of(_entries(sources)).charts
    if not charts:
        raise UsageError(f"{sources[0].name} has no chart; write .html or .md")
    return svg(charts[0])


def _trace(sources: Sequence[Entry]) -> str:
    """Of one result: a simulated step, or a watched run, whose tables lie in its folder."""
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
