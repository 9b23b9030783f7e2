"""What a rule is, and how its findings come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from trainfit.results.watch.result import Finding, Severity, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RunView

_ORDER: Final[dict[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}

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
    """Of a finding that loses this share of the run's time."""
    if share >= thresholds.CRITICAL_SHARE:
        return "critical"
    return "warning" if share >= thresholds.WARNING_SHARE else "info"


def worst_first(finding: Finding) -> tuple[int, float, str]:
    """Findings are sorted by this: the most severe first, then what loses most."""
    return _ORDER[finding.severity], -(finding.share or 0.0), finding.kind
