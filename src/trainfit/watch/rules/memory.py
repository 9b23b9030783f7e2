"""Memory that runs short or grows: the GPU's, RAM, /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings import fixes
from trainfit.findings.habits import EXPANDABLE, FRAGMENTED, KEPT_GRAPHS
from trainfit.results.findings import Evidence, Finding, Fix, Severity, Unknown
from trainfit.results.runs.tables import Table
from trainfit.results.text import duration, size
from trainfit.watch import thresholds
from trainfit.watch.checks import loader_settings
from trainfit.watch.measures import growth_per_step, ledger, peak_share, robust_slope
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView, known

# ---
# Allocated memory that grows from step to step: a leak.


_MIB: Final = 2**20


def _find_gpu_growth(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank: surely upwards (the whole interval), and by an amount that matters."""
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
            Evidence("growth", per_step / _MIB, "MiB/step"),
            Evidence("grown so far", grown / _MIB, "MiB"),
        ]
        evidence += [] if full is None else [Evidence("out of memory at step", full)]
        yield Finding(
            "memory_growth",
            "critical" if full is not None else "warning",
            "Memory of tensors grows with every step",
            tuple(evidence),
            "something keeps tensors of past steps: a loss that is summed up, a list of outputs, "
            f"hooks or caches; {KEPT_GRAPHS.cause}",
            (
                Fix(
                    f"{KEPT_GRAPHS.action}; `trainfit memory` names the line that allocates what "
                    "is kept"
                ),
            ),
            "certain" if grown > 4 * least else "likely",
            rank=view.rank,
        )


GPU_GROWTH: Final = Rule(("memory_growth",), _find_gpu_growth)


# ---
# A GPU whose memory is nearly used up.


_GIB: Final = 2**30


def _find_gpu_near_limit(run: RunView) -> Iterator[Finding | Unknown]:
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
    """Over the run: the counter only grows."""
    counted = known(view.record.steps["alloc_retries"])
    return int(np.ptp(counted)) if len(counted) else 0


GPU_LIMIT: Final = Rule(("memory_near_limit",), _find_gpu_near_limit)


# ---
# RAM and /dev/shm that run short, and processes whose memory grows.


#: Seconds after which growth is no start any more: pools and caches have filled.
_LEAST_S: Final = 20


def _find_short_host_memory(run: RunView) -> Iterator[Finding | Unknown]:
    """Of the machine, and of the judged rank's processes."""
    view = run.judged
    if len(view.steps):
        yield from _short(view)
        yield from _growth(view)


def _short(view: RankView) -> Iterator[Finding]:
    machine, ram = view.machine, view.header.ram_bytes
    left = known(machine["ram_available_bytes"])
    if ram and len(left) and left.min() < thresholds.RAM_LEFT * ram:
        yield Finding(
            "ram_near_limit",
            "critical",
            "RAM is nearly used up",
            (
                Evidence("least available", float(left.min()) / _GIB, "GiB"),
                Evidence("of", ram / _GIB, "GiB"),
            ),
            "when RAM runs out, the kernel kills a process, usually a DataLoader worker",
            (Fix(fixes.memory(loader_settings(view.header))),),
            "certain",
        )
    free, used = known(machine["shm_free_bytes"]), known(machine["shm_used_bytes"])
    if len(free) and len(used):
        whole = float(free[-1] + used[-1])
        if whole and free.min() < thresholds.SHM_LEFT * whole:
            yield Finding(
                "shm_near_limit",
                "critical",
                "/dev/shm is nearly full",
                (
                    Evidence("least free", float(free.min()) / _GIB, "GiB"),
                    Evidence("of", whole / _GIB, "GiB"),
                ),
                "batches of workers wait there for the main process",
                (Fix(fixes.shm(loader_settings(view.header), None)),),
                "certain",
            )


def _growth(view: RankView) -> Iterator[Finding | Unknown]:
    for who, table in (("the training process", view.main_process), ("the workers", view.workers)):
        at, held = _held(table)
        slope = robust_slope(at, held)
        if slope is None or slope[1] <= 0 or not view.header.ram_bytes:
            continue
        seconds = float(at[-1] - at[0])
        grown = slope[0] * seconds
        large = max(8 * thresholds.GROWTH_BYTES, thresholds.RAM_LEFT * float(np.median(held)))
        if grown < large:
            continue
        if seconds < _LEAST_S:
            reason = f"RAM of {who} grew by {size(grown)} in {duration(seconds)}: too short to tell"
            yield Unknown("ram_growth", reason, f"{_LEAST_S} s of training")
            continue
        if not _goes_on(at, held, slope[0]):
            continue
        left = known(view.machine["ram_available_bytes"])
        evidence = [Evidence("growth", slope[0] * 60 / 2**20, "MiB/min")]
        if len(left):
            evidence.append(Evidence("RAM used up in", float(left[-1]) / slope[0] / 3600, "h"))
        yield Finding(
            "ram_growth",
            "warning",
            f"RAM of {who} grows",
            tuple(evidence),
            "Python objects of the data set are copied into each worker as they are read "
            "(reference counts), or something keeps past batches",
            (Fix(f"{fixes.LISTS}; look for lists that grow"),),
            "likely",
        )


def _held(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Times, and bytes of all these processes."""
    table = table[table["rss_bytes"] >= 0]
    times, group = np.unique(table["time_s"], return_inverse=True)
    return times, np.bincount(group, table["rss_bytes"], minlength=len(times))


def _goes_on(at: np.ndarray, held: np.ndarray, slope: float) -> bool:
    """Does the second half grow by half as much as the whole? What levels off is a cache."""
    half = len(at) // 2
    later = robust_slope(at[half:], held[half:])
    return later is not None and later[1] > 0 and later[0] > 0.5 * slope


HOST_MEMORY: Final = Rule(
    ("ram_near_limit", "shm_near_limit", "ram_growth"), _find_short_host_memory, each_rank=True
)


# ---
# Reserved memory far above what tensors hold: fragmentation, or one large moment.


def _find_reserved_memory(run: RunView) -> Iterator[Finding | Unknown]:
    """Of the judged rank, at the peaks of both."""
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
            Evidence("reserved at the peak", float(reserved.max()) / _GIB, "GiB"),
            Evidence("allocated at the peak", float(peak.max()) / _GIB, "GiB"),
        ),
        FRAGMENTED.cause,
        (Fix(f"{FRAGMENTED.action}, or pad batches to a few lengths", settings=EXPANDABLE),),
        "likely",
    )


RESERVED: Final = Rule(("reserved_above_allocated",), _find_reserved_memory, each_rank=True)


RULES = (GPU_LIMIT, RESERVED, GPU_GROWTH, HOST_MEMORY)
