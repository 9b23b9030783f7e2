"""How much of a step the GPU had nothing to do, and how much of it the input is to blame for.

CUDA events are the evidence. What they cannot see is a stream that runs empty between two kernels
of one phase: there NVML's utilization (the share of time with at least one kernel) helps, and only
where it is far below the events'.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.tables import CHECKPOINT, EPOCH_START, EVALUATION
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RankView, known

Seconds = NDArray[np.float64]


def has_gpu(rank: RankView) -> bool:
    """Does the rank compute on a GPU, as far as is known?"""
    return rank.header.gpu is not None or bool(np.isfinite(rank.steps["gpu_s"]).any())


def has_events(rank: RankView) -> bool:
    """Did CUDA events measure most of the steady steps?"""
    steps = rank.steps
    return len(steps) > 0 and float(np.mean(np.isfinite(steps["gpu_s"]))) >= 0.5


def column(rank: RankView, name: str) -> Seconds:
    """A column of the steady steps in double precision; NaN where it is not measured."""
    return np.asarray(rank.steps[name], dtype=np.float64)


def input_lost(rank: RankView) -> Seconds:
    """Seconds of each steady step that are lost by waiting for batches; NaN: not measured.

    On a GPU only the part in which its stream was empty: waiting while it works costs nothing. The
    batches of an accumulation after the first wait within ``gpu_s``, where only the phases' own
    events tell. A step whose gap is not known (an evaluation before it) counts in full.
    """
    waited = column(rank, "input_s")
    if not has_events(rank):
        return waited
    idle = gap(rank) + _between_phases(rank)
    return np.where(np.isfinite(idle), np.minimum(waited, idle), waited)


def gap(rank: RankView) -> Seconds:
    """Seconds of each steady step in which the stream was empty before it; NaN: not measured.

    Where no event ended the step before, what its host time is above the GPU's.
    """
    measured = column(rank, "gpu_gap_s")
    rest = np.maximum(0.0, column(rank, "step_s") - column(rank, "gpu_s"))
    other_work = (rank.steps["flags"] & (EVALUATION | CHECKPOINT)) != 0
    return np.where(np.isfinite(measured) | other_work, measured, rest)


def _between_phases(rank: RankView) -> Seconds:
    """Of steps with several batches, seconds in ``gpu_s`` outside its phases; else 0."""
    names = ("gpu_copy_s", "gpu_forward_s", "gpu_backward_s", "gpu_optimizer_s")
    phases = np.sum([np.nan_to_num(column(rank, name)) for name in names], axis=0)
    rest = np.maximum(0.0, column(rank, "gpu_s") - phases)
    return np.where(rank.steps["batches"] > 1, rest, 0.0)


def busy_by_events(rank: RankView) -> float | None:
    """Share of the time in which the stream had work; ``None``: not measured."""
    if not has_events(rank):
        return None
    step_s = column(rank, "step_s")
    between = np.minimum(_between_phases(rank), np.nan_to_num(column(rank, "input_s")))
    idle = np.minimum(gap(rank) + between, step_s)
    measured = np.isfinite(idle)
    if not measured.any():
        return None
    return float(1 - np.sum(idle[measured]) / np.sum(step_s[measured]))


def utilization(rank: RankView) -> float | None:
    """NVML's mean over the steady steps; ``None``: too few samples."""
    values = known(rank.gpu["utilization"])
    if len(values) < thresholds.LEAST_SAMPLES:
        return None
    return min(1.0, float(np.mean(values)))


def idle_share(rank: RankView) -> float | None:
    """Share of the time in which the GPU had nothing to do; ``None``: not measured.

    By events; by NVML where that says far more, which is a stream that runs empty between kernels.
    """
    busy = busy_by_events(rank)
    if busy is None:
        return None
    by_nvml = 1 - (utilization(rank) or 1.0)
    return max(1 - busy, by_nvml if by_nvml >= thresholds.NVML_IDLE else 0.0)


def is_kept_busy(rank: RankView) -> bool:
    """Is it certain that the host's delays cost this run nothing, as its GPU always has work?"""
    idle = idle_share(rank)
    return idle is not None and idle < thresholds.NOTICEABLE


def step_without_input(rank: RankView) -> float | None:
    """Median seconds of a step less what it lost by waiting for batches."""
    rest = known(column(rank, "step_s") - np.nan_to_num(input_lost(rank)))
    return float(np.median(rest)) if len(rest) else None


def epoch_start_lost(rank: RankView) -> Seconds:
    """Of :func:`input_lost`, what the first batch of an epoch costs more than another one does."""
    lost = np.nan_to_num(input_lost(rank))
    starts = (rank.steps["flags"] & EPOCH_START) != 0
    usual = float(np.median(lost[~starts])) if (~starts).any() else 0.0
    return np.where(starts, np.maximum(0.0, lost - usual), 0.0)
