"""The forward pass that a recorded peak belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.hardware.gpu.lookup import find_gpu
from trainfit.hardware.gpu.name_error import GpuNameError
from trainfit.memory.by_hand.operators import CountedOperator, Operators
from trainfit.results.runs.kernels import DTYPES
from trainfit.results.runs.recording import PHASES, Recording

_FORWARD: Final = PHASES.index("forward")
_STOPS: Final = (PHASES.index("backward"), PHASES.index("optimizer"))


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """Operators from ``begin`` to before ``end``, those whose results a hand formula counts, and
    the type that most of the FLOPs are of (float32 where there are none, and where TF32 is allowed
    on a GPU without it)."""

    begin: int
    end: int
    counted: Sequence[CountedOperator]
    compute: str


def forward_pass(operators: Operators, alloc: int) -> ForwardPass | None:
    """The forward pass before allocation ``alloc``, in its step; ``None`` if none was recorded.

    Of a step's several (micro-batches; clipping gradients looks like one) it is the one with the
    most numbers, the last of equals.
    """
    recording = operators.recording
    operator = int(recording.alloc_op[alloc])
    step = int(recording.op_step[operator]) if operator >= 0 else 0
    spans = _spans(recording)
    near = [span for span in spans if recording.op_step[span[0]] == step and span[0] <= operator]
    best, most = None, 0
    for begin, end in near or spans:
        counted = operators.counted(begin, end)
        numbers = sum(each.elements + each.extra for each in counted)
        if counted and numbers >= most:
            best, most = (begin, end, counted), numbers
    return None if best is None else ForwardPass(*best, _compute(recording, best[0], best[1]))


def _spans(recording: Recording) -> list[tuple[int, int]]:
    """Runs of operators without a backward pass or an optimizer's step, within one step."""
    phase, step = recording.op_phase, recording.op_step
    stops = np.isin(phase, _STOPS)
    cuts = np.flatnonzero(np.diff(stops.astype(np.int8)) | np.diff(step)) + 1
    return [
        (int(part[0]), int(part[-1]) + 1)
        for part in np.split(np.arange(len(phase)), cuts)
        if len(part) and not stops[part[0]] and (phase[part] == _FORWARD).any()
    ]


def _compute(recording: Recording, begin: int, end: int) -> str:
    chosen = (recording.kernel_op >= begin) & (recording.kernel_op < end)
    flops = np.bincount(
        recording.kernel_dtype[chosen],
        weights=recording.kernel_flops[chosen],
        minlength=len(DTYPES),
    )
    found = DTYPES[int(flops.argmax())] if flops.any() else "float32"
    # Recordings say which kernels may round to TF32, on any GPU.
    return "float32" if found == "tfloat32" and not _has_tf32(recording) else found


def _has_tf32(recording: Recording) -> bool:
    """From compute capability 8.0 on; a GPU that is in no list may have it."""
    try:
        return "tfloat32" in find_gpu(str(recording.header["gpu"])).tensor_flops
    except GpuNameError:
        return True
