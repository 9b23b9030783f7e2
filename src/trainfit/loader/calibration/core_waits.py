"""Time that workers waited for cores that other processes used.

That is neither work nor waiting of a worker's own choice (for a disk, a lock, the network): where
cores are free it does not happen. The kernel counts it for each thread.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainfit.loader.measure.instrument import BEGAN, CPU, WALL, Records
from trainfit.loader.measure.run import Run


def without_core_waits(run: Run) -> Run:
    """The same run, its workers' batches without what they waited for a core; as it is where the
    kernel does not say that.

    Each batch has its share by the time for which it had no core.
    """
    if len(run.core_waits_s) != len(run.fetches):
        return run
    pairs = zip(run.fetches, run.core_waits_s, strict=True)
    fetches = tuple(_without(records, waited) for records, waited in pairs)
    return dataclasses.replace(run, fetches=fetches, core_waits_s=(0.0,) * len(fetches))


def _without(records: Records, waited_s: float) -> Records:
    off = np.maximum(0.0, records[:, WALL] - records[:, CPU])
    total = float(off.sum())
    if total <= 0:
        return records
    less = off * min(1.0, waited_s / total)
    found = records.copy()
    found[:, WALL] -= less
    found[1:, BEGAN] -= np.cumsum(less)[:-1]  # what lies between two batches stays
    return found
