"""Rows of steps that were recorded lightly: short ones until they are written."""

from __future__ import annotations

import math
from typing import Any, Final

from trainfit.results.watch import tables

_NAMES: Final = tables.STEPS.names or ()
#: What a short row has: the first columns of a whole one, samples and batches, memory, the loss,
#: and last the flags.
_FIRST: Final = _NAMES.index("input_s") + 1
_SAMPLES, _QUEUED = _NAMES.index("samples"), _NAMES.index("queued")
_MEMORY, _LOSS = _NAMES.index("allocated_bytes"), _NAMES.index("loss")
_COUNTED: Final = _FIRST + _QUEUED - _SAMPLES
_SHORT: Final = _COUNTED + _LOSS - _MEMORY + 2
#: Between them, and what stands for a number that was not looked at.
_NO_PHASES: Final = (math.nan,) * (_SAMPLES - _FIRST)
_NO_COUNTS: Final = (-1,) * (_MEMORY - _QUEUED)


def whole_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row of :data:`trainfit.results.watch.tables.STEPS` of a short one: step, end, length, wait
    for batches, samples, batches, the four columns of memory, loss (``None``: not looked at) and
    flags. Others are returned as they are."""
    if len(row) != _SHORT:
        return row
    samples, batches = row[_FIRST:_COUNTED]
    memory, loss, flags = row[_COUNTED:-2], row[-2], row[-1]
    if loss is None:
        loss = math.nan
    else:
        flags |= tables.loss_flag(loss)
        loss = tables.float32(loss)
    return (
        *(*row[:_FIRST], *_NO_PHASES, min(samples, tables.MOST_32), min(batches, tables.MOST_16)),
        *(*_NO_COUNTS, *memory, loss, math.nan, math.nan, flags),
    )
