"""Processes that are not the run's keep the cores busy that it would use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import (
    OTHERS_CORES,
    USABLE_CORES,
    Evidence,
    Finding,
    Unknown,
)
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView, known, median
from trainfit.watch.rules.rule import Rule

KIND: Final = "cpu_contention"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    machine, usable = rank.machine, checks.usable_cores(rank.header)
    rows = machine[np.isfinite(machine["cores_busy"]) & np.isfinite(machine["cores_ours"])]
    if usable is None or len(rows) < thresholds.LEAST_SAMPLES:
        yield Unknown(
            KIND,
            f"fewer than {thresholds.LEAST_SAMPLES} samples of the cores",
            "the sampler, and a few seconds",
        )
        return
    others = np.maximum(0.0, rows["cores_busy"] - rows["cores_ours"])
    full = rows["cores_busy"] >= thresholds.SATURATED * usable
    # Busy by others, and none is left: also where some of their cores are not the run's to use,
    # its threads then wait for their own.
    pressed = (others >= max(1.0, thresholds.OTHERS_CORES * usable)) & full
    waiting = known(rows["runnable"]) > thresholds.CROWDED * usable
    if np.mean(pressed) < thresholds.LASTING or gpu_time.is_kept_busy(rank):
        return
    if len(waiting) and np.mean(waiting) < thresholds.LASTING:
        return
    runnable, ours = median(rows["runnable"]), float(np.median(rows["cores_ours"]))
    # A thread that always wants to run gets its part of the cores: a run with far less sleeps.
    if runnable and ours < thresholds.WANTS_CORES * usable / max(runnable, usable):
        return
    evidence = [
        Evidence(OTHERS_CORES, float(np.median(others)), "cores"),
        Evidence("cores that the run keeps busy", ours, "cores"),
        Evidence(USABLE_CORES, usable, "cores"),
    ]
    if runnable is not None:
        evidence.append(Evidence("threads that want to run", runnable))
    yield Finding(
        KIND,
        "warning",
        f"Other processes keep {np.median(others):.1f} cores busy that the run needs",
        tuple(evidence),
        "Threads of the run wait for cores that other programs use",
        "stop the other programs, or give the run cores of its own (taskset, cpuset); "
        "`trainfit doctor` lists what runs on the machine",
        "likely" if len(waiting) else "possible",
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
