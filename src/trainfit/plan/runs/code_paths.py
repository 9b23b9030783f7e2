"""Do runs at other batch sizes take the same path through the script?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.results.runs.recording import PHASES, Recording
from trainfit.speed.model.work import steady

#: Share of a batch's operators that a larger batch may have less: other kernels' choices, a last
#: piece that is cut up otherwise. More are no sign: many scripts loop over a batch's samples.
_LESS: Final = 0.2
_OPTIMIZER: Final = PHASES.index("optimizer")


def takes_other_path(batch: int, present: Recording, size: int, run: Recording) -> bool:
    """Are a step's operators at ``size`` far fewer than at ``batch``, the current batch size (or,
    where ``size`` is the smaller, the other way round)?"""
    return _is_other(batch, _operators(present), size, _operators(run))


def other_path(batch: int, runs: Mapping[int, Recording]) -> str:
    """A sentence on batch sizes whose batches run far fewer operators than those of smaller ones;
    empty where there are none. ``batch`` is the current batch size.

    What a script does can depend on data, which a simulation knows of small tensors alone.
    """
    present = _operators(runs[batch])
    found = {size: _operators(each) for size, each in sorted(runs.items())}
    others = {size: n for size, n in found.items() if _is_other(batch, present, size, n)}
    if not others:
        return ""
    said = ", ".join(f"{n} at batch size {size}" for size, n in others.items())
    return (
        f"steps run different code at other batch sizes (operators per batch: {present} at "
        f"{batch}, "
        f"{said}): the script depends on values that a simulation does not have; try "
        "other batch sizes on the GPU"
    )


def _is_other(batch: int, present: int, size: int, operators: int) -> bool:
    small, large = (present, operators) if size > batch else (operators, present)
    return large < (1 - _LESS) * small


def _operators(recording: Recording) -> int:
    """For each micro-batch of the typical step, without the optimizer's.

    A script that keeps its effective batch size accumulates over more of the smaller batches.
    """
    typical, makeup = steady(recording), recording.makeup
    mine = (recording.op_step == typical) & (recording.op_phase != _OPTIMIZER)
    per_step = makeup.per_step if makeup is not None else ()
    parts = per_step[typical] if typical < len(per_step) else 1
    return int(np.count_nonzero(mine)) // max(parts, 1)
