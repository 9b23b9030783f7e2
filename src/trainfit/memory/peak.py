"""The peak of allocated memory: its time, its composition, and the step around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.results.memory import (
    Allocation,
    Moment,
    Owner,
    Peak,
    Remaining,
    StepMemory,
    StepMoment,
)
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    IntArray,
    Recording,
    step_around,
    step_ends,
)

# ---
# Composition of the peak memory.


#: What does not depend on the batches.
_KEPT: Final = tuple(map(KINDS.index, ("parameter", "buffer", "gradient", "optimizer_state")))
#: Components of a path at first: the model's class and its child.
_DEPTH: Final = 2
#: A row with this share of all is divided further; so many rows of the least share are enough.
_ALONE: Final = 0.95
_ROWS: Final = 3
_SHOWN: Final = 0.01


def by_kind(recording: Recording, stream: Stream, outcome: Replay) -> dict[str, int]:
    """Bytes at the peak of allocated memory, by kind of allocation; sums to the peak."""
    live = live_at(stream, outcome.peak_event)
    totals = np.bincount(
        recording.alloc_kind[live], weights=outcome.granted[live], minlength=len(KINDS)
    )
    return {kind: int(totals[code]) for code, kind in enumerate(KINDS)}


def most_kept_bytes(recording: Recording) -> int:
    """The most bytes of what does not depend on batches, as they were asked for, at one time."""
    codes, values = recording.events & 3, recording.events >> 2
    of_allocs = (codes == MALLOC) | (codes == FREE)
    allocs = np.where(of_allocs, values, 0)
    kept = of_allocs & np.isin(recording.alloc_kind, _KEPT)[allocs]
    nbytes = np.where(kept, recording.alloc_bytes[allocs], 0)
    return int(np.cumsum(np.where(codes == MALLOC, nbytes, -nbytes)).max(initial=0))


def by_module(recording: Recording, stream: Stream, outcome: Replay) -> dict[str, int]:
    """Bytes at the peak by module path, cut where the table says the most; largest first.

    What no module owns (inputs, loss, optimizer) is under ``""``. See :func:`divided`.
    """
    live = live_at(stream, outcome.peak_event)
    modules = recording.alloc_module[live]
    totals: dict[str, int] = {}
    for module, nbytes in zip(modules.tolist(), outcome.granted[live].tolist(), strict=True):
        path = recording.strings[module] if module >= 0 else ""
        totals[path] = totals.get(path, 0) + nbytes
    return divided(totals)


def divided(totals: Mapping[str, int]) -> dict[str, int]:
    """``totals`` of whole paths, summed up by their beginnings; largest first.

    Paths are cut after the model's children. A row that holds nearly everything, as a wrapper's
    only child does (``DataParallel.module``, ``PeftModel.base_model.model``), is divided into its
    own children, and so is the largest while there are too few rows to say something.
    """
    rows = _rows(totals, _DEPTH)
    named = sum(nbytes for path, nbytes in totals.items() if path)
    while True:
        sizes = {path: sum(members.values()) for path, members in rows.items()}
        large = sorted(
            (path for path in rows if path and sizes[path] >= _SHOWN * named),
            key=lambda path: -sizes[path],
        )
        if not large or (len(large) >= _ROWS and sizes[large[0]] < _ALONE * named):
            break
        parts = [(path, _rows(rows[path], _components(path) + 1)) for path in large]
        path, below = next(((p, b) for p, b in parts if set(b) != {p}), ("", {}))
        if not below:
            break
        del rows[path]
        rows |= below
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _rows(totals: Mapping[str, int], depth: int) -> dict[str, dict[str, int]]:
    """``totals`` by their paths' first components."""
    rows: dict[str, dict[str, int]] = {}
    for path, nbytes in totals.items():
        rows.setdefault(".".join(path.split(".")[:depth]), {})[path] = nbytes
    return rows


def _components(path: str) -> int:
    return path.count(".") + 1


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
    """The moment of the run at which an event (a malloc) is."""
    alloc = int(recording.events[event] >> 2)
    made, operator = _allocation(recording, alloc, 0), int(recording.alloc_op[alloc])
    # The operator's module, not the owner's of what it allocated.
    module = int(recording.op_module[operator]) if operator >= 0 else -1
    begin, end = step_around(recording.events, event)
    end = min(end, len(recording.events) - 1)
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
    ends = step_ends(stream.events)
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
        context_bytes=recording.header["context_bytes"],
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


# ---
# Allocated memory over the step that holds the peak, by kind, with the owners at the peak.


#: Moments at most.
_MOMENTS: Final = 400


def step_memory(recording: Recording, outcome: Replay, batch_size: int | None) -> StepMemory | None:
    """The step of the peak of ``outcome``; ``None`` where nothing was allocated."""
    stream = outcome.stream
    if not outcome.peak_allocated:
        return None
    first, last = step_around(stream.events, outcome.peak_event)
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
        step=1 + len(step_ends(stream.events[:first])),
        events=last - first,
        moments=moments,
        peak=chosen.index(outcome.peak_event - first),
        owners=_owners(recording, live_at(stream, outcome.peak_event), outcome.granted),
    )


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
    phases: list[int] = of_row[latest].tolist()
    return phases


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
    owners = [_owner(recording, key, allocs, granted) for key, allocs in groups.items()]
    return tuple(sorted(owners, key=lambda owner: -owner.nbytes))


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
