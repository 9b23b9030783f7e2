"""The script's own code between the phases: the line that costs most, and what it does there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.findings.own_code import habit_of
from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.code_lines import CostlyLine, costliest
from trainfit.watch.rules.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView

KIND: Final = "other_code"


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
    if line is None or line.count < thresholds.LOOKS_AT_LINE:
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
