"""What is said of a watched run: its measures, and the findings of all rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Finding, Severity, Unknown, WatchResult
from trainfit.results.watch.run import RunRecord
from trainfit.watch import gpu_time, measures
from trainfit.watch.cleaning import clean
from trainfit.watch.ledger import ledger
from trainfit.watch.limits import BY_KIND, limit
from trainfit.watch.rules import thresholds
from trainfit.watch.rules.registry import RULES
from trainfit.watch.view import RunView, median, percentile

_ORDER: Final[dict[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}
_INPUT: Final = frozenset(
    ("input_bound", "slow_worker", "epoch_start", "no_workers", "too_many_workers")
)


def judge(run: RunRecord) -> WatchResult:
    """Judge a run, also one that goes on or was killed. Never raises for what its tables hold."""
    view = RunView(clean(run))
    rank = view.first
    findings, unknown = _look(view)
    interval = tuple(percentile(rank.steps["step_s"], percent) for percent in (10, 90))
    return WatchResult(
        header=run.header,
        steps=len(rank.steps),
        seconds=rank.seconds,
        step_s=median(rank.steps["step_s"]),
        step_interval_s=None if None in interval else interval,  # type: ignore[arg-type]
        samples_per_s=measures.samples_per_s(view),
        phases=measures.phases(rank),
        limit=limit(rank, findings),
        findings=findings,
        unknown=unknown,
        ledger=ledger(rank),
        timeline=measures.timeline(rank),
        ranks=tuple(measures.summary(each) for each in view.ranks),
        gpu_utilization=gpu_time.utilization(rank),
        gpu_busy=gpu_time.busy_by_events(rank),
        mfu=measures.mfu(rank),
        notes=tuple(_notes(run)),
        next_command=_next_command(view, findings),
        folder=run.folder,
    )


def _look(view: RunView) -> tuple[tuple[Finding, ...], tuple[Unknown, ...]]:
    """Findings, the most severe first; and of what nothing can be said."""
    said = [each for rule in RULES for each in rule.look(view)]
    findings = [each for each in said if isinstance(each, Finding)]
    findings.sort(key=lambda each: (_ORDER[each.severity], -(each.share or 0.0), each.kind))
    return tuple(findings), tuple(each for each in said if isinstance(each, Unknown))


def _notes(run: RunRecord) -> Iterator[str]:
    for rank in run.ranks:
        yield from rank.header.notes
    lost = sum(rank.header.lost_rows for rank in run.ranks)
    if lost:
        yield f"{lost} rows could not be written and are missing"
    if len(run.ranks) < run.header.world_size:
        yield f"recorded are {len(run.ranks)} of {run.header.world_size} ranks"


def _next_command(view: RunView, findings: tuple[Finding, ...]) -> str:
    """What to type next: measure the loader, set a variable, watch again after a change of the
    script, or plan memory, batch and precision."""
    header, rank = view.run.header, view.first
    if len(rank.steps) < thresholds.LEAST_STEPS:
        return f"trainfit watch -- {header.command}"
    for finding in findings:
        if finding.kind in _INPUT:
            return f"trainfit loader -- {header.command}"
        words = [f"{name}={value}" for name, value in finding.settings.items() if _is_env(name)]
        if words:
            return f"{' '.join(words)} trainfit watch -- {header.command}"
        if finding.severity != "info":
            verb = "watch" if finding.kind in BY_KIND else "plan"
            return f"trainfit {verb} -- {header.command}"
    return f"trainfit plan -- {header.command}"


def _is_env(name: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", name) is not None
