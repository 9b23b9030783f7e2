"""A GPU whose memory is nearly used up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Severity, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RankView, RunView, known
from trainfit.watch.rules.rule import Rule

_GIB: Final = 2**30


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank's GPU, by what the driver says is used, at the worst moment of the run."""
    for view in run.ranks:
        if view.header.gpu is None or not len(view.record.steps):
            continue
        found = _judged(view)
        if found is not None:
            yield found


def _judged(view: RankView) -> Finding | Unknown | None:
    gpu = view.header.gpu
    total = (
        view.header.gpus[gpu].memory_bytes
        if gpu is not None and gpu < len(view.header.gpus)
        else None
    )
    used = known(view.every_gpu_sample["used_bytes"])
    reserved = known(view.record.steps["reserved_bytes"])
    if not total or not (len(used) or len(reserved)):
        return Unknown("memory_near_limit", "the GPU's memory was not read", "NVML")
    most = max(float(used.max()) if len(used) else 0.0, float(reserved.max(initial=0.0)))
    left = 1 - most / total
    tries = _retries(view)
    if left >= thresholds.NEAR_LIMIT and not tries:
        return None
    level: Severity = "critical" if tries or left < thresholds.AT_LIMIT else "warning"
    evidence = [
        Evidence("used at the peak", most / _GIB, "GiB"),
        Evidence("of the GPU", total / _GIB, "GiB"),
    ]
    evidence += [Evidence("allocations that had to free the cache first", tries)] if tries else []
    return Finding(
        "memory_near_limit", level, "The GPU's memory is nearly full", tuple(evidence),
        "each time the cache is freed, the GPU is synchronized and memory is requested from the "
        "driver" if tries else "a longer sample or an evaluation may no longer fit",
        "lower the batch size, or run `trainfit plan` on this command for what each remedy saves",
        "certain",
        rank=view.rank,
    )  # fmt: skip


def _retries(view: RankView) -> int:
    """Over the run: the counter only grows."""
    counted = known(view.record.steps["alloc_retries"])
    return int(np.ptp(counted)) if len(counted) else 0


RULE: Final = Rule(("memory_near_limit",), look)
