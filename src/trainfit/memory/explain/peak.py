"""The peak of allocated memory: its time and contents, and what remains between steps."""

from __future__ import annotations

import numpy as np

from trainfit.memory.explain.breakdown import by_kind, by_module
from trainfit.memory.stream.replay import Replay, Stream, live_at
from trainfit.results.memory.explanation import Allocation, Moment, Peak, Remaining
from trainfit.results.runs.recording import KINDS, PHASES, STEP_END, IntArray, Recording

#: Single allocations that are listed.
_LARGEST = 20


def peak(recording: Recording, stream: Stream, outcome: Replay) -> Peak:
    """The peak of allocated memory, explained."""
    live = live_at(stream, outcome.peak_event)
    order = np.argsort(-outcome.granted[live], kind="stable")[:_LARGEST]
    return Peak(
        allocated_bytes=outcome.peak_allocated,
        moment=moment(recording, outcome.peak_event),
        by_kind_bytes=by_kind(recording, stream, outcome),
        by_module_bytes=by_module(recording, stream, outcome),
        largest=tuple(
            _allocation(recording, int(alloc), int(outcome.granted[alloc])) for alloc in live[order]
        ),
    )


def moment(recording: Recording, event: int) -> Moment:
    """Where in the run an event (a malloc) is."""
    alloc = int(recording.events[event] >> 2)
    made, operator = _allocation(recording, alloc, 0), int(recording.alloc_op[alloc])
    # The operator's module, not the owner's of what it allocated.
    module = int(recording.op_module[operator]) if operator >= 0 else -1
    ends = np.flatnonzero(recording.events % 4 == STEP_END)
    index = int(np.searchsorted(ends, event))
    begin = int(ends[index - 1]) + 1 if index else 0
    end = int(ends[index]) if index < len(ends) else len(recording.events) - 1
    return Moment(
        step=made.step,
        phase=made.phase,
        operator=made.operator,
        module=recording.strings[module] if module >= 0 else "",
        line=made.line,
        through_step=(event - begin) / max(end - begin, 1),
    )


def remaining(recording: Recording, stream: Stream, outcome: Replay) -> Remaining | None:
    """What is there after the last optimizer step; ``None`` if there was none."""
    ends = np.flatnonzero(stream.events % 4 == STEP_END)
    if outcome.failed is not None:
        ends = ends[ends < outcome.failed]
    if not len(ends):
        return None
    last = live_at(stream, int(ends[-1]))
    kept = None
    if len(ends) > 1:
        kept = np.intersect1d(last, live_at(stream, int(ends[-2])))
    return Remaining(
        after_step_bytes=_kinds(recording, last, outcome.granted),
        kept_bytes=None if kept is None else _kinds(recording, kept, outcome.granted),
        context_bytes=int(recording.header["context_bytes"]),
    )


def phase_at(recording: Recording, event: int) -> str:
    """The phase that the operator of the latest allocation up to ``event`` belongs to."""
    values, codes = recording.events[: event + 1] >> 2, recording.events[: event + 1] & 3
    mallocs = values[codes == 0]
    return _phase(recording, int(mallocs[-1])) if len(mallocs) else PHASES[0]


def _kinds(recording: Recording, allocs: IntArray, granted: IntArray) -> dict[str, int]:
    totals = np.bincount(recording.alloc_kind[allocs], granted[allocs], minlength=len(KINDS))
    return {kind: int(totals[code]) for code, kind in enumerate(KINDS)}


def _allocation(recording: Recording, alloc: int, nbytes: int) -> Allocation:
    operator = int(recording.alloc_op[alloc])
    module, line = int(recording.alloc_module[alloc]), int(recording.alloc_line[alloc])
    strings = recording.strings
    return Allocation(
        nbytes=nbytes,
        kind=KINDS[int(recording.alloc_kind[alloc])],
        operator=strings[int(recording.op_name[operator])] if operator >= 0 else "",
        module=strings[module] if module >= 0 else "",
        phase=_phase(recording, alloc),
        step=int(recording.op_step[operator]) + 1 if operator >= 0 else 1,
        line=strings[line] if line >= 0 else None,
    )


def _phase(recording: Recording, alloc: int) -> str:
    operator = int(recording.alloc_op[alloc])
    return PHASES[int(recording.op_phase[operator])] if operator >= 0 else PHASES[0]
