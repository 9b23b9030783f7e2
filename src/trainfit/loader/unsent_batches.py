"""Diagnosis of batches that workers produce and cannot send: what in them cannot be pickled."""

from __future__ import annotations

import functools

from trainfit.loader.faults.pickling import find_culprits
from trainfit.loader.measure import isolated
from trainfit.loader.measure.workload import Workload
from trainfit.results.loader import LoaderSettings


def unsendable(workload: Workload, limit_s: float = 10.0) -> str:
    """What in a batch cannot be pickled, or empty; made in a forked process."""
    ended = isolated.call(functools.partial(_look, workload), limit_s)
    return ended.value or ""


def _look(workload: Workload) -> str:
    batch = next(iter(workload.loader(LoaderSettings(0))))
    return "; ".join(find_culprits(batch, "batch"))
