"""Ranks that ended before the others, and ranks that never came."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.findings.source_code import short_file
from trainfit.findings.tracebacks import exception_in, parse
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import Event, RankRecord, exit_words
from trainfit.results.text import count, short
from trainfit.watch.rules import ending
from trainfit.watch.rules.rule import Rule
from trainfit.watch.rules.standing import (
    SAME_CALLS,
    end_of,
    raised_by,
    still_of,
    uneven_batches,
)
from trainfit.watch.view import RankView, RunView, known

#: What a rank raises because another one is gone.
_CONSEQUENCE: Final = re.compile(
    r"[Cc]onnection (?:closed|reset|refused)|[Bb]roken pipe|NCCL|gloo|[Tt]imed? ?out|socket"
    r"|DistBackendError|DistNetworkError|remote process|SignalException"
)
#: Seconds without a sample of a process from which it is gone: every two seconds there is one, more
#: rarely on a busy machine.
_GONE_S: Final = 5.0


def _find_dead_rank(run: RunView) -> Iterator[Finding | Unknown]:
    headers = [view.header for view in run.ranks]
    if headers[0].world_size < 2 or all(header.ending == "finished" for header in headers):
        return
    if any(True for _ in ending.ENDING.look(run)):
        return
    finding = _raised_first(run) or _gone_first(run)
    if finding is not None:
        yield finding


def _raised_first(run: RunView) -> Finding | None:
    """The first exception that does not follow from another rank's end."""
    raised = [
        (event, view)
        for view in run.ranks
        for event in view.record.events
        if event.kind == "exception" and not _CONSEQUENCE.search(raised_by(event))
    ]
    if not raised or "KeyboardInterrupt" in raised_by(min(raised, key=lambda e: e[0].time_s)[0]):
        return None
    event, view = min(raised, key=lambda each: each[0].time_s)
    parsed = parse(*exception_in(event.text), event.text)
    culprit = parsed.culprit
    return Finding(
        "rank_died",
        "critical",
        f"Rank {view.header.rank} failed first: {short(raised_by(event), 120)}",
        (Evidence("in step", float(event.step)),),
        "The other ranks lost their connection to it, or were ended after it",
        (Fix("fix this error; those of the other ranks follow from it"),),
        place=None if culprit is None else Place(short_file(culprit.path), culprit.line),
        rank=view.header.rank,
        last_step=event.step,
    )


def _gone_first(run: RunView) -> Finding | None:
    """A rank whose process is gone without an exception, and that did not stand still before."""
    gone = [view for view in run.ranks if _is_gone(view) and still_of(view) is None]
    if not gone:
        return None
    view = min(gone, key=end_of)
    step = int(view.record.steps["step"].max(initial=-1)) + 1
    code = view.header.exit_code
    crashed = next((event for event in view.record.events if event.kind == "crash"), None)
    how = exit_words(code) if code else "without an exception"
    if crashed is not None and not code:
        how = f"by a crash in native code ({_crash_of(crashed)})"
    uneven = uneven_batches(run)
    differs = crashed is not None and _is_of_gloo(run, crashed)
    if uneven and crashed is not None:
        how += ", and ranks have different numbers of batches"
    elif differs:
        how += ", as gloo ends a rank whose collective is not the one that the others make"
    return Finding(
        "rank_died",
        "critical",
        f"Rank {view.header.rank} ended first, {how}",
        (
            Evidence("ranks", float(view.header.world_size)),
            Evidence("steps that it had written", float(step)),
            *uneven,
        ),
        "It left no traceback: os._exit(), a signal (the kernel's OOM killer, a scheduler), or a "
        "crash in native code; the other ranks failed because it was gone",
        (
            Fix(
                f'{SAME_CALLS}; its last output may say so (of gloo: "a distributed collective '
                'mismatch")'
            )
            if differs or (uneven and crashed is not None)
            else Fix(
                f"look at the exit code that the launcher prints for rank {view.header.rank} "
                "(negative: a signal), and at that rank's last output"
            ),
        ),
        "likely",
        place=_where_others_were(run) if differs else None,
        rank=view.header.rank,
        last_step=step,
    )


def _is_of_gloo(run: RunView, crashed: Event) -> bool:
    """Did a thread of a library abort the process, which runs no Python, and another rank lost its
    connection of gloo? So that ends a collective of other sizes than the others' (enforce() in
    gloo/common/logging.h throws in its thread, where nobody catches it)."""
    if _crash_of(crashed) != "Aborted" or "  File " in crashed.text:
        return False
    return any("gloo" in raised_by(event) for event in _raised(run))


def _raised(run: RunView) -> Iterator[Event]:
    for view in run.ranks:
        yield from (event for event in view.record.events if event.kind == "exception")


def _where_others_were(run: RunView) -> Place | None:
    """The line of the script in which another rank lost its connection."""
    for event in _raised(run):
        culprit = parse(*exception_in(event.text), event.text).culprit
        if culprit is not None:
            return Place(short_file(culprit.path), culprit.line)
    return None


def _crash_of(event: Event) -> str:
    """ "Aborted" of "Fatal Python error: Aborted"."""
    match = re.match(r"Fatal Python error: (.+)", event.text)
    return "a signal" if match is None else match[1]


def _is_gone(view: RankView) -> bool:
    if view.header.ending in ("finished", "interrupted") or _has_exception(view.record):
        return False
    if view.header.ending == "failed":
        return True
    rows = view.run.processes
    seen = known(rows["time_s"][rows["pid"] == view.header.pid])
    every = known(rows["time_s"])
    return bool(len(seen)) and float(every.max() - seen.max()) > _GONE_S


def _has_exception(record: RankRecord) -> bool:
    return any(event.kind == "exception" for event in record.events)


def _find_missing_rank(run: RunView) -> Iterator[Finding | Unknown]:
    headers = [view.header for view in run.ranks]
    missing = sorted(set(range(headers[0].world_size)) - {header.rank for header in headers})
    still = any(still_of(view) is not None for view in run.ranks)
    if not missing or not (still or any(header.ending == "failed" for header in headers)):
        return
    names = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    yield Finding(
        "rank_missing",
        "critical",
        f"{count(len(missing), 'rank')} of {headers[0].world_size} never began to train: {names}",
        (),
        "Nothing was recorded of it: it ended or waits before its first step, or runs on another "
        "machine, which records into a folder of its own",
        (Fix("look at its output; of several machines, give each folder with --read"),),
        "possible",
    )


RULES: Final[Sequence[Rule]] = (
    Rule(("rank_died",), _find_dead_rank),
    Rule(("rank_missing",), _find_missing_rank),
)
