"""Detects memory that grows from step to step, and what it consists of."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from trainfit.memory.replay import Stream, live_at
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Recording, step_ends
from trainfit.results.runs.steps import GrowthSource, StepPattern, StepUnit
from trainfit.simgpu.device.settling import CourseFinding, StepUse, judge, rounded, step_uses

#: Kinds that come once for each parameter or buffer, however late: no sign of growth.
_BOUNDED = ("parameter", "buffer", "gradient", "optimizer_state", "workspace", "bucket")
#: Sources of growth that are named.
_SOURCES = 5
#: Calls after a loop of calls at the most, in a script that only infers.
_AFTER_LOOP = 4
#: An epoch leaves as many bytes at least, and about as many as the one before.
_LEAST_LEFT, _ALIKE = 1 << 20, 1.1

_Group = tuple[int, int, int, int, int]


#: A container that holds this share of what the steps left behind holds it all.
_MOST_OF: Final = 0.9


def step_pattern(recording: Recording, *, reserved_bytes: int) -> StepPattern:
    """What the recorded steps say of all others.

    ``reserved_bytes`` is the peak of reserved memory, from which a growing job goes on.
    """
    text = generated_text(recording)
    if text is not None and (text.reason or not text.calls_left):
        text = None  # figures are for the simulated calls
    recording = recording.simulated or recording
    uses = step_uses(recording.events, recording.alloc_bytes)
    unit = _unit(recording)
    calls = unit == "model call"
    parts = parts_at_ends(recording)
    if calls and len(uses) > 1 and uses[-1].end_bytes < uses[-2].end_bytes:
        # The call with which a cache was let go, which ended the simulation.
        judgement = judge(uses[:-1], [part[:-1] for part in parts])
    else:
        judgement = judge(uses, parts)
        if calls and judgement.course in ("irregular", "unknown"):
            judgement = _of_loop(uses, parts) or judgement
    grows = judgement.course == "growing"
    more = _until_bound(recording, len(uses), judgement) if grows else None
    return StepPattern(
        course=judgement.course,
        steps=len(uses),
        peak_bytes=tuple(use.peak_bytes for use in uses),
        end_bytes=tuple(use.end_bytes for use in uses),
        settled_from=judgement.first,
        period=judgement.period,
        growth_bytes_per_step=judgement.growth_bytes,
        steps_until_full=_until_full(recording, uses, judgement, reserved_bytes, more),
        sources=_sources(recording) if grows else (),
        unit=unit,
        text_calls=text.new_tokens if text is not None else None,
        grows_by_bytes=more,
    )


def _unit(recording: Recording) -> StepUnit:
    """What counts as a step: with an optimizer that is none of PyTorch's, or none at all, a
    backward pass."""
    if recording.header.get("optimizer"):
        return "optimizer step"
    trains = (recording.op_phase == PHASES.index("backward")).any()
    return "backward pass" if trains else "model call"


def _of_loop(uses: list[StepUse], parts: list[list[int]]) -> CourseFinding | None:
    """The course of calls in a loop that had settled before others came, such as that of what
    decodes the images that the loop has sampled; ``None`` where there are none."""
    for after in range(1, min(_AFTER_LOOP, len(uses) - 1) + 1):
        finding = judge(uses[:-after], [part[:-after] for part in parts])
        if finding.course == "settled":
            return finding
    return None


def parts_at_ends(recording: Recording) -> list[list[int]]:
    """Bytes alive at the end of each step but the first, by operator, module, kind and line.

    Where batches vary in shape, what a script keeps still grows on its own. Kinds of which
    there is a bounded number are left out.
    """
    return list(_parts_by_group(recording).values())


def left_by_epochs(recording: Recording, steps: int) -> tuple[GrowthSource, ...]:
    """What each epoch of so many optimizer ``steps`` leaves behind, the largest first; the bytes
    are an epoch's.

    That is what there is more of at the end of each epoch, by as much each time. What the first
    one alone leaves (a copy of the best model) is none.
    """
    sources = []
    for group, sizes in _parts_by_group(recording).items():
        # The list begins with the second step.
        ends = sizes[steps - 2 :: steps] if steps > 1 else sizes
        growths = [after - before for before, after in pairwise(ends)]
        if len(growths) > 1 and min(growths) >= _LEAST_LEFT and growths[-1] <= _ALIKE * growths[0]:
            sources.append(_source(recording, group, min(growths)))
    return tuple(sorted(sources, key=lambda source: -source.bytes_per_step))


def is_freed_by_epochs(recording: Recording, steps: int) -> bool:
    """Is what steps leave behind let go at the end of each epoch of so many ``steps``, three of
    which are in the recording? It is if the first step of one has less alive than the last step of
    the one before, and no epoch ends with more than another."""
    sums = [sum(sizes) for sizes in zip(*_parts_by_group(recording).values(), strict=True)]
    # The list begins with the second step.
    ends, begins = sums[steps - 2 :: steps], sums[steps - 1 :: steps]
    if steps < 2 or len(ends) < 3:
        return False
    lets_go = all(begin < end for begin, end in zip(begins, ends, strict=False))
    return lets_go and max(ends) <= ends[0]


def _parts_by_group(recording: Recording) -> dict[_Group, list[int]]:
    stream = Stream.of(recording)
    bounded = [KINDS.index(kind) for kind in _BOUNDED]
    ends = []
    for end in step_ends(recording.events)[1:]:
        alive = live_at(stream, int(end))
        alive = alive[~np.isin(recording.alloc_kind[alive], bounded)]
        ends.append(_by_group(recording, alive))
    groups = {group for end in ends for group in end}
    return {group: [end.get(group, 0) for end in ends] for group in groups}


def _sources(recording: Recording) -> tuple[GrowthSource, ...]:
    """What there is more of with each step, by operator, module, kind and line."""
    stream = Stream.of(recording)
    ends = step_ends(recording.events)
    # The second step is the first that has what all have.
    first, last = 1, len(ends) - 1
    before = _by_group(recording, live_at(stream, int(ends[first])))
    after = _by_group(recording, live_at(stream, int(ends[last])))
    growth = {group: nbytes - before.get(group, 0) for group, nbytes in after.items()}
    largest = sorted(growth, key=lambda group: -growth[group])[:_SOURCES]
    return tuple(
        _source(recording, group, round(growth[group] / (last - first)))
        for group in largest
        if growth[group] > 0
    )


def _by_group(recording: Recording, allocs: IntArray) -> dict[_Group, int]:
    operators = np.maximum(recording.alloc_op[allocs], 0)
    columns = (
        recording.op_name[operators],
        recording.alloc_module[allocs],
        recording.alloc_kind[allocs],
        recording.op_phase[operators],
        recording.alloc_line[allocs],
    )
    totals: dict[_Group, int] = {}
    sizes = rounded(recording.alloc_bytes[allocs]).tolist()
    for *group, nbytes in zip(*(column.tolist() for column in columns), sizes, strict=True):
        key: _Group = tuple(group)
        totals[key] = totals.get(key, 0) + nbytes
    return totals


def _source(recording: Recording, group: _Group, nbytes: int) -> GrowthSource:
    operator, module, kind, phase, line = group
    return GrowthSource(
        bytes_per_step=nbytes,
        operator=recording.strings[operator],
        module=recording.strings[module] if module >= 0 else "",
        kind=KINDS[kind],
        phase=PHASES[phase],
        line=recording.strings[line] if line >= 0 else None,
    )


def _until_bound(recording: Recording, steps: int, judgement: CourseFinding) -> int | None:
    """What memory grows by until the containers that keep it are full; ``None``: those with a bound
    have not all of it."""
    growth, buffers = judgement.growth_bytes, recording.header.get("buffers") or []
    held = sum(nbytes for nbytes, _, _ in buffers)
    if not growth or held < _MOST_OF * growth * (steps - 1):
        return None
    more = 0
    for nbytes, elements, left in buffers:
        a_step = max(1, round(growth * elements / held))
        more += growth * nbytes * left // (held * a_step)
    return more


def _until_full(
    recording: Recording,
    uses: list[StepUse],
    judgement: CourseFinding,
    reserved_bytes: int,
    more: int | None,
) -> int | None:
    """Steps until the GPU is full, from the start; about: the cache's slack counts as used.
    ``None``: it never is."""
    growth = judgement.growth_bytes
    if not growth:
        return None
    header = recording.header
    others = header.get("other_processes_bytes") or 0
    free = header["gpu_memory_bytes"] - others - header["context_bytes"] - reserved_bytes
    if more is not None and more <= free:
        return None
    return len(uses) + max(free, 0) // growth
