"""A recorded run without rows and values that no training can have had.

A file that was damaged, a clock that jumped or a second training in one script leave such rows;
rules look at what is left and need not check again.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from trainfit.results.watch.run import RankRecord, RunRecord
from trainfit.results.watch.tables import Table
from trainfit.watch.figures.light_steps import completed

#: Columns in which infinite and negative values are findings themselves.
_AS_THEY_ARE: Final = frozenset(("loss", "loss_scale", "gradient_norm"))
#: Larger than any second, byte or hertz of a run; sums of what is below stay exact enough.
_LARGEST: Final = 1e18


def clean(run: RunRecord) -> RunRecord:
    """Leave out steps without a length or an end and samples without a time; order the rest by
    time; infinite and negative numbers count as not measured; light steps are completed."""
    ranks = tuple(
        dataclasses.replace(rank, steps=_steps(rank), fetches=_rows(rank.fetches, "end_s"))
        for rank in run.ranks
    )
    return dataclasses.replace(
        run,
        ranks=ranks,
        machine=_rows(run.machine, "time_s"),
        gpus=_rows(run.gpus, "time_s"),
        processes=_rows(run.processes, "time_s"),
        elsewhere=tuple(map(clean, run.elsewhere)),
    )


def _steps(rank: RankRecord) -> Table:
    steps = _rows(rank.steps, "end_s")
    return completed(steps[steps["step_s"] > 0])


def _rows(table: Table, time: str) -> Table:
    rows = table.copy()
    for name in rows.dtype.names or ():
        kind = rows[name].dtype.kind
        if kind == "f":
            right = (rows[name] >= 0) & (rows[name] < _LARGEST)
            wrong = np.isnan(rows[name]) if name in _AS_THEY_ARE else ~right
            rows[name][wrong] = np.nan  # one NaN for all: others trap in conversions
        elif kind == "i":
            wrong = (rows[name] < 0) | (rows[name] >= _LARGEST)
            rows[name][wrong] = -1
    rows = rows[np.isfinite(rows[time])]
    ordered: Table = rows[np.argsort(rows[time], kind="stable")]
    return ordered
