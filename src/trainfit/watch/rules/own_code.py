"""The script's own code between the phases: the line that costs most, and what it does there."""

from __future__ import annotations

import re
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
#: Of the looks at a line, those at one that it calls (or so many of one function), from which that
#: is the one to name.
_MOSTLY: Final = 0.6
_FEW_LINES: Final = 3
#: What the step computes, also where no module is called for it: Python's functions, and those in C
#: that they stand for.
_OF_MODEL: Final = re.compile(r"torch\.(?:nn\.functional|\w+\._nn)\.")
#: As a script calls them; some of them stand for a function in C of the same name.
_FUNCTIONAL: Final = re.compile(r"(?:^|\.)(?:F|functional)\.(\w+)$")


@dataclass(frozen=True)
class CostlyLine:
    """A line that looks found the thread at, with what it calls; ``count`` are these looks.

    Where they are of several lines of one function, it is the one with most of them; ``lines`` are
    the first and the last.
    """

    place: Place
    count: int
    calls: tuple[CodeLine, ...]
    lines: tuple[int, int]

    @property
    def most(self) -> CodeLine:
        """What it was found in most often."""
        return max(self.calls, key=lambda each: each.count)

    def __str__(self) -> str:
        """ "train.py:12", and of several lines "train.py:10-14"."""
        first, last = self.lines
        return str(self.place) if first == last else f"{self.place.file}:{first}-{last}"


def costliest(looks: StackLooks) -> CostlyLine | None:
    """The line with the most looks: from the training loop inwards, as long as one line has most
    of them, or few lines of the function that it calls; ``None``: none of the script was found."""
    within: Sequence[CodeLine] = [e for e in looks.lines if e.place and not _is_of_model(e)]
    found, depth = None, 0
    while within:
        counts: Counter[Place] = Counter()
        for each in within:
            if (place := _at(each, depth)) is not None:
                counts[place] += each.count
        if not counts:
            break
        place, count = counts.most_common(1)[0]
        if found is None or count >= _MOSTLY * found.count:
            within = [each for each in within if _at(each, depth) == place]
            found = CostlyLine(place, count, tuple(within), (place.line, place.line))
            depth += 1
            continue
        # What one line calls is one function: the lines of one file are its.
        own = {each: n for each, n in counts.most_common(_FEW_LINES) if each.file == place.file}
        if sum(own.values()) >= _MOSTLY * found.count:
            lines = min(each.line for each in own), max(each.line for each in own)
            calls = tuple(each for each in within if _at(each, depth) in own)
            found = CostlyLine(place, sum(own.values()), calls, lines)
        break
    return found


def _is_of_model(line: CodeLine) -> bool:
    """Is it a function of neural networks, called outside of modules: mostly the loss?"""
    if _OF_MODEL.match(line.inner) is not None:
        return True
    named = _FUNCTIONAL.search(line.calls)
    return named is not None and line.inner == f"torch.{named[1]}"


def _at(line: CodeLine, depth: int) -> Place | None:
    """The line so far inwards from the training loop."""
    chain = _chain(line)
    return Place.parse(chain[depth]) if depth < len(chain) else None


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
        f"{line} {habit.what}{called} for {checks.in_percent(share)} of the time",
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
