"""What a rule is, and how its findings come about."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainfit.results.findings import Evidence, Finding, Severity, Unknown
from trainfit.watch import thresholds
from trainfit.watch.view import RunView

_ORDER: Final[dict[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}

#: Of the worst rank's share, what the others' must be for it to be said of all.
_ALIKE: Final = 0.5

#: Gives findings, or what would be needed to tell; nothing where nothing is wrong.
Look = Callable[[RunView], Iterator[Finding | Unknown]]


@dataclass(frozen=True)
class Rule:
    """``kinds`` are the kinds of findings (and of unknowns) that ``look`` may give; with
    ``each_rank`` it looks at :attr:`RunView.judged` alone, and is asked of each rank."""

    kinds: tuple[str, ...]
    look: Look
    each_rank: bool = False


def severity(share: float) -> Severity:
    """The severity of a finding that loses this share of the run's time."""
    if share >= thresholds.CRITICAL_SHARE:
        return "critical"
    return "warning" if share >= thresholds.WARNING_SHARE else "info"


def worst_first(finding: Finding) -> tuple[int, float, str]:
    """Findings are sorted by this: the most severe first, then what loses most."""
    return _ORDER[finding.severity], -(finding.share or 0.0), finding.kind


# ---
# Rules that look at one rank, asked of every rank of a run, and what they say put together.


def look(rule: Rule, view: RunView) -> Iterator[Finding | Unknown]:
    """What ``rule`` says; a finding of some ranks only names the one with the worst."""
    if not rule.each_rank or len(view.ranks) == 1:
        yield from rule.look(view)
        return
    found: dict[tuple[str, int], list[Finding]] = defaultdict(list)
    unknown: dict[str, Unknown] = {}
    for place, rank in enumerate(view.ranks):
        counts: dict[str, int] = defaultdict(int)
        for each in rule.look(dataclasses.replace(view, place=place)):
            if isinstance(each, Unknown):
                unknown.setdefault(each.kind, each)
                continue
            of_rank = dataclasses.replace(each, rank=rank.header.rank)
            found[each.kind, counts[each.kind]].append(of_rank)
            counts[each.kind] += 1
    for findings in found.values():
        yield _together(findings, len(view.ranks))
    kinds = {kind for kind, _ in found}
    yield from (each for kind, each in unknown.items() if kind not in kinds)


def _together(findings: Sequence[Finding], ranks: int) -> Finding:
    worst = min(findings, key=worst_first)
    if len(findings) == ranks and min(finding.share or 0.0 for finding in findings) >= _ALIKE * (
        worst.share or 0.0
    ):
        return dataclasses.replace(worst, rank=None)
    if len(findings) == 1:
        return worst
    evidence = (*worst.evidence, Evidence("ranks with it", float(len(findings))))
    return dataclasses.replace(worst, evidence=evidence)
