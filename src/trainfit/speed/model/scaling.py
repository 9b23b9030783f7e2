"""A step's kernels at every batch size, from recordings at two.

Sizes, FLOPs and bytes of kernels are affine in the batch size, and which kernels there are does
not depend on it (but for how many launches an operator over lists takes, which does not either).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from trainfit.results.runs.kernels import MARKS
from trainfit.results.runs.recording import IntArray
from trainfit.speed.model.work import COLUMNS, Work

#: Columns that are the same at every batch size.
_FIXED = [COLUMNS.index(name) for name in ("kind", "dtype", "launches")]


class NotAffineError(Exception):
    """Two steps do not launch the same kernels; the message says where they part."""


@dataclasses.dataclass(frozen=True)
class WorkLaw:
    """A step's work as a function of the batch size: ``base + slope * batch``, both times
    ``span`` so that they stay whole numbers."""

    template: Work
    base: IntArray
    slope: IntArray
    span: int

    @classmethod
    def between(cls, first: Work, batch: int, second: Work, other: int) -> WorkLaw:
        """From a step at each of two different batch sizes.

        Raises :class:`NotAffineError` where they differ in more than sizes.
        """
        if batch == other:
            raise ValueError("two different batch sizes are needed")
        if len(first.table) != len(second.table):
            raise NotAffineError(
                f"{len(first.table)} kernels at batch size {batch}, {len(second.table)} at {other}"
            )
        differs = (first.table[:, _FIXED] != second.table[:, _FIXED]).any(axis=1)
        if differs.any():
            place = int(differs.argmax())
            raise NotAffineError(f"kernel {place} differs at batch size {other}")
        span = other - batch
        slope = second.table - first.table
        # Events keep their numbers, however many there were before this step in either run.
        slope[first.is_kind(*MARKS)] = 0
        return cls(first, first.table * span - slope * batch, slope, span)

    def at(self, batch: int) -> Work:
        """The step's work at ``batch``; sizes are rounded, and never below 0."""
        table = np.maximum(np.rint((self.base + self.slope * batch) / self.span), 0)
        return dataclasses.replace(self.template, table=table.astype(np.int64))
