"""Steps that were recorded lightly, completed by those that were recorded in detail.

Of a light step (:mod:`trainfit.watch.recorder.step.budget`) only its length and its wait for
batches are known. The rest of its time is divided among the phases as in the nearest step in
detail, of those in which nothing rare happened: what is rare is always recorded in detail, and
stands for itself. Sums and shares over all steps are then estimates of what all would have shown.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.tables import (
    CHECKPOINT,
    COMPILED,
    EPOCH_START,
    EVALUATION,
    LIGHT,
    Table,
)

_RARE: Final = EPOCH_START | EVALUATION | CHECKPOINT | COMPILED
#: Seconds, which grow with the step. The gap before one is left to what its length tells.
_SECONDS: Final = (
    *("copy_s", "forward_s", "backward_s", "optimizer_s", "sync_s", "cpu_s", "gpu_s"),
    *("gpu_copy_s", "gpu_forward_s", "gpu_backward_s", "gpu_optimizer_s"),
)
#: What a script does in each step alike.
_ALIKE: Final = ("syncs", "copied_bytes", "unpinned_bytes")


def is_light(steps: Table) -> NDArray[np.bool_]:
    """Which rows are of steps that were recorded lightly."""
    found: NDArray[np.bool_] = (steps["flags"] & LIGHT) != 0
    return found


def completed(steps: Table) -> Table:
    """A copy, in which light steps have what they have most likely spent their time on."""
    light = is_light(steps)
    told = np.flatnonzero(~light & ((steps["flags"] & _RARE) == 0) & np.isfinite(steps["step_s"]))
    steps = steps.copy()
    if not light.any() or not len(told):
        return steps
    at = np.flatnonzero(light)
    after = np.minimum(np.searchsorted(told, at), len(told) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(told[before] - at) <= np.abs(told[after] - at)
    like = told[np.where(nearer, before, after)]
    own = _without_input(steps[at])
    theirs = _without_input(steps[like])
    scale = np.divide(own, theirs, out=np.ones(len(at)), where=theirs > 0)
    for name in _SECONDS:
        steps[name][at] = steps[name][like] * scale
    for name in _ALIKE:
        steps[name][at] = steps[name][like]
    steps["checkpoint_s"][at] = steps["evaluation_s"][at] = 0.0
    return steps


def _without_input(steps: Table) -> NDArray[np.float64]:
    length = np.asarray(steps["step_s"], dtype=np.float64)
    waited = np.nan_to_num(np.asarray(steps["input_s"], dtype=np.float64))
    return np.maximum(0.0, np.nan_to_num(length) - waited)
