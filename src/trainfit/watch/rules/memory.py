"""A GPU's memory that runs short or grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings.habits import EXPANDABLE, FRAGMENTED, KEPT_GRAPHS
from trainfit.results.findings import Evidence, Finding, Fix, Place, Severity, Unknown
from trainfit.results.text import GIB, MIB, size
from trainfit.watch import thresholds
from trainfit.watch.measures import growth_per_step, ledger, peak_share
from trainfit.watch.rules.growth import keeps, kept_tensors, what_keeps
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView, known

# ---
# Allocated memory that grows from step to step: a leak.


def _find_gpu_growth(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the GPU memory of each rank that grows surely (the whole interval), and by an
    amount that matters."""
    for view in run.ranks:
        held = known(view.steps["allocated_bytes"])
        if view.header.gpu is None or not len(view.steps):
            continue
        growth, steps = growth_per_step(view), view.steps["step"]
        span = int(steps[-1] - steps[0])
        if growth is None or span < thresholds.GROWTH_STEPS:
            needs = f"{thresholds.GROWTH_STEPS} steps after the warm-up with memory readings"
            yield Unknown("memory_growth", "too few readings of allocated memory", needs)
            continue
        per_step, low, _ = growth
        grown = per_step * span
        least = max(thresholds.GROWTH_BYTES, thresholds.GROWTH_SHARE * float(held.min()))
        if low <= 0 or grown < least:
            continue
        books = ledger(view)
        full = books.out_of_memory_step if books is not None else None
        evidence = [
            Evidence("growth", per_step / MIB, "MiB/step"),
            Evidence("grown so far", grown / MIB, "MiB"),
        ]
        evidence += [] if full is None else [Evidence("out of memory at step", full)]
        variable = kept_tensors(view)
        title = f"Memory of tensors grows by {size(per_step)} a step"
        cause = (
            "something keeps tensors of past steps: a loss that is summed up, a list of outputs, "
            f"hooks or caches; {KEPT_GRAPHS.cause}"
        )
        fix = Fix(
            f"{KEPT_GRAPHS.action}; `trainfit memory` names the line that allocates what is kept"
        )
        if variable is not None:
            title += f": {keeps(variable)}"
            cause, fix = what_keeps(variable)
        yield Finding(
            "memory_growth",
            "critical" if full is not None else "warning",
            title,
            tuple(evidence),
            cause,
            (fix,),
            "certain" if variable is not None or grown > 4 * least else "likely",
            place=None if variable is None else Place.parse(variable.place),
            rank=view.rank,
        )


GPU_GROWTH: Final = Rule(("memory_growth",), _find_gpu_growth)


# ---
# A GPU whose memory is nearly used up.


def _find_gpu_near_limit(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on each rank's GPU, by what the driver says is used, at the worst moment of the
    run."""
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
        Evidence("used at the peak", most / GIB, "GiB"),
        Evidence("of the GPU", total / GIB, "GiB"),
    ]
    evidence += [Evidence("allocations that had to free the cache first", tries)] if tries else []
    return Finding(
        "memory_near_limit",
        level,
        "The GPU's memory is nearly full",
        tuple(evidence),
        "each time the cache is freed, the GPU is synchronized and memory is requested from the "
        "driver"
        if tries
        else "a longer sample or an evaluation may no longer fit",
        (
            Fix(
                "lower the batch size, or run `trainfit plan` on this command for what each "
                "remedy saves"
            ),
        ),
        "certain",
        rank=view.rank,
    )


def _retries(view: RankView) -> int:
    """The retries of the allocator over the run: the counter only grows."""
    counted = known(view.record.steps["alloc_retries"])
    return int(np.ptp(counted)) if len(counted) else 0


GPU_LIMIT: Final = Rule(("memory_near_limit",), _find_gpu_near_limit)


# ---
# Reserved memory far above what tensors hold: fragmentation, or one large moment.


def _find_reserved_memory(run: RunView) -> Iterator[Finding | Unknown]:
    """Findings on the reserved memory of the judged rank, at the peaks of both."""
    steps = run.judged.record.steps
    reserved, peak = known(steps["reserved_bytes"]), known(steps["peak_allocated_bytes"])
    if not len(reserved) or not len(peak) or not peak.max():
        return
    ratio, share = float(reserved.max() / peak.max()), peak_share(run.judged)
    if ratio < thresholds.RESERVED_RATIO or (share or 0.0) < thresholds.RESERVED_SHARE:
        return
    yield Finding(
        "reserved_above_allocated",
        "warning",
        "PyTorch reserves far more memory than tensors hold",
        (
            Evidence("reserved at the peak", float(reserved.max()) / GIB, "GiB"),
            Evidence("allocated at the peak", float(peak.max()) / GIB, "GiB"),
        ),
        FRAGMENTED.cause,
        (Fix(f"{FRAGMENTED.action}, or pad batches to a few lengths", settings=EXPANDABLE),),
        "likely",
    )


RESERVED: Final = Rule(("reserved_above_allocated",), _find_reserved_memory, each_rank=True)


RULES = (GPU_LIMIT, RESERVED, GPU_GROWTH)
