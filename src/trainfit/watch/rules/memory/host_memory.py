"""RAM and /dev/shm that run short, and processes whose memory grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.format import duration, size
from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.tables import Table
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.ledger import robust_slope
from trainfit.watch.figures.view import RankView, RunView, known
from trainfit.watch.rules.rule import Rule

_GIB: Final = 2**30
#: Seconds after which growth is no start any more: pools and caches have filled.
_LEAST_S: Final = 20


def look(run: RunView) -> Iterator[Finding | Unknown]:
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
            "ram_near_limit", "critical", "RAM is nearly used up",
            (Evidence("least available", float(left.min()) / _GIB, "GiB"),
             Evidence("of", ram / _GIB, "GiB")),
            "when RAM runs out, the kernel kills a process, usually a DataLoader worker",
            "use fewer workers or a smaller prefetch_factor; do not copy the data set into each "
            "worker (NumPy arrays or a memory map instead of Python lists)",
            "certain",
        )  # fmt: skip
    free, used = known(machine["shm_free_bytes"]), known(machine["shm_used_bytes"])
    if len(free) and len(used):
        whole = float(free[-1] + used[-1])
        if whole and free.min() < thresholds.SHM_LEFT * whole:
            yield Finding(
                "shm_near_limit", "critical", "/dev/shm is nearly full",
                (Evidence("least free", float(free.min()) / _GIB, "GiB"),
                 Evidence("of", whole / _GIB, "GiB")),
                "batches of workers wait there for the main process",
                "use fewer workers or a smaller prefetch_factor, or give the container more: "
                "docker run --shm-size=8g",
                "certain",
            )  # fmt: skip


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
            "ram_growth", "warning", f"RAM of {who} grows", tuple(evidence),
            "Python objects of the data set are copied into each worker as they are read "
            "(reference counts), or something keeps past batches",
            "keep the data set's index in NumPy arrays, not lists; look for lists that grow",
            "likely",
        )  # fmt: skip


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


RULE: Final = Rule(("ram_near_limit", "shm_near_limit", "ram_growth"), look, each_rank=True)
