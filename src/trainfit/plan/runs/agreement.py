"""Whether another rank does with rank 0 what rank 0 does with it: else the job hangs.

One other rank is simulated for as many steps, alone; what both did in their common groups is
compared in order. Which: the last of rank 0's smallest group. A job whose ranks run side by side is
compared by what those did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.plan.runs.failures import (
    NotSimulated,
    ScriptError,
    cause_of,
    cause_of_error,
    what_happened,
)
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace
from trainfit.results.findings import Evidence, Finding, Fix, Place, fails_later
from trainfit.results.runs.communication import JOINS, LEAVES, Meeting
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import TraceOutcome
from trainfit.results.text import size

#: Of two ranks alone; others of the group need not do them.
_OF_TWO: Final = ("send", "receive")
#: Steps that are compared at the least.
_STEPS: Final = 2


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What is known of the other ranks: ``words`` say which was compared, or why none was;
    ``rank`` is its number, and ``other`` its run (``None``: there is none)."""

    words: str = ""
    findings: tuple[Finding, ...] = ()
    rank: int = 0
    other: Trace | None = None


def start(first: Trace, batch: int | None, runs: Runs) -> None:
    """Begin the run that :func:`agreement` will ask for."""
    if (spec := _other_of(first)) is not None:
        runs.start(batch, spec)


def agreement(
    first: Trace,
    batch: int | None,
    runs: Runs,
    end: tuple[RunSpec, Trace] | None,
    machines: int,
) -> Agreement:
    """The agreement of the job's other ranks, on so many machines; raises :class:`ScriptError`
    where one disagrees with rank 0, or uses its GPU.

    ``end`` is rank 0's run to the end of an epoch: where it does something with others there, they
    are compared there, too.
    """
    if first.ranks:
        for rank, trace in first.ranks.items():
            _require(first.ranks[0].outcome, trace.outcome, rank)
        return Agreement()
    spec = _other_of(first)
    if spec is None:
        return Agreement()
    try:
        other = _with_what_is_sent(first, batch, runs, spec)
    except NotSimulated:
        return Agreement()
    outcome = other.outcome
    _require(first.outcome, outcome, spec.rank)
    _require_own_gpu(first, outcome, spec.rank, machines)
    if outcome.status not in ("finished", "ended"):
        words = f"rank {spec.rank} could not be compared: {what_happened(outcome)}"
        return Agreement(words, _fails(outcome, spec.rank, writes=_writes(first.outcome)))
    findings = _uneven(first.outcome, outcome, spec.rank)
    findings += _compared_end(end, batch, runs, spec.rank, machines)
    words = f"rank {spec.rank} was simulated, too, and calls the same collectives"
    return Agreement(words, findings, spec.rank, other)


def _with_what_is_sent(first: Trace, batch: int | None, runs: Runs, spec: RunSpec) -> Trace:
    """The run of another rank; where that does not end well, side by side with rank 0, which may
    send it what it went wrong without: DeepSpeed compares lengths with those of rank 0."""
    other = runs.attempt(batch, spec)
    sends = any(meeting.kind == "broadcast" for meeting in _common(first.outcome, spec.rank))
    if not sends or other.outcome.status not in ("failed", "unsupported", "exited"):
        return other
    title = f"{spec.title}, next to rank 0"
    return runs.attempt(batch, dataclasses.replace(spec, company=(0, spec.rank), title=title))


