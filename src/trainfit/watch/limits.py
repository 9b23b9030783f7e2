"""What bounds a run: the costliest finding, or the device that is busy all the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.results.watch.result import Finding, Limit
from trainfit.watch.figures import gpu_time, thresholds
from trainfit.watch.figures.view import PHASES, RankView

#: Kinds of findings, and what bounds a run that loses most by them.
BY_KIND: Final[Mapping[str, Limit]] = {
    "input_bound": "input",
    "slow_worker": "input",
    "epoch_start": "input",
    "no_workers": "input",
    "unpinned_copies": "copy",
    "copies": "copy",
    "hidden_syncs": "sync",
    "checkpoint_stalls": "checkpoint",
    "host_bound_launches": "host",
    "one_hot_thread": "script",
    "script_waits": "script",
    "cgroup_throttling": "cpu",
    "thread_oversubscription": "cpu",
    "cpu_contention": "cpu",
    "swapping": "cpu",
    "straggler": "communication",
    "thermal_throttling": "gpu",
    "power_throttling": "gpu",
    "clocks_set": "gpu",
}


#: Parts of a step that are no limit where computing it takes longer.
_PARTS: Final = ("input", "checkpoint", "copy")

#: What bounds all ranks, whichever of them has it.
_OF_ALL: Final = ("communication", "gpu")


def limit(rank: RankView, findings: Sequence[Finding]) -> Limit:
    """Of one rank, with what was found."""
    if len(rank.steps) < thresholds.LEAST_STEPS:
        return "unknown"
    costly = [
        each
        for each in findings
        if (each.share or 0.0) >= thresholds.WARNING_SHARE and _bounds(each, rank)
    ]
    if costly:
        most = max(costly, key=lambda each: each.share or 0.0)
        bound = BY_KIND[most.kind]
        return "cpu" if bound in _PARTS and _computes(rank) > (most.share or 0.0) else bound
    if gpu_time.has_gpu(rank):
        idle = gpu_time.idle_share(rank)
        return "gpu" if idle is not None and idle < thresholds.CRITICAL_SHARE else "unknown"
    return _longest(rank)


def _longest(rank: RankView) -> Limit:
    """Without a GPU: what most of the time goes to."""
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
    """Without a GPU: the share of the time in which the CPU computes steps, or evaluates."""
    if gpu_time.has_gpu(rank):
        return 0.0
    phases = ("forward", "backward", "optimizer", "evaluation")
    return sum(rank.share(name) or 0.0 for name in phases)


def _bounds(finding: Finding, rank: RankView) -> bool:
    """Does it bound the run as this rank sees it?"""
    bound = BY_KIND.get(finding.kind)
    return bound in _OF_ALL or (bound is not None and finding.rank in (None, rank.header.rank))
