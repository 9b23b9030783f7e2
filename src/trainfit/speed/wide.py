"""Kernels in float64 of a step that is otherwise in float32: where they begin, and their cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.hardware.gpu.figures import is_made_up
from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import DTYPES
from trainfit.results.text import duration
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import COLUMNS, Work, steady

#: The part of a step that float64 must cost (no outside source).
_SHARE: Final = 0.05
_FLOAT64, _FLOAT32 = DTYPES.index("float64"), DTYPES.index("float32")
_DTYPE: Final = COLUMNS.index("dtype")
_BYTES: Final = [COLUMNS.index(name) for name in ("read", "written")]


def float64_on_gpu(recording: Recording, machine: HostedGpu) -> Iterator[Finding]:
    """What a step would save if its kernels in float64 were in float32, and the line at which they
    begin: a loss of ``logits.double()``, targets that came from NumPy, constants in float64."""
    if not recording.steps or is_made_up(machine.gpu, "fp32_flops"):
        return
    work = Work.of_steady_step(recording)
    wide = work.table[:, _DTYPE] == _FLOAT64 if len(work.table) else np.zeros(0, bool)
    if not wide.any():
        return
    table = work.table.copy()
    table[wide, _DTYPE] = _FLOAT32
    table[np.ix_(wide, np.array(_BYTES))] //= 2
    now_s = step_time(work, machine).seconds
    then_s = step_time(dataclasses.replace(work, table=table), machine).seconds
    if now_s - then_s < _SHARE * now_s:
        return
    yield Finding(
        "float64_on_gpu",
        "warning",
        f"{np.count_nonzero(wide):,} of a step's {len(wide):,} kernels compute in float64: the "
        f"step needs {duration(now_s)}, in float32 {duration(then_s)} (predicted)",
        (Evidence("in float32", then_s / now_s, "of the step"),),
        "float64 has twice the bytes, and GPUs but those of data centers compute it 32 to 64 times "
        "slower; a tensor of NumPy's default type, or a .double(), brings all that is computed "
        "with it to float64, and its gradients too",
        (
            Fix("x.float() before it is used; a sum that needs more digits: x.sum(dtype=…) alone"),
            Fix("array.astype(np.float32) in the data set, torch.tensor(…, dtype=torch.float32)"),
        ),
        confidence="likely",
        place=_first_line(recording),
    )


def _first_line(recording: Recording) -> Place | None:
    """The line of the step's first operator in float64 that made something."""
    step = steady(recording)
    work = Work.of_step(recording, step)
    begins = np.flatnonzero(recording.op_step == step)
    wide = work.op[work.table[:, _DTYPE] == _FLOAT64]
    known = np.isin(recording.alloc_op, wide + int(begins[0])) & (recording.alloc_line >= 0)
    lines = recording.alloc_line[known]
    return Place.parse(recording.strings[int(lines[0])]) if len(lines) else None