def _compared_end(
    end: tuple[RunSpec, Trace] | None, batch: int | None, runs: Runs, rank: int, machines: int
) -> tuple[Finding, ...]:
    """What only some ranks do between epochs (an evaluation on rank 0) may be work for all, and
    what all do may be work for one."""
    if end is None or not any(meeting.kind not in _OF_TWO for meeting in end[1].outcome.meetings):
        return ()
    spec, trace = end
    spec = dataclasses.replace(spec, rank=rank, title=f"the end of an epoch as rank {rank}")
    try:
        other = runs.attempt(batch, spec).outcome
    except NotSimulated:
        return ()
    _require(trace.outcome, other, rank)
    ranks = 1 if trace.recording is None else trace.recording.ranks
    same_machine = rank < max(1, ranks // machines)
    return _one_file(trace.outcome, other, rank) if same_machine else ()


def _one_file(first: TraceOutcome, other: TraceOutcome, rank: int) -> tuple[Finding, ...]:
    """A checkpoint that two ranks of one machine write to one and the same file."""
    path = next((each for each in first.saves if each in other.saves), None)
    if path is None:
        return ()
    return (
        Finding(
            "one_file_of_ranks",
            "warning",
            f"rank 0 and rank {rank} write the same file {_name(path)}",
            (Evidence(f"written by rank 0 and rank {rank}", path),),
            "whoever writes last wins, and a reader or a killed job may find a file that two wrote "
            "at a time: a checkpoint that cannot be loaded",
            (
                Fix(
                    "write it on rank 0 alone; what gathers it (state_dict() of FSDP) stays on all",
                    line="if torch.distributed.get_rank() == 0:",
                ),
            ),
            place=Place.parse(first.saves[path]),
        ),
    )


def _other_of(first: Trace) -> RunSpec | None:
    """The run of the rank that is compared; ``None`` where rank 0 does nothing with others."""
    met = first.outcome.meetings
    groups: set[tuple[int, ...]] = {
        meeting.group for meeting in met if meeting.kind not in (*_OF_TWO, JOINS)
    }
    if first.ranks or not groups:
        return None
    smallest = min(groups, key=len)
    rank = max(smallest)
    over = first.outcome.status == "ended"
    steps = first.outcome.steps + 1 if over else max(1, min(_STEPS, first.outcome.steps))
    return RunSpec(rank=rank, steps=steps, title=f"as rank {rank}")


def _require(first: TraceOutcome, other: TraceOutcome, rank: int) -> None:
    if said := disagreement(first, other, rank):
        raise ScriptError(
            f"ranks disagree about collectives: {said}; the job would hang. Let every rank of a "
            "group call the same ones, in the same order, with the same shapes"
        )


def _require_own_gpu(first: Trace, other: TraceOutcome, rank: int, machines: int) -> None:
    ranks = 1 if first.recording is None else first.recording.ranks
    if not rank % max(1, ranks // machines):  # the first of its machine
        return
    shared = same_gpu(first.outcome, other, rank)
    if shared is not None:
        raise ScriptError(
            f"rank 0 and rank {rank} both use GPU {shared.gpu}, in {_words(shared)}; the job would "
            "end there: Duplicate GPU detected",
            cause=cause_of_error("DistBackendError: Duplicate GPU detected", ""),
        )


def same_gpu(first: TraceOutcome, other: TraceOutcome, rank: int) -> Meeting | None:
    """The first collective that two ranks of a machine do with the memory of one and the same GPU,
    as rank ``rank`` has it; ``None``: there is none."""
    mine, theirs = _common(first, rank), _common(other, rank)
    used = {meeting.gpu for meeting in mine} - {None}
    return next((their for their in theirs if their.gpu in used), None)


def disagreement(first: TraceOutcome, other: TraceOutcome, rank: int) -> str:
    """The first thing that rank 0 and another do not do alike in a common group; empty: there is
    none among what both did."""
    both = [_common(each, rank) for each in (first, other)]
    for group in dict.fromkeys(our.group for ours in both for our in ours):
        mine, theirs = ([our for our in ours if our.group == group] for ours in both)
        for number, (one, two) in enumerate(zip(mine, theirs, strict=False), start=1):
            if LEAVES in (one.kind, two.kind):
                break
            if one.kind != two.kind or (one.nbytes and two.nbytes and one.nbytes != two.nbytes):
                return (
                    f"rank 0 calls {_words(one)}, rank {rank} {_words(two)} "
                    f"(number {number} of their group of {len(group)})"
                )
        if any(each.kind == LEAVES for each in (*mine, *theirs)):
            continue
        if first.status == "ended" and len(mine) < len(theirs):
            return _goes_on(rank, theirs[len(mine)], 0)
        if other.status == "ended" and len(theirs) < len(mine):
            return _goes_on(0, mine[len(theirs)], rank)
    return ""


def _goes_on(rank: int, meeting: Meeting, ended: int) -> str:
    return f"rank {rank} calls {_words(meeting)}, where the script of rank {ended} has ended"


def _common(outcome: TraceOutcome, rank: int) -> Sequence[Meeting]:
    return [
        meeting
        for meeting in outcome.meetings
        if meeting.kind not in _OF_TWO and 0 in meeting.group and rank in meeting.group
    ]


def _words(meeting: Meeting) -> str:
    of = f" of {size(meeting.nbytes)}" if meeting.nbytes else ""
    return f"{meeting.kind}{of}" + (f" at {_name(meeting.place)}" if meeting.place else "")


def _name(place: str | None) -> str:
    return Path(place or "").name


def _writes(outcome: TraceOutcome) -> bool:
    """Did a rank write files, which no other sees?"""
    return outcome.protection is not None and outcome.protection.files > 0


def _fails(outcome: TraceOutcome, rank: int, *, writes: bool) -> tuple[Finding, ...]:
    """A rank whose script raises where that of rank 0 goes on. A file that is not there may be one
    that rank 0 ``writes``."""
    if outcome.status != "failed" or (writes and "FileNotFoundError" in what_happened(outcome)):
        return ()
    known = cause_of(outcome, "")
    return (
        Finding(
            "rank_fails",
            "warning",
            f"rank {rank} fails where rank 0 goes on: {what_happened(outcome)}",
            (),
            f"rank {rank} was simulated by itself: what other ranks write to files is not there "
            "for it, all else is as in the job",
            (known.fixes if known is not None else ())
            or (Fix("see that the script runs on every rank, not only where the rank is 0"),),
        ),
    )


def _uneven(first: TraceOutcome, other: TraceOutcome, rank: int) -> tuple[Finding, ...]:
    """Ranks whose epochs differ in their number of batches, and what comes of it. The batches that
    one lacks are made up for by ``model.join()``."""
    mine, theirs = _batches(first), _batches(other)
    joins = any(meeting.kind == JOINS for meeting in (*first.meetings, *other.meetings))
    if mine is None or theirs is None or mine == theirs or joins:
        return ()
    fewer, least, most = (0, mine, theirs) if mine < theirs else (rank, theirs, mine)
    cause = Finding(
        "uneven_batches",
        "critical",
        f"Rank 0 has {mine} batches an epoch, rank {rank} has {theirs}",
        (Evidence("batches of rank 0", str(mine)), Evidence(f"of rank {rank}", str(theirs))),
        "a rank without a next batch leaves the others waiting in a collective: the job hangs "
        "until its timeout, at the end of an epoch or, where ranks go on unevenly, of the last",
        (
            Fix(
                "a DistributedSampler, which fills up or drops to the same number; or "
                "`with model.join():` around the loop"
            ),
        ),
    )
    when = f"when rank {fewer} has no more batches ({least} an epoch, others {most}): it hangs"
    return (cause, fails_later(f"the job hangs {when}", when))


def _batches(outcome: TraceOutcome) -> int | None:
    loader = outcome.loader
    if loader is None or not loader.samples or not loader.batch_size:
        return None
    each = loader.samples / loader.batch_size
    return math.floor(each) if loader.drops_last else math.ceil(each)
