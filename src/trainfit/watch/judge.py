"""What is said of a watched run: its measures, and the findings of all rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from trainfit.findings import ranking
from trainfit.results.findings import Finding, Unknown
from trainfit.results.runs.watched import RankRecord, RunRecord, missing_rows
from trainfit.results.text import duration, line_of
from trainfit.results.watch import Limit, WatchResult
from trainfit.watch import checks, measures, thresholds
from trainfit.watch import view as trainings
from trainfit.watch.measures import host_memory, ledger
from trainfit.watch.rules import (
    ending,
    gpu,
    growth,
    host,
    input,
    longer_steps,
    lost_ranks,
    memory,
    ranks,
    standing,
    start,
    training,
)
from trainfit.watch.rules.input import USELESS
from trainfit.watch.rules.memory import HOST_MEMORY
from trainfit.watch.rules.own_code import (
    COLLECTOR_PAUSES,
    ELEMENT_LOOP,
    IN_PASSES,
    KIND,
    LOOP_KIND,
    OTHER_CODE,
    PASS_KIND,
    PAUSES_KIND,
    PYTHON_THREAD,
    THREAD_KIND,
)
from trainfit.watch.rules.rule import Rule, look
from trainfit.watch.rules.workers import COPIES
from trainfit.watch.view import PHASES, RankView, RunView, clean, is_light, median, percentile

# ---
# What bounds a run: the costliest finding, or the device that is busy all the time.


#: Kinds of findings, and what bounds a run that loses most by them.
BY_KIND: Final[Mapping[str, Limit]] = {
    "input_bound": "input",
    "slow_worker": "input",
    "epoch_start": "input",
    "no_workers": "input",
    "sampler_share": "input",
    "unpinned_copies": "copy",
    "copies": "copy",
    "hidden_syncs": "sync",
    "checkpoint_stalls": "checkpoint",
    "host_bound_launches": "host",
    "recompiles": "host",
    "one_hot_thread": "script",
    "script_waits": "script",
    KIND: "script",
    THREAD_KIND: "script",
    LOOP_KIND: "script",
    PASS_KIND: "script",
    PAUSES_KIND: "script",
    "cgroup_throttling": "cpu",
    "thread_oversubscription": "cpu",
    "cpu_contention": "cpu",
    "own_programs": "cpu",
    "swapping": "cpu",
    "straggler": "communication",
    "exposed_communication": "communication",
    "thermal_throttling": "gpu",
    "power_throttling": "gpu",
    "clocks_set": "gpu",
}


#: Parts of a step that are no limit where computing it takes longer.
_PARTS: Final = ("input", "checkpoint", "copy")

#: What bounds all ranks, whichever of them has it.
_OF_ALL: Final = ("communication", "gpu")


def limit(rank: RankView, findings: Sequence[Finding]) -> Limit:
    """The limit of one rank, with what was found."""
    if checks.are_few(rank):
        return "unknown"
    costly = [
        finding
        for finding in findings
        if (finding.share or 0.0) >= thresholds.WARNING_SHARE and _bounds(finding, rank)
    ]
    if costly:
        most = max(costly, key=lambda each: each.share or 0.0)
        bound = BY_KIND[most.kind]
        return "cpu" if bound in _PARTS and _computes(rank) > (most.share or 0.0) else bound
    if checks.has_gpu(rank):
        idle = checks.idle_share(rank)
        return "gpu" if idle is not None and idle < thresholds.CRITICAL_SHARE else "unknown"
    return _longest(rank)


def _longest(rank: RankView) -> Limit:
    """The limit without a GPU: what most of the time goes to."""
    if rank.share("forward") is None:
        return "unknown"
    shares = {name: rank.share(name) or 0.0 for name in PHASES}
    parts: dict[Limit, float] = {
        "cpu": _computes(rank),
        "input": shares["input"],
        "checkpoint": shares["checkpoint"],
        "script": max(0.0, 1 - sum(shares.values())),
    }
    return max(parts, key=lambda name: parts[name])


def _computes(rank: RankView) -> float:
    """The share of the time in which the CPU computes steps, or evaluates; 0 with a GPU."""
    if checks.has_gpu(rank):
        return 0.0
    phases = ("forward", "backward", "optimizer", "evaluation")
    return sum(rank.share(name) or 0.0 for name in phases)


def _bounds(finding: Finding, rank: RankView) -> bool:
    """Does it bound the run as this rank sees it?"""
    bound = BY_KIND.get(finding.kind)
    return bound in _OF_ALL or (bound is not None and finding.rank in (None, rank.header.rank))


RULES: Final[tuple[Rule, ...]] = (
    *ending.RULES,
    *standing.RULES,
    *lost_ranks.RULES,
    *input.RULES,
    *host.RULES,
    OTHER_CODE,
    PYTHON_THREAD,
    COLLECTOR_PAUSES,
    ELEMENT_LOOP,
    IN_PASSES,
    *gpu.RULES,
    *ranks.RULES,
    *gpu.UNEVEN_GPUS,
    *memory.RULES,
    HOST_MEMORY,
    *growth.RULES,
    longer_steps.THREADS,
    longer_steps.LONGER_STEPS,
    start.START,
    *training.RULES,
    COPIES,
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
        host_memory=host_memory(rank),
        timeline=measures.timeline(rank),
        ranks=tuple(measures.summary(each) for each in view.ranks),
        gpu_utilization=checks.utilization(rank),
        gpu_busy=checks.busy(rank),
        mfu=measures.mfu(rank),
        notes=tuple(_notes(run, view, findings)),
        next_command=_next_command(view, findings),
        folder=run.folder,
    )


def _look(view: RunView) -> tuple[tuple[Finding, ...], tuple[Unknown, ...]]:
    """Findings, the most important first; and of what nothing can be said."""
    said = [each for rule in RULES for each in look(rule, view)]
    findings = [finding for finding in said if isinstance(finding, Finding)]
    findings = sorted(_once(findings), key=ranking.order)
    return tuple(findings), tuple(unknown for unknown in said if isinstance(unknown, Unknown))


#: Kinds of which another one says the same with more detail.
_SAID_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "script_waits": (KIND, THREAD_KIND),
    # Looks find a line at which Python has just collected garbage.
    KIND: (PAUSES_KIND,),
    "one_hot_thread": (KIND, LOOP_KIND, PASS_KIND, PAUSES_KIND),
    "epoch_start": ("sampler_share",),
}


#: Kinds that tell how long ranks wait for each other.
_OF_RANKS: Final = ("exposed_communication", "straggler", "uneven_utilization")


def _once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The findings without those that another finding explains by at least half."""
    shares = {each.kind: each.share or 0.0 for each in findings}
    # Looks at the main thread found that line because of them.
    of_others = (*growth.FILES.kinds, *ranking.STANDSTILL)
    told = {str(each.at) for each in findings if each.kind in of_others and each.place}
    started = {str(each.at) for each in findings if each.kind == "epoch_start" and each.place}
    still = any(each.kind == "standstill" and each.is_critical for each in findings)
    for finding in findings:
        if still and finding.kind in _OF_RANKS:
            continue  # one waits for another that does not come
        if finding.kind == KIND and str(finding.at) in told:
            continue
        if (
            finding.kind == "iterator_restarted"
            and str(finding.at) in started
            and not finding.is_critical
        ):
            continue  # what it costs says the other one
        by = max((shares.get(kind, 0.0) for kind in _SAID_BY.get(finding.kind, ())), default=0.0)
        if not by or finding.share is None or by < 0.5 * finding.share:
            yield finding


