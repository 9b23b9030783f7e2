"""The summary of a watched run: the verdict, where the time went, findings, what to type next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Final

from trainfit.report.screen import (
    Line,
    ScreenBlock,
    Style,
    block,
    lines_of,
    made,
    screen,
    shortened,
)
from trainfit.report.table import table_rows
from trainfit.report.watch.words import PHASES, answer, evidence_text, setting_text, title
from trainfit.results.format import count, duration, percent, size
from trainfit.results.text import printable, wrapped
from trainfit.results.watch.result import Finding, MemoryLedger, Severity, WatchResult
from trainfit.results.watch.run import OOM_KILLED, exit_words

#: Findings and unknowns that the screen has first, and cells of the bar of a phase.
_FINDINGS: Final = 4
_UNKNOWN: Final = 2
#: Lines of what to change on the short screen.
_FIX_LINES: Final = 2
_BAR: Final = 24
#: Exit codes of what SIGKILL ended, by itself and as a shell says it.
_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)
_MARKS: Final[dict[Severity, str]] = {"critical": "!!", "warning": "! ", "info": "  "}


def watch_screen(result: WatchResult, *, whole: bool = False) -> list[Line]:
    """At most 25 lines; with ``whole`` every finding, what could not be told, and notes."""
    return _whole(result) if whole else _short(result)


def _short(result: WatchResult) -> list[Line]:
    blocks = [block(answer(result), style=_style(result))]
    blocks += [block(text, 5 + at) for at, text in enumerate(_context(result))]
    blocks += [made(lines, 20 + 4 * at) for at, lines in enumerate(_phases(result))]
    if result.steps and not result.findings:
        blocks.append(block("Nothing to fix was found.", style="good"))
    for at, each in enumerate(result.findings):
        rank = 2 + at if at < _FINDINGS else 50 + at
        blocks.append(ScreenBlock(tuple(_finding(each, whole=False)), rank, notes=1))
    if result.unknown:
        kinds = ", ".join(printable(each.kind) for each in result.unknown[:_UNKNOWN])
        more = "" if len(result.unknown) <= _UNKNOWN else ", …"
        text = f"cannot tell: {kinds}{more} ({len(result.unknown)}; --explain says why)"
        blocks.append(block(text, 18, style="quiet"))
    for at, note in enumerate(result.notes):
        text = f"note: {printable(note)}"
        blocks.append(block(text, (22 if at < _UNKNOWN else 70) + at, style="quiet"))
    if result.next_command:
        blocks.append(ScreenBlock((_next(result),)))
    return screen(blocks, "causes, evidence, notes", "finding")


def _whole(result: WatchResult) -> list[Line]:
    lines = _wrapped(answer(result), _style(result))
    for text in _context(result):
        lines += _wrapped(text, "plain")
    lines += [Line(text, "quiet") for row in _phases(result) for text in row]
    if result.steps and not result.findings:
        lines.append(Line("Nothing to fix was found.", "good"))
    for each in result.findings:
        lines += _finding(each, whole=True)
    for gap in result.unknown:
        text = f"{gap.kind}: {gap.reason}; needs {gap.needs}"
        lines += _wrapped(f"cannot tell {printable(text)}", "quiet")
    for note in result.notes:
        lines += _wrapped(f"note: {printable(note)}", "quiet")
    return [*lines, *([_next(result)] if result.next_command else [])]


def _next(result: WatchResult) -> Line:
    return Line(f"next: {printable(result.next_command or '')}", "title")


def progress_line(result: WatchResult) -> str:
    """One line while the run goes on, for a terminal that cannot be redrawn."""
    if not result.steps or not result.step_s:
        return "no training step yet"
    text = f"{duration(result.step_s)} a step"
    shares = sorted(result.phases, key=lambda each: -each.share)[:2]
    text += "".join(f", {PHASES[each.name]} {percent(each.share)}" for each in shares)
    if result.gpu_utilization is not None:
        text += f", GPU {percent(result.gpu_utilization)}"
    if result.findings:
        text += f"; {title(result.findings[0])}"
    return text


def _style(result: WatchResult) -> Style:
    worst = {each.severity for each in result.findings}
    return "bad" if worst & {"critical", "warning"} else "good" if result.steps else "plain"


def _context(result: WatchResult) -> Iterator[str]:
    header = result.header
    where = "CPU"
    if header.gpu is not None and header.gpu < len(header.gpus):
        where = printable(header.gpus[header.gpu].name)
    parts = [f"{count(result.steps, 'steady step')} in {duration(result.seconds)}", where]
    if header.world_size > 1:
        parts.append(f"{count(header.world_size, 'rank')} (figures of rank {header.rank})")
    if header.precision != "unknown":
        parts.append(header.precision)
    if result.gpu_utilization is not None:
        parts.append(f"NVML utilisation {percent(result.gpu_utilization)}")
    if result.mfu is not None:
        parts.append(f"MFU {percent(result.mfu)}")
    if result.steps:
        yield ", ".join(parts)
    if header.ending in ("failed", "interrupted"):
        yield _ending(result)
    if result.ledger is not None:
        yield from _ledger(result.ledger)


def _ending(result: WatchResult) -> str:
    ending, code = result.header.ending, result.header.exit_code
    how = "" if code is None else f" {exit_words(code)}"
    if code is not None and code < 0:
        verb = "was ended"
    else:
        verb = "was interrupted" if ending == "interrupted" else "failed"
    hint = ""
    if code in _KILLED and not any(OOM_KILLED in note for note in result.notes):
        hint = " `kill -9`, batch systems and the kernel's OOM killer send SIGKILL."
    return f"The run {verb}{how}.{hint}"


def _ledger(books: MemoryLedger) -> Iterator[str]:
    peak, total = books.peak_reserved_bytes, books.total_bytes
    if peak is None:
        return
    text = f"GPU memory: {size(peak)} reserved at the peak"
    if books.peak_allocated_bytes is not None:
        text += f", {size(books.peak_allocated_bytes)} of it in tensors"
    yield text + (f", of {size(total)}" if total else "")


def _phases(result: WatchResult) -> list[list[str]]:
    """A bar for each phase that takes 1% or more."""
    shown = [each for each in result.phases if each.share >= 0.01]
    rows = []
    for each in sorted(shown, key=lambda phase: -phase.share)[:6]:
        bar = "█" * max(1, round(_BAR * min(1.0, each.share)))  # a damaged table has any share
        gpu = "" if each.gpu_s is None else f"  (GPU {duration(each.gpu_s)})"
        rows.append((PHASES[each.name], percent(each.share), duration(each.host_s), bar + gpu))
    return table_rows(rows, "lrrl")


def _finding(each: Finding, *, whole: bool) -> list[Line]:
    style: Style = "plain" if each.severity == "info" else "bad"
    lines = _wrapped(f"{_MARKS[each.severity]} {title(each)}", style)
    evidence = "; ".join(map(evidence_text, each.evidence if whole else each.evidence[:3]))
    sure = "" if each.confidence == "certain" else f" ({each.confidence})"
    if whole:
        lines += _wrapped(f"{printable(each.cause)}{sure}: {evidence}", "quiet", "   ")
    elif evidence:
        lines += _wrapped(evidence + sure, "quiet", "   ")[:2]
    setting = setting_text(each)
    fix = f"fix: {printable(each.action)}" + (f" [{setting}]" if setting else "")
    if whole:
        return [*lines, *_wrapped(fix, "plain", "   ")]
    return [*lines, *lines_of(shortened(fix, _FIX_LINES, "   ", "     "))]


def _wrapped(text: str, style: Style, indent: str = "") -> list[Line]:
    return lines_of(wrapped(text, indent, indent + "  "), style)
