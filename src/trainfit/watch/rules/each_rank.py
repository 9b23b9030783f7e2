"""Rules that look at one rank, asked of every rank of a run, and what they say put together."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule, worst_first


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
    if len(findings) == ranks:
        return dataclasses.replace(worst, rank=None)
    if len(findings) == 1:
        return worst
    evidence = (*worst.evidence, Evidence("ranks with it", float(len(findings))))
    return dataclasses.replace(worst, evidence=evidence)