def _notes(run: RunRecord, view: RunView, findings: Sequence[Finding]) -> Iterator[str]:
    ranks = [rank for machine in run.machines for rank in machine.ranks]
    if not any(map(ranking.ends, findings)) and (said := ending.unexplained(view)):
        yield said
    for rank in ranks:
        yield from rank.header.notes
        yield from _out_of_memory(rank)
    yield from _trainings(view)
    if not any(finding.kind == start.KIND for finding in findings):
        yield from _late_start(view.judged)
    lost = sum(rank.header.lost_rows for rank in ranks)
    if lost:
        steps = [rank.header.first_lost_step for rank in ranks]
        refused = [rank.header.refused_rows for rank in ranks]
        counted = [rows for rows in refused if rows is not None]
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
    """A note on which of several trainings is judged. ``view`` is of rows that were cleaned."""
    every = trainings.trainings(view.judged.record)
    chosen = trainings.judged(every)
    if chosen is None:
        return
    others = ", ".join(duration(each.step_s) for each in every if each != chosen)
    yield (
        f"the script trains {len(every)} times: figures are of steps {chosen.first} to "
        f"{chosen.last} ({duration(chosen.step_s)} a step); a step of the others: {others}"
    )


def _late_start(rank: RankView) -> Iterator[str]:
    """How much of a run was no training yet."""
    first = start.late_start_s(rank)
    if first is not None and not len(rank.record.steps):
        yield f"no training step in {duration(first)}: what comes before it is not judged"
    elif first is not None:
        yield (
            f"the first training step was over after {duration(first)} of "
            f"{duration(float(rank.record.steps['end_s'][-1]))}: what comes before it (imports, "
            "reading data, the model, the first batch) is not judged"
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
    if findings and findings[0].kind in ending.ENDING.kinds:
        verb = "plan" if findings[0].kind == "gpu_out_of_memory" else "watch"
        return f"trainfit {verb} -- {header.command}"
    if findings and findings[0].kind in ranking.STANDSTILL:
        return f"trainfit watch -- {header.command}"
    if checks.are_few(rank):
        return f"trainfit plan -- {header.command}"  # the same again would tell no more
    if any(_is_said(header.command, finding) for finding in findings):
        return f"trainfit watch --verify -- {header.command}"
    for finding in findings:
        if finding.kind in _INPUT and USELESS not in finding.fix.action:
            return f"trainfit loader -- {header.command}"
        words = [f"{name}={value}" for name, value in finding.fix.settings.items() if _is_env(name)]
        if words:
            return f"{line_of(words)} trainfit watch -- {header.command}"
        if finding.severity != "info":
            fixed = {*BY_KIND, *longer_steps.LONGER_STEPS.kinds, start.KIND}
            is_fixed_first = finding.kind in fixed or ranking.comes_first(finding)
            verb = "watch" if is_fixed_first else "plan"
            return f"trainfit {verb} -- {header.command}"
    return f"trainfit plan -- {header.command}"


def _is_said(command: str, finding: Finding) -> bool:
    """Does the command say one of its settings, by a placeholder or an option of that name?
    Without workers what is recommended for them cannot be given."""
    names = ["num_workers"] if "num_workers" in finding.fix.settings else finding.fix.settings
    for name in names:
        option = re.escape(name).replace("_", "[_-]")
        if re.search(rf"(?<!\{{)\{{{re.escape(name)}:|[\s.+-]{option}[= ][^\s-]", command):
            return True
    return False


def _is_env(name: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z0-9_]*", name) is not None
