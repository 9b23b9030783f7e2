"""Allocated memory over the step that holds the peak, by kind, with the owners at the peak."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trainfit.memory.stream.replay import Replay, Stream, live_at
from trainfit.results.memory.step_memory import Owner, StepMemory, StepMoment
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    STEP_END,
    IntArray,
    Recording,
)

#: Moments at most.
_MOMENTS: Final = 400


def step_memory(recording: Recording, outcome: Replay, batch_size: int | None) -> StepMemory | None:
    """The step of the peak of ``outcome``; ``None`` where nothing was allocated."""
    stream = outcome.stream
    if not outcome.peak_allocated:
        return None
    first, last = _bounds(stream.events, outcome.peak_event)
    held = held_by_kind(recording, stream, outcome.granted, first, last)[1:]
    total = held.sum(axis=1)
    chosen = _chosen(total, outcome.peak_event - first)
    phases = _phases(recording, stream.events[first:last])
    moments = tuple(
        StepMoment(
            place,
            PHASES[phases[place]],
            {kind: int(held[place, code]) for code, kind in enumerate(KINDS) if held[place, code]},
        )
        for place in chosen
    )
    return StepMemory(
        batch_size=batch_size,
        step=1 + int(np.count_nonzero(stream.events[:first] % 4 == STEP_END)),
        events=last - first,
        moments=moments,
        peak=chosen.index(outcome.peak_event - first),
        owners=_owners(recording, live_at(stream, outcome.peak_event), outcome.granted),
    )


def _bounds(events: IntArray, event: int) -> tuple[int, int]:
    """The first event of the step that ``event`` is in, and the one after its last."""
    ends = np.flatnonzero(events % 4 == STEP_END)
    at = int(np.searchsorted(ends, event))
    first = int(ends[at - 1]) + 1 if at else 0
    return first, int(ends[at]) if at < len(ends) else len(events)


def held_by_kind(
    recording: Recording, stream: Stream, granted: IntArray, first: int, last: int
) -> IntArray:
    """Bytes before event ``first``, and after each event from it on and before ``last``; a column
    for each kind."""
    before = live_at(stream, first - 1) if first else np.zeros(0, dtype=np.int64)
    start = np.bincount(
        recording.alloc_kind[before], weights=granted[before], minlength=len(KINDS)
    ).astype(np.int64)
    events = stream.events[first:last]
    numbers, codes = events >> 2, events & 3
    moved = np.zeros((1 + len(events), len(KINDS)), dtype=np.int64)
    for code, sign in ((MALLOC, 1), (FREE, -1)):
        rows = np.flatnonzero(codes == code)
        of = numbers[rows]
        moved[1 + rows, recording.alloc_kind[of]] = sign * granted[of]
    held: IntArray = start + np.cumsum(moved, axis=0)
    return held


def _chosen(total: IntArray, peak: int) -> list[int]:
    """The first event, the last, and the largest of each equal part between them; ``peak`` is
    one."""
    parts = np.array_split(np.arange(len(total)), min(_MOMENTS, len(total)))
    found = {int(part[np.argmax(total[part])]) for part in parts if len(part)}
    return sorted(found | {0, len(total) - 1, peak})


def _phases(recording: Recording, events: IntArray) -> list[int]:
    """The phase after each event: that of the latest allocation's operator."""
    rows = np.flatnonzero(events % 4 == MALLOC)
    if not len(rows):
        return [0] * len(events)
    operators = recording.alloc_op[events[rows] >> 2]
    of_row = np.where(operators >= 0, recording.op_phase[np.maximum(operators, 0)], 0)
    latest = np.maximum(np.searchsorted(rows, np.arange(len(events)), side="right") - 1, 0)
    found: list[int] = of_row[latest].tolist()
    return found


def _owners(
    recording: Recording, live: npt.NDArray[np.int64], granted: IntArray
) -> tuple[Owner, ...]:
    """Allocations ``live`` by module and kind."""
    groups: dict[tuple[int, int], list[int]] = {}
    keys = zip(
        recording.alloc_module[live].tolist(), recording.alloc_kind[live].tolist(), strict=True
    )
    for key, alloc in zip(keys, live.tolist(), strict=True):
        groups.setdefault(key, []).append(alloc)
    found = [_owner(recording, key, allocs, granted) for key, allocs in groups.items()]
    return tuple(sorted(found, key=lambda owner: -owner.nbytes))


def _owner(
    recording: Recording, key: tuple[int, int], allocs: list[int], granted: IntArray
) -> Owner:
    module, kind = key
    sizes = granted[allocs]
    largest = allocs[int(np.argmax(sizes))]
    operator, line = int(recording.alloc_op[largest]), int(recording.alloc_line[largest])
    strings = recording.strings
    return Owner(
        module=strings[module] if module >= 0 else "",
        kind=KINDS[kind],
        nbytes=int(sizes.sum()),
        allocations=len(allocs),
        operator=strings[int(recording.op_name[operator])] if operator >= 0 else "",
        line=strings[line] if line >= 0 else None,
    )
