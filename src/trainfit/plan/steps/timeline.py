"""The steady step of a recording over time: what the CPU dispatches, the GPU runs, memory holds."""

from __future__ import annotations

from typing import Final

import numpy as np

from trainfit.memory.explain.step_memory import held_by_kind
from trainfit.memory.stream.replay import Stream, replay
from trainfit.plan.steps.costing import has_rates
from trainfit.results.plan.speed import (
    KernelSpan,
    MemoryPoint,
    OperatorSpan,
    StepTimeline,
)
from trainfit.results.runs.kernels import DTYPES, MARKS
from trainfit.results.runs.kernels import KINDS as KERNEL_KINDS
from trainfit.results.runs.recording import FREE, KINDS, MALLOC, PHASES, STEP_END, Recording
from trainfit.speed.model.step import Launched, Machine, TimedWork
from trainfit.speed.model.timeline import Timeline
from trainfit.speed.model.work import Floats, Work, steady

_MARKS: Final = frozenset(KERNEL_KINDS.index(name) for name in MARKS)


def step_timeline(recording: Recording, machine: Machine) -> StepTimeline | None:
    """``None`` where the recording has no whole step or no kernels, or the GPU no known rates."""
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    step = steady(recording)
    work = Work.of_step(recording, step)
    if not len(work.table):
        return None
    timeline, costed = Timeline(), TimedWork(work, machine)
    launched = costed.launch(timeline)
    ends = _operator_ends(work, launched)
    first = int(np.flatnonzero(recording.op_step == step)[0])
    return StepTimeline(
        machine.gpu.name,
        step,
        timeline.end_s,
        _operators(recording, first, ends),
        _kernels(work, launched, costed.seconds + costed.copies),
        _memory(recording, step, first, ends),
    )


def _operator_ends(work: Work, launched: Launched) -> Floats:
    """When the CPU is done with each operator: all later ones wait for what a launch waited for."""
    waited = np.zeros(len(launched.operator_s))
    np.maximum.at(waited, work.op, launched.launched_s - launched.issued_s)
    ends: Floats = launched.operator_s + np.maximum.accumulate(waited)
    return ends


def _operators(recording: Recording, first: int, ends: Floats) -> tuple[OperatorSpan, ...]:
    strings, begins = recording.strings, np.concatenate(([0.0], ends[:-1]))
    spans = []
    for place, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        at = first + place
        module = int(recording.op_module[at])
        spans.append(
            OperatorSpan(
                strings[int(recording.op_name[at])],
                PHASES[int(recording.op_phase[at])],
                strings[module] if module >= 0 else "",
                begin,
                end,
            )
        )
    return tuple(spans)


def _kernels(work: Work, launched: Launched, took: Floats) -> tuple[KernelSpan, ...]:
    names = ("kind", "dtype", "flops", "read", "written")
    kinds, dtypes, flops, read, written = (work.column(name).tolist() for name in names)
    ends, seconds = launched.ended_s.tolist(), took.tolist()
    return tuple(
        KernelSpan(
            KERNEL_KINDS[kinds[at]],
            DTYPES[dtypes[at]],
            int(work.stream[at]),
            int(work.op[at]),
            ends[at] - seconds[at],
            ends[at],
            flops[at],
            read[at] + written[at],
        )
        for at in range(len(kinds))
        if kinds[at] not in _MARKS
    )


def _memory(recording: Recording, step: int, first: int, ends: Floats) -> tuple[MemoryPoint, ...]:
    """A point for each operator that changes it; a free is put at the operator of the allocation
    before it, as the recording has no other time of it."""
    stream = Stream.of(recording)
    at_ends = np.flatnonzero(recording.events % 4 == STEP_END)
    begin, end = (int(at_ends[step - 1]) + 1 if step else 0), int(at_ends[step])
    held = held_by_kind(recording, stream, replay(stream).granted, begin, end)
    codes, numbers = recording.events[begin:end] & 3, recording.events[begin:end] >> 2
    changes = np.flatnonzero((codes == MALLOC) | (codes == FREE))
    places = np.clip(recording.alloc_op[numbers[changes]] - first, 0, len(ends) - 1)
    times = np.maximum.accumulate(np.where(codes[changes] == MALLOC, ends[places], 0.0))
    rows = held[[0, *(1 + changes)]].tolist()
    return tuple(
        MemoryPoint(time_s, dict(zip(KINDS, row, strict=True)))
        for time_s, row in zip((0.0, *times.tolist()), rows, strict=True)
    )
