"""Streams of every batch size from two recordings, put in one canonical order."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any, Final

import numpy as np

from trainfit.memory.replay import Stream
from trainfit.results.runs.continuation import resized, shortened, whole, with_decodes
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    OTHER,
    PHASES,
    IntArray,
    NotAffineError,
    Recording,
)
from trainfit.simgpu.allocator.workspaces import workspace_bytes

# ---
# A canonical order for what threads allocate in parallel before training, so that two recordings
# compare.
#
# Loaders of weights copy tensors to the GPU from several threads. Which of them comes first differs
# from run to run and says nothing of the batch size.


_FORWARD: Final = PHASES.index("forward")
_PERSISTENT: Final = (KINDS.index("parameter"), KINDS.index("buffer"))


@dataclasses.dataclass(frozen=True)
class _Setup:
    """A recording's beginning, until its model is on the GPU: numbers of operators, allocations
    and events."""

    ops: int
    allocs: int
    events: int


def in_setup_order_of(second: Recording, first: Recording) -> Recording:
    """``second`` with what brings the model to the GPU in the order that ``first`` has.

    ``second`` itself where the order is the same already, or where more than the order differs.
    """
    setups = _setup(first), _setup(second)
    if setups[0] is None or setups[1] is None:
        return second
    keys = _keys(first, setups[0]), _keys(second, setups[1])
    if keys[0] == keys[1] or sorted(keys[0]) != sorted(keys[1]):
        return second
    return _permuted(second, setups[1], _matches(*keys), first.events[: setups[0].events])


def _setup(recording: Recording) -> _Setup | None:
    """Up to the last parameter or buffer before the first forward call, and the operators after it
    that allocate nothing. ``None`` where allocations of before and after are mixed, or one of
    before is a kernel's workspace."""
    forward = np.flatnonzero(recording.op_phase == _FORWARD)[:1]
    persistent = recording.alloc_op[np.isin(recording.alloc_kind, _PERSISTENT)]
    early = persistent[persistent < forward] if len(forward) else persistent[:0]
    if not len(early):
        return None
    later = recording.alloc_op[recording.alloc_op > early.max()]
    ops = int(min([*later[:1], *forward]))
    allocs = int(np.count_nonzero(recording.alloc_op < ops))
    made = np.flatnonzero(recording.events % 4 == MALLOC)
    mixed = (recording.alloc_op[:allocs] >= ops).any() or allocs == len(made)
    if mixed or (recording.workspace_alloc < allocs).any():
        return None
    return _Setup(ops, allocs, int(made[allocs]))


