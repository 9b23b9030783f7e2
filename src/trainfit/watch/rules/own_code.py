"""The script's own code between the phases: the line that costs most, and what it does there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainfit.findings.own_code import habit_of
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import CodeLine, StackLooks
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView

KIND: Final = "other_code"
#: Looks at a line from which its share is told: of 5 that are 40% of all, one in ten is off by more
#: than a half.
_LEAST_LOOKS: Final = 5
#: Of the looks at a line, those at one that it calls, from which that is the one to name.
_MOSTLY: Final = 0.6


@dataclass(frozen=True)
class CostlyLine:
    """A line that looks found the thread at, with what it calls; ``count`` are these looks."""

    place: Place
    count: int
    calls: tuple[CodeLine, ...]

    @property
    def most(self) -> CodeLine:
        """What it was found in most often."""
        return max(self.calls, key=lambda each: each.count)


def costliest(looks: StackLooks) -> CostlyLine | None:
    """The line with the most looks: from the training loop inwards, as long as one line has most
    of them; ``None``: no line of the script was found."""
    within: Sequence[CodeLine] = [each for each in looks.lines if each.place]
    found, depth = None, 0
    while within:
        counts: Counter[str] = Counter()
        for each in within:
            if depth < len(_chain(each)):
                counts[_chain(each)[depth]] += each.count
        if not counts:
            break
        place, count = counts.most_common(1)[0]
        parsed = Place.parse(place)
        if parsed is None or (found is not None and count < _MOSTLY * found.count):
            break
        within = [e for e in within if depth < len(_chain(e)) and _chain(e)[depth] == place]
        found = CostlyLine(parsed, count, tuple(within))
        depth += 1
    return found


def _chain(line: CodeLine) -> tuple[str, ...]:
    """From the training loop inwards."""
    return (*reversed(line.callers), line.place)


def share_of_line(rank: RankView, line: CostlyLine) -> float:
    """Of the steady steps' time: what phases leave, divided as the looks tell; on a GPU only while
    that is idle for no other reason."""
    main = MainThread(rank)
    every = sum(each.count for each in rank.header.other_code.lines)
    share = (main.other or 0.0) * line.count / max(1, every)
    if not checks.has_gpu(rank):
        return share
    return min(share, main.unexplained_idle or 0.0)


def _find_other_code(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if len(rank.steps) < thresholds.LEAST_STEPS:
        return
    line = costliest(rank.header.other_code)
    if line is None or line.count < _LEAST_LOOKS:
        return
    share = share_of_line(rank, line)
    if share < thresholds.WARNING_SHARE:
        return
    most = line.most
    names = tuple(filter(None, (most.calls, most.inner)))
    habit = habit_of(names, most.waits_for, has_loader=bool(rank.header.loaders))
    name = most.calls or most.inner
    called = f" (`{name}`)" if name else ""
    yield Finding(
        KIND,
        severity(share),
        f"{line.place} {habit.what}{called} for {checks.in_percent(share)} of the time",
        (
            Evidence("outside of all phases", MainThread(rank).other or 0.0, "of the time"),
            Evidence("looks at the main thread", float(rank.header.other_code.looks)),
            Evidence("of them at this line", float(line.count)),
        ),
        "The training waits for this line of the script in each step, or in some of them",
        (Fix(habit.action),),
        "likely",
        share,
        line.place,
    )


OTHER_CODE: Final = Rule((KIND,), _find_other_code, each_rank=True)
