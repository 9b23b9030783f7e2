"""The columns of a run's steady steps that are compared, and its peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from trainfit.results.watch.tables import Table
from trainfit.watch.compare.bootstrap import Rows
from trainfit.watch.figures.light_steps import completed, is_light
from trainfit.watch.figures.view import PHASES, RankView, RunView

#: Columns of :attr:`Measured.rows`. Time is without evaluations and checkpoints, of which a run
#: has as many as it is long; "busy" is the time of the GPU's stream within "looked_at".
COLUMNS: Final = ("time", "samples", "steps", "busy", "looked_at", *PHASES, "other")
TIME, SAMPLES, STEPS, BUSY, LOOKED_AT = range(5)
_APART: Final = ("checkpoint", "evaluation")


@dataclass(frozen=True)
class Measured:
    """Steady steps of a run's first rank; ``rows`` has shape (rows, columns), 0 where a column was
    not measured, which ``known`` tells. A row is a step, or the sums of one that was recorded in
    detail and of the light ones after it, whose phases are known by it alone."""

    rows: Rows
    known: frozenset[str]
    batch: float | None
    """Median samples of a step, of this rank."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def steps(self) -> int:
        return int(self.rows[:, STEPS].sum())


def measured(view: RunView) -> Measured:
    """Of a run; without a step that has no length."""
    steps = view.judged.steps
    steps = steps[np.isfinite(steps["step_s"]) & (steps["step_s"] > 0)]
    light, steps = is_light(steps), completed(steps)
    columns = {name: np.asarray(steps[f"{name}_s"], dtype=np.float64) for name in PHASES}
    known = {name for name, values in columns.items() if np.isfinite(values).any()}
    columns = {name: np.nan_to_num(values) for name, values in columns.items()}
    whole = np.asarray(steps["step_s"], dtype=np.float64)
    columns["time"] = np.maximum(whole - sum(columns[name] for name in _APART), 1e-9)
    columns["other"] = np.maximum(whole - sum(columns[name] for name in PHASES), 0.0)
    columns["steps"] = np.ones(len(steps))
    columns["samples"] = np.maximum(np.asarray(steps["samples"], dtype=np.float64), 0.0)
    columns["busy"], columns["looked_at"] = _busy(steps, whole)
    told = steps["samples"] > 0
    if len(steps) and told.all():
        known.add("samples")
    if len(steps) and np.mean(columns["looked_at"] > 0) >= 0.5:
        known.add("busy")
    rows = np.stack([columns[name] for name in COLUMNS], axis=1)
    if light.any():
        rows = np.add.reduceat(rows, np.union1d([0], np.flatnonzero(~light)))
    batch = float(np.median(steps["samples"][told])) if told.any() else None
    return Measured(rows, frozenset(known), batch)


def _busy(steps: Table, whole: Rows) -> tuple[Rows, Rows]:
    """Seconds of each step in which the GPU's stream had work, and the step's, 0 where CUDA events
    did not tell."""
    gap = np.asarray(steps["gpu_gap_s"], dtype=np.float64)
    rest = np.maximum(0.0, whole - np.asarray(steps["gpu_s"], dtype=np.float64))
    idle = np.minimum(np.where(np.isfinite(gap), gap, rest), whole)
    told = np.isfinite(idle)
    return np.where(told, whole - np.nan_to_num(idle), 0.0), np.where(told, whole, 0.0)


def peak_gpu_bytes(view: RunView) -> int | None:
    """Of tensors, on the rank that had most; ``None``: not measured."""
    found = [int(each.steps["peak_allocated_bytes"].max(initial=-1)) for each in view.ranks]
    return max((each for each in found if each >= 0), default=None)


def peak_ram_bytes(view: RunView) -> int | None:
    """Resident memory of the run's processes together, at most; ``None``: not sampled. Pages that
    processes share count in each."""
    table = _resident(view.judged)
    if not len(table):
        return None
    _, places = np.unique(table["time_s"], return_inverse=True)
    return int(np.bincount(places, np.asarray(table["rss_bytes"], dtype=np.float64)).max())


def _resident(rank: RankView) -> Table:
    first, last = rank.window
    table = rank.run.processes
    within: Table = table[
        (table["time_s"] >= first) & (table["time_s"] <= last) & (table["rss_bytes"] >= 0)
    ]
    return within
