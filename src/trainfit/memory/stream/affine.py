"""Streams of every batch size from two recordings.

The tensors of a training step have sizes that are affine in the batch size, and the order
of allocations and frees does not depend on it. Two recordings of the same script therefore
give the exact stream for any batch size; the allocator's model does the rest. Workspaces
are not affine, but the integers that their models take are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainfit.memory.stream.replay import Stream
from trainfit.memory.stream.setup_order import in_setup_order_of
from trainfit.results.runs.recording import FREE, MALLOC, IntArray, Recording
from trainfit.simgpu.workspaces.scratch import workspace_bytes


class NotAffineError(Exception):
    """Two recordings do not follow one law; the message says where they part."""


class OtherCourseError(NotAffineError):
    """They run other operators: not because of a size that grows otherwise."""


@dataclasses.dataclass(frozen=True)
class AffineStream:
    """The stream of allocations as a function of the batch size.

    ``alloc_bytes = base + slope * batch``, workspaces by their models. ``exact`` is false
    where some slope is no whole number of bytes (sizes are then rounded up).
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
        """From recordings at two different batch sizes.

        Raises :class:`OtherCourseError` where they differ in more than sizes.
        """
        if batch == other:
            raise ValueError("two different batch sizes are needed")
        second = in_setup_order_of(second, first)
        _check_same_course(first, second)
        base, slope, exact = _law(first.alloc_bytes, batch, second.alloc_bytes, other)
        args = _law(first.workspace_args, batch, second.workspace_args, other)
        return cls(
            template=second if other > batch else first,
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

    def at(self, batch: int) -> Stream:
        """The stream at ``batch``."""
        span = self.batches[1] - self.batches[0]
        sizes = _evaluate(self.base, self.slope, batch, span)
        args = _evaluate(self.workspace_base, self.workspace_slope, batch, span).tolist()
        start = self.template.workspace_start.tolist()
        strings = self.template.strings
        for index, (alloc, model) in enumerate(
            zip(
                self.template.workspace_alloc.tolist(),
                self.template.workspace_model.tolist(),
                strict=True,
            )
        ):
            arguments = tuple(args[start[index] : start[index + 1]])
            sizes[alloc] = workspace_bytes(strings[model], arguments)
        return Stream.with_bytes(self.template, sizes)


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
