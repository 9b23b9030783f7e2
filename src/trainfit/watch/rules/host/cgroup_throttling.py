"""The container's CPU quota runs out, and the kernel stops all of its threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "cgroup_throttling"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    machine, quota = rank.machine, rank.header.quota_cores
    rows = machine[(machine["cgroup_periods"] >= 0) & (machine["cgroup_throttled"] >= 0)]
    periods = float(np.sum(rows["cgroup_periods"], dtype=np.float64))
    if not periods or len(rows) < thresholds.LEAST_SAMPLES:
        if quota is not None:
            yield Unknown(
                KIND,
                f"fewer than {thresholds.LEAST_SAMPLES} samples of the quota",
                "the cgroup's cpu.stat",
            )
        return
    throttled = np.minimum(rows["cgroup_throttled"], rows["cgroup_periods"])
    share = float(np.sum(throttled, dtype=np.float64)) / periods
    often = np.mean(throttled > thresholds.NOTICEABLE * rows["cgroup_periods"])
    if share < thresholds.THROTTLED or often < thresholds.LASTING or gpu_time.is_kept_busy(rank):
        return
    lost, cores = _lost(rows, share), checks.usable_cores(rank.header)
    evidence = [Evidence("throttled periods", share, "of all")]
    if quota is not None:
        evidence.append(Evidence("CPU quota", quota, "cores"))
    evidence += [Evidence("stopped for", lost, "of the time")]
    threads = f"{max(1, int(cores))}" if cores else "the quota"
    yield Finding(
        KIND,
        severity(lost),
        f"The CPU quota runs out in {checks.in_percent(share)} of its periods",
        tuple(evidence),
        "The container's threads use the quota up before a period ends and are stopped until the "
        "next one begins",
        f"raise the container's CPU limit, or run no more workers and threads than {threads}",
        "certain",
        lost,
    )


def _lost(rows: np.ndarray, share: float) -> float:
    """At most the part of the time in which any thread was stopped: the counter of seconds adds up
    CPUs, and a period counts though it was throttled at its end only."""
    both = rows[np.isfinite(rows["cgroup_throttled_s"]) & (rows["interval_s"] > 0)]
    if not len(both):
        return share
    stopped = np.sum(both["cgroup_throttled_s"], dtype=np.float64)
    return min(share, float(stopped / np.sum(both["interval_s"], dtype=np.float64)))


RULE: Final = Rule((KIND,), _look, each_rank=True)
