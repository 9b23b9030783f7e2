"""What is said of a watched run: its measures, and the findings of all rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from trainfit.results.format import duration
from trainfit.results.watch.result import Finding, Unknown, WatchResult
from trainfit.results.watch.run import RankRecord, RunRecord, missing_rows
from trainfit.watch.figures import gpu_time, measures, thresholds, trainings
from trainfit.watch.figures.cleaning import clean
from trainfit.watch.figures.ledger import ledger
from trainfit.watch.figures.light_steps import is_light
from trainfit.watch.figures.view import RunView, median, percentile
from trainfit.watch.limits import BY_KIND, limit
from trainfit.watch.rules import gpu, host, input, learning, memory
from trainfit.watch.rules.each_rank import look
from trainfit.watch.rules.input.input_bound import USELESS
from trainfit.watch.rules.rule import Rule, worst_first

RULES: Final[tuple[Rule, ...]] = (
    *input.RULES,
    *host.RULES,
    *gpu.RULES,
    *memory.RULES,
    *learning.RULES,
)
#: Characters of an error's message in a note.
_LONGEST_REASON: Final = 240
_INPUT: Final = frozenset(
    ("input_bound", "slow_worker", "epoch_start", "no_workers", "too_many_workers")
)


def judge(run: RunRecord) -> WatchResult:
    """Judge a run, also one that goes on or was killed. Never raises for what its tables hold."""
    view = RunView(clean(run))
    rank = view.judged
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
        notes=tuple(_notes(run, view)),
        next_command=_next_command(view, findings),
        folder=run.folder,
    )


def _look(view: RunView) -> tuple[tuple[Finding, ...], tuple[Unknown, ...]]:
    """Findings, the most severe first; and of what nothing can be said."""
    said = [each for rule in RULES for each in look(rule, view)]
    findings = sorted((each for each in said if isinstance(each, Finding)), key=worst_first)
    return tuple(findings), tuple(each for each in said if isinstance(each, Unknown))


def _notes(run: RunRecord, view: RunView) -> Iterator[str]:
    ranks = [rank for machine in run.machines for rank in machine.ranks]
    for rank in ranks:
        yield from rank.header.notes
        yield from _out_of_memory(rank)
    yield from _trainings(view)
    lost = sum(rank.header.lost_rows for rank in ranks)
    if lost:
        steps = [rank.header.first_lost_step for rank in ranks]
        refused = [rank.header.refused_rows for rank in ranks]
        counted = [each for each in refused if each is not None]
        yield missing_rows(
            lost,
            sum(counted) if len(counted) == len(refused) else None,
            min((step for step in steps if step is not None), default=None),
        )
    cost = max((rank.header.recording_share or 0.0 for rank in ranks), default=0.0)
    if any(rank.header.light_steps for rank in ranks):
        # Of the rows that are there: the header counts those, too, that a full disk has taken.
        light = max(is_light(rank.steps).sum() / max(1, len(rank.steps)) for rank in ranks)
        yield (
            f"to keep recording cheap, the phases of {light:.0%} of the steps are estimated "
            f"(recording cost {cost:.1%} of the time)"
        )
    if len(ranks) < run.header.world_size:
        yield f"{len(ranks)} of {run.header.world_size} ranks were recorded"


def _trainings(view: RunView) -> Iterator[str]:
    """Which of several trainings is judged. ``view`` is of rows that were cleaned."""
    every = trainings.trainings(view.judged.record)
    chosen = trainings.judged(every)
    if chosen is None:
        return
    others = ", ".join(duration(each.step_s) for each in every if each != chosen)
    yield (
        f"the script trains {len(every)} times: figures are of steps {chosen.first} to "
        f"{chosen.last} ({duration(chosen.step_s)} a step); a step of the others: {others}"
    )


def _out_of_memory(rank: RankRecord) -> Iterator[str]:
    """The last time that memory ran out, which mostly ended the run."""
    full = [event for event in rank.events if event.kind == "out_of_memory"]
    if full:
        of = f" (rank {rank.header.rank})" if rank.header.world_size > 1 else ""
        line = full[-1].text.partition("\n")[0]
        yield f"memory ran out in step {full[-1].step}{of}: {line[:_LONGEST_REASON]}"


def _next_command(view: RunView, findings: tuple[Finding, ...]) -> str:
    """What to type next: try what the command says a value of, measure the loader, set a
    variable, watch another time after a change of the script, or plan memory, batch and
    precision."""
    header, rank = view.run.header, view.judged
    if not header.command:
        return ""  # a notebook
    if len(rank.steps) < thresholds.LEAST_STEPS:
        return f"trainfit watch -- {header.command}"
    if any(_is_said(header.command, finding) for finding in findings):
        return f"trainfit watch --verify -- {header.command}"
    for finding in findings:
        if finding.kind in _INPUT and USELESS not in finding.action:
            return f"trainfit loader -- {header.command}"
        words = [f"{name}={value}" for name, value in finding.settings.items() if _is_env(name)]
        if words:
            return f"{' '.join(words)} trainfit watch -- {header.command}"
        if finding.severity != "info":
            verb = "watch" if finding.kind in BY_KIND else "plan"
            return f"trainfit {verb} -- {header.command}"
    return f"trainfit plan -- {header.command}"


def _is_said(command: str, finding: Finding) -> bool:
    """Does the command say one of its settings, by a placeholder or an option of that name?
    Without workers what is recommended for them cannot be given."""
    names = ["num_workers"] if "num_workers" in finding.settings else finding.settings
    for name in names:
        option = re.escape(name).replace("_", "[_-]")
        if re.search(rf"(?<!\{{)\{{{re.escape(name)}:|[\s.+-]{option}[= ][^\s-]", command):
            return True
    return False


def _is_env(name: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", name) is not None
