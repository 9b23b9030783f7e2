"""The order of a run's findings: what ended it, what spoils its result, then what costs most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trainfit.findings import failure
from trainfit.findings.training import learning
from trainfit.results.findings import Finding

#: A run that stands still, or ranks of it that are gone; so far nothing else matters.
STANDSTILL: Final = ("standstill", "rank_died", "rank_missing", "worker_died")
_ENDS: Final = frozenset((*failure.KINDS, *STANDSTILL))
_SPOILS: Final = frozenset(
    (
        *learning.KINDS,
        "loss_not_finite",
        "iterable_not_sharded",
        "never_steps",
        "memory_retried",
    )
)
#: What grows until the run ends by it.
_FILLS: Final = frozenset(
    (
        "memory_growth",
        "ram_growth",
        "copy_on_write",
        "shm_growth",
        "temporary_growth",
        "process_growth",
        "thread_growth",
    )
)
#: Of the time, what a finding without a share is taken to cost, by its severity.
_ASSUMED: Final = {"critical": 0.25, "warning": 0.10, "info": 0.0}
#: The run learns from something else than is meant: weighs as much as what is critical.
_ALTERS: Final = frozenset(("generator_copied", "one_batch", "units_dead"))
#: Each operator costs more, by how much was not measured.
_SLOWS_ALL: Final = frozenset(("anomaly_mode", "profiler_on"))
#: Of what costs the same time, the cause of the other: threads that make batches late, what slows
#: down the lines that cost most.
_CAUSES: Final = frozenset(("thread_oversubscription", "tracing_on"))
#: What no change of the job mends comes after what one does.
_OUTSIDE: Final = frozenset(("cpu_contention",))
#: Wanted work, whose share is not all a loss.
_WANTED: Final = frozenset(("evaluation_share", "loop_over_elements"))
#: Of whose share some is work that stays: how much was not measured.
_PARTLY_WANTED: Final = frozenset(("thread_oversubscription", "tracing_on"))
#: Once, before the first step: its share is one of the whole run, and not of the steps.
_STARTS: Final = frozenset(("late_start",))
#: Rates above this many times the present one are not told apart.
_MOST_GAIN: Final = 20.0


def ends(finding: Finding) -> bool:
    """Does it say why a run failed, or that it stands still?"""
    return finding.kind in _ENDS


def spoils(finding: Finding) -> bool:
    """Does the run learn nothing, or something else than is meant?"""
    return finding.kind in _SPOILS and finding.is_critical


def comes_first(finding: Finding) -> bool:
    """Does it come before all that costs time?"""
    return spoils(finding) or (finding.kind in _FILLS and finding.is_critical)


def order(finding: Finding) -> tuple[int, float, bool, str]:
    """The key that findings of a run are sorted by."""
    place = 0 if ends(finding) else 1 if comes_first(finding) else 2 + (finding.severity == "info")
    return place, -_cost(finding), finding.kind not in _CAUSES, finding.kind


def _cost(finding: Finding) -> float:
    if finding.kind in _OUTSIDE:
        return 0.0
    if finding.kind in _ALTERS or finding.kind in _SLOWS_ALL:
        return _ASSUMED["critical"]
    if finding.kind in _STARTS and finding.share is not None:
        return finding.share / max(0.05, 1 - finding.share)  # times that of the steps
    return _ASSUMED[finding.severity] if finding.share is None else finding.share


def headline(findings: Iterable[Finding]) -> Finding | None:
    """The finding that the first line names, of findings in their order; ``None``: none is worth
    it."""
    first = next(iter(findings), None)
    return first if first is not None and first.severity != "info" else None


def gain(finding: Finding) -> str:
    """What its fix may gain at most, in words; empty where that is not told."""
    if finding.fix.gain is not None:
        return f"{finding.fix.gain:.2g}× as fast with its fix"
    share = finding.share or 0.0
    if (
        share < 1 - 1 / 1.05
        or finding.kind in _WANTED | _STARTS
        or ends(finding)
        or spoils(finding)
    ):
        return ""
    maximum = 1 / (1 - share) if share < 1 else _MOST_GAIN
    if finding.kind in _PARTLY_WANTED:
        more = " or more" if maximum >= _MOST_GAIN else ""
        return f"up to {min(maximum, _MOST_GAIN):.2g}× as fast{more} with its fix"
    if maximum >= _MOST_GAIN:
        return f"more than {_MOST_GAIN:.0f}× as fast without it"
    return f"up to {maximum:.2g}× as fast without it"
