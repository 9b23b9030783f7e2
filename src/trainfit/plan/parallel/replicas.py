"""A job that was simulated with DDP: among another number of processes, and of one alone."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, cast

import numpy as np

from trainfit.hardware.gpu.context_memory import nccl_memory
from trainfit.memory.capacity import context_parts
from trainfit.results.gpus import COMMUNICATION
from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Recording, RecordingHeader
from trainfit.results.runs.steps import COLLECTIVES
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS

_CODES: Final = {name: code for code, name in enumerate(KERNEL_KINDS)}
#: What passes where each process has but a part of the model (FSDP, tensor parallelism, pipelines).
_OF_PARTS: Final = ("reduce_scatter", "all_to_all", "send_receive")
_GRADIENT: Final = KINDS.index("gradient")
_FORWARD, _BACKWARD, _OPTIMIZER = map(PHASES.index, ("forward", "backward", "optimizer"))


def header_of(recording: Recording, ranks: int) -> dict[str, Any]:
    """What the header of a recording says among so many processes."""
    parts = [each for each in context_parts(recording) if each.name != COMMUNICATION]
    if ranks > 1:
        parts.append(nccl_memory(ranks))
    return {"ranks": ranks, "context_parts": [dataclasses.asdict(each) for each in parts]}


def is_sharded(recording: Recording) -> bool:
    """Has each process of a job but a part of the parameters, or of the optimizer's state?"""
    kinds, op = recording.kernel_kind, np.maximum(recording.kernel_op, 0)
    phases = recording.op_phase[op]
    # ZeroRedundancyOptimizer sends what it has updated; tensor parallelism adds up activations.
    updates = (kinds == _CODES["broadcast"]) & (phases == _OPTIMIZER)
    sums = (kinds == _CODES["all_reduce"]) & (phases == _FORWARD) & (recording.op_module[op] >= 0)
    parts = np.isin(kinds, [_CODES[name] for name in _OF_PARTS])
    return bool((updates | sums | parts).any())


def among(recording: Recording, ranks: int) -> Recording:
    """The same DDP among so many processes of one machine."""
    if ranks < 2:
        return alone(recording)
    chosen = _collectives(recording)
    before, gathers = (
        recording.ranks,
        recording.kernel_kind == _CODES["all_gather"],
    )
    read = np.where(gathers, recording.kernel_read * ranks // before, recording.kernel_read)
    return dataclasses.replace(
        recording,
        header=_header(recording, ranks),
        kernel_rows=np.where(chosen, ranks, recording.kernel_rows),
        kernel_columns=np.where(chosen, 0, recording.kernel_columns),
        kernel_read=read,
    )


def alone(recording: Recording) -> Recording:
    """Without the buckets and collectives of DDP; the copies into the buckets stay."""
    op = recording.alloc_op
    in_backward = (op >= 0) & (recording.op_phase[np.maximum(op, 0)] == _BACKWARD)
    buckets = (recording.alloc_kind == _GRADIENT) & ~in_backward
    collectives = _collectives(recording)
    streams = np.setdiff1d(recording.kernel_stream[collectives], [0])
    waits = recording.kernel_kind == _CODES["event_wait"]
    gone = (
        collectives
        | np.isin(recording.kernel_stream, streams)
        | (waits & np.isin(recording.kernel_columns, streams))
    )
    fields: dict[str, IntArray] = {
        field.name: getattr(recording, field.name)[~gone]
        for field in dataclasses.fields(recording)
        if field.name.startswith("kernel_")
    }
    return dataclasses.replace(
        recording,
        header=_header(recording, 1),
        alloc_bytes=np.where(buckets, 0, recording.alloc_bytes),
        **cast("dict[str, Any]", fields),
    )


def _collectives(recording: Recording) -> Any:
    return np.isin(recording.kernel_kind, [_CODES[name] for name in COLLECTIVES])


def _header(recording: Recording, ranks: int) -> RecordingHeader:
    return cast(RecordingHeader, {**recording.header, **header_of(recording, ranks)})