def _keys(recording: Recording, setup: _Setup) -> list[tuple[Any, ...]]:
    """What each operator of the setup is: its name and, of each of its allocations, size, kind,
    stream, and whether it is gone when the model is there."""
    head = recording.events[: setup.events]
    freed = set((head[head % 4 == FREE] // 4).tolist())
    made: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    columns = (recording.alloc_op, recording.alloc_bytes, recording.alloc_kind)
    rows = zip(*(column[: setup.allocs].tolist() for column in columns), strict=True)
    for alloc, (op, size, kind) in enumerate(rows):
        made[op].append((size, kind, int(recording.alloc_stream[alloc]), alloc in freed))
    names = [recording.strings[name] for name in recording.op_name[: setup.ops].tolist()]
    before_all = ("", tuple(made[-1]))
    return [before_all, *((name, tuple(made[op])) for op, name in enumerate(names))]


def _matches(wanted: list[tuple[Any, ...]], given: list[tuple[Any, ...]]) -> IntArray:
    """For each place of ``wanted`` the place of ``given`` that is the same, without the entry
    before all operators (which is the first of both)."""
    places: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place in reversed(range(1, len(given))):
        places[given[place]].append(place)
    return np.array([places[key].pop() - 1 for key in wanted[1:]], dtype=np.int64)


def _permuted(recording: Recording, setup: _Setup, order: IntArray, head: IntArray) -> Recording:
    """``order`` has the operators of the setup by their new places; ``head`` are its events."""
    new_op = np.arange(len(recording.op_name))
    new_op[order] = np.arange(setup.ops)
    op_of = recording.alloc_op[: setup.allocs]
    ranks = np.where(op_of >= 0, new_op[op_of], -1)
    by_op = np.argsort(ranks, kind="stable")
    new_alloc = np.arange(len(recording.alloc_op))
    new_alloc[by_op] = np.arange(setup.allocs)
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(recording):
        column = getattr(recording, field.name)
        if field.name.startswith("op_"):
            columns[field.name] = np.concatenate([column[order], column[setup.ops :]])
        elif field.name.startswith("alloc_"):
            columns[field.name] = np.concatenate([column[by_op], column[setup.allocs :]])
    columns["alloc_op"][: setup.allocs] = ranks[by_op]
    columns |= _kernels(recording, new_op)
    tail = renumbered(recording.events[setup.events :], new_alloc)
    header = recording.header.copy()
    parameters = header.get("parameters")
    if parameters is not None:
        header["parameters"] = [[int(new_alloc[alloc]), *rest] for alloc, *rest in parameters]
    events = np.concatenate([head, tail])
    return dataclasses.replace(recording, header=header, events=events, **columns)


def _kernels(recording: Recording, new_op: IntArray) -> dict[str, IntArray]:
    ops = recording.kernel_op
    moved = np.where(ops >= 0, new_op[ops], -1) if len(new_op) else ops
    order = np.argsort(moved, kind="stable")
    names = [
        field.name for field in dataclasses.fields(recording) if field.name.startswith("kernel_")
    ]
    columns = {name: getattr(recording, name)[order] for name in names}
    return {**columns, "kernel_op": moved[order]}


def renumbered(events: IntArray, new_alloc: IntArray) -> IntArray:
    """Events with other numbers of allocations; see
    :data:`trainfit.results.runs.recording.OTHER`."""
    values, codes = events // 4, events % 4
    named = (codes == MALLOC) | (codes == FREE)
    waits = (codes == OTHER) & (values > 0)
    found = values.copy()
    found[named] = new_alloc[values[named]]
    found[waits] = new_alloc[(values[waits] - 1) // 2] * 2 + (values[waits] - 1) % 2 + 1
    return found * 4 + codes


class OtherCourseError(NotAffineError):
    """They run other operators: not because of a size that grows otherwise."""


@dataclasses.dataclass(frozen=True)
class AffineStream:
    """The stream of allocations as a function of the batch size.

    ``alloc_bytes = base + slope * batch``, workspaces by their models. ``exact`` is false
    where some slope is no whole number of bytes (sizes are then rounded up). They are of what was
    simulated; of a generated text, ``template`` and streams go on from there to its end.
    """

    template: Recording
    base: IntArray
    slope: IntArray
    workspace_base: IntArray
    workspace_slope: IntArray
    exact: bool
    batches: tuple[int, int]

    @classmethod
    def between(cls, first: Recording, batch: int, second: Recording, other: int) -> AffineStream:
        """The stream between recordings at two different batch sizes.

        Raises :class:`OtherCourseError` where they differ in more than sizes.
        """
        if batch == other:
            raise ValueError("two different batch sizes are needed")
        first, second = _to_one_length(first, second)
        longer = second if other > batch else first
        first = first.simulated or first
        second = in_setup_order_of(second.simulated or second, first)
        _check_same_course(first, second)
        base, slope, exact = _law(first.alloc_bytes, batch, second.alloc_bytes, other)
        args = _law(first.workspace_args, batch, second.workspace_args, other)
        return cls(
            template=_template(second if other > batch else first, longer),
            base=base,
            slope=slope,
            workspace_base=args[0],
            workspace_slope=args[1],
            exact=exact and args[2],
            batches=(batch, other),
        )

    @property
    def depends_on_batch(self) -> bool:
        """Does anything change with the batch size at all?"""
        return bool(self.slope.any() or self.workspace_slope.any())

    @property
    def recorded(self) -> Recording:
        """What was simulated at the larger of both batch sizes."""
        return self.template.simulated or self.template

    def at(self, batch: int, calls: int | None = None, leap: int = 0) -> Stream:
        """The stream at ``batch``; of a generated text, to ``calls`` after what was simulated
        (``None``: to its end) and after ``leap`` that are left out."""
        sizes, arguments = self.sizes(batch)
        if self.template.simulated is None:
            return Stream.with_bytes(self.template, sizes)
        return Stream.of(resized(self.template, sizes, arguments, calls, leap))

    def sizes(self, batch: int) -> tuple[IntArray, IntArray]:
        """Bytes of what was simulated at ``batch``, and the arguments of workspaces."""
        span = self.batches[1] - self.batches[0]
        sizes = _evaluate(self.base, self.slope, batch, span)
        found = _evaluate(self.workspace_base, self.workspace_slope, batch, span)
        args, recorded = found.tolist(), self.recorded
        start = recorded.workspace_start.tolist()
        for index, (alloc, model) in enumerate(
            zip(recorded.workspace_alloc.tolist(), recorded.workspace_model.tolist(), strict=True)
        ):
            arguments = tuple(args[start[index] : start[index + 1]])
            sizes[alloc] = workspace_bytes(recorded.strings[model], arguments)
        return sizes, found


def _to_one_length(first: Recording, second: Recording) -> tuple[Recording, Recording]:
    """Two recordings of texts with as many simulated calls each; raises :class:`OtherCourseError`
    where their lengths differ, or only one of them goes on."""
    texts = generated_text(first), generated_text(second)
    if first.simulated is None and second.simulated is None:
        return first, second
    if None in (*texts, first.simulated, second.simulated):
        raise OtherCourseError("the end of the text follows at one batch size only")
    one, two = (text for text in texts if text is not None)
    if one.new_tokens != two.new_tokens:
        raise OtherCourseError(
            f"{one.new_tokens} tokens are generated at one batch size and {two.new_tokens} at the "
            "other"
        )
    decodes = min(one.decodes, two.decodes)
    return with_decodes(first, decodes), with_decodes(second, decodes)


def _template(recorded: Recording, longer: Recording) -> Recording:
    """What was recorded, continued where ``longer`` is."""
    return recorded if longer.simulated is None else shortened(whole(recorded))


def _law(
    first: IntArray, batch: int, second: IntArray, other: int
) -> tuple[IntArray, IntArray, bool]:
    """Base and slope, both times ``other - batch`` so that they stay whole numbers."""
    span = other - batch
    slope = second - first
    base = first * span - slope * batch
    return base, slope, bool(np.all(slope % span == 0))


def _evaluate(base: IntArray, slope: IntArray, batch: int, span: int) -> IntArray:
    return np.maximum(-((-(base + slope * batch)) // span), 0)  # type: ignore[no-any-return]


def _check_same_course(first: Recording, second: Recording) -> None:
    """Same operators, same allocations by them, same mallocs; frees in the same order.

    Raises :class:`OtherCourseError`.
    """
    names = [_texts(each, each.op_name) for each in (first, second)]
    for index, (one, two) in enumerate(zip(*names, strict=False)):
        if one != two:
            module = first.strings[int(first.op_module[index])]
            where = f" in {module}" if module else ""
            raise OtherCourseError(
                f"operator {index} is {one}{where} at one batch size and {two} at the other"
            )
    if len(names[0]) != len(names[1]):
        raise OtherCourseError(
            f"{len(names[0])} operators at one batch size, {len(names[1])} at the other"
        )
    if not np.array_equal(first.alloc_op, second.alloc_op):
        raise OtherCourseError("an operator allocates a different number of tensors")
    if not np.array_equal(first.workspace_start, second.workspace_start):
        raise OtherCourseError("a kernel uses a different kind of workspace")
    if not np.array_equal(_order(first), _order(second)):
        raise OtherCourseError("tensors are freed in another order")


def _texts(recording: Recording, column: IntArray) -> list[str]:
    strings = recording.strings
    return [strings[index] for index in column.tolist()]


def _order(recording: Recording) -> IntArray:
    """The events with runs of frees sorted: which of two frees comes first is no matter."""
    events = recording.events
    codes = events % 4
    run = np.cumsum(codes != FREE)
    ordered: IntArray = events[np.lexsort((np.where(codes == MALLOC, 0, events), run))]
    return ordered
