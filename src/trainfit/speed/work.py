"""The kernels of one step, as columns."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.runs.decodes import KERNEL_SIZES
from trainfit.results.runs.recording import (
    FREE,
    MALLOC,
    PHASES,
    IntArray,
    NotAffineError,
    Recording,
    RepeatedCall,
)
from trainfit.results.runs.recording import KINDS as PURPOSES
from trainfit.results.runs.steps import KINDS, MARKS
from trainfit.simgpu.device.recorder import REPLAY
from trainfit.simgpu.device.settling import steady_step

Floats = NDArray[np.float64]

#: What a kernel's time depends on, in the order of the columns of :attr:`Work.table`.
COLUMNS: Final = (
    "kind",
    "dtype",
    "flops",
    "read",
    "written",
    "rows",
    "columns",
    "depth",
    "batches",
    "launches",
)
#: What is allocated once, by operators that no later step has.
_MADE_ONCE: Final = tuple(map(PURPOSES.index, ("parameter", "buffer", "optimizer_state")))
_SETUP, _INPUT, _FORWARD = map(PHASES.index, ("setup", "input", "forward"))
#: The phase of operators that are no part of a step: of an evaluation in the middle of it.
LEFT_OUT: Final = len(PHASES)
#: The longest period that is looked for, in steps.
_LONGEST_PERIOD: Final = 5

#: Columns that grow from one call for a token to the next.
_SIZES: Final = [COLUMNS.index(name) for name in KERNEL_SIZES]

CODES: Final = {name: code for code, name in enumerate(KINDS)}


@dataclasses.dataclass(frozen=True)
class Work:
    """Kernels in the order in which they were launched.

    ``table`` has a row a kernel and the columns of :data:`COLUMNS` (whole numbers; bytes, FLOPs,
    sizes); ``stream`` and ``op`` are each kernel's stream and operator, counted from the first
    of this work; ``op_phase`` the phase of every operator (index of ``recording.PHASES``, or
    :data:`LEFT_OUT`). It is that of so many ``steps``, whose mean stands for all. ``op_calls`` is
    how many alike each operator stands for, itself included (``None``: each for itself): sizes of
    its kernels are those of the one in the middle.
    """

    table: IntArray
    stream: IntArray
    op: IntArray
    op_phase: IntArray
    steps: int = 1
    op_calls: IntArray | None = None

    @classmethod
    def of_step(cls, recording: Recording, step: int, count: int = 1) -> Work:
        """What step ``step`` (from 0), or ``count`` of them, launched, without an evaluation among
        it; empty where the recording has no kernels."""
        ops = np.flatnonzero((recording.op_step >= step) & (recording.op_step < step + count))
        first, last = (int(ops[0]), int(ops[-1])) if len(ops) else (0, -1)
        evaluates = recording.in_evaluation()
        mine = (recording.kernel_op >= first) & (recording.kernel_op <= last)
        mine &= ~evaluates[np.maximum(recording.kernel_op, 0)] if len(evaluates) else mine
        table = np.stack([getattr(recording, f"kernel_{name}")[mine] for name in COLUMNS], axis=1)
        work = cls(
            table,
            recording.kernel_stream[mine],
            recording.kernel_op[mine] - first,
            np.where(evaluates, LEFT_OUT, recording.op_phase)[first : last + 1],
            count,
        )
        for call in recording.repeated():
            if first <= call.before and call.after <= last + 1:
                work = work._repeating(call, first)
        return work

    def _repeating(self, call: RepeatedCall, first: int) -> Work:
        """The work with what follows from a call in it; ``first`` is its first operator."""
        before, begin, after = (number - first for number in call[:3])
        calls = np.ones(len(self.op_phase), np.int64) if self.op_calls is None else self.op_calls
        calls = calls.copy()
        calls[begin:after] += call.more
        table = self.table.copy()
        now, then = (
            np.flatnonzero((self.op >= start) & (self.op < end))
            for start, end in ((begin, after), (before, begin))
        )
        alike = len(now) == len(then) and np.array_equal(table[now][:, 0], table[then][:, 0])
        if alike:
            growth = (table[now] - table[then])[:, _SIZES]
            table[np.ix_(now, np.array(_SIZES))] += np.rint(growth * (call.more / 2)).astype(
                np.int64
            )
        return dataclasses.replace(self, table=table, op_calls=calls)

    @classmethod
    def of_steady_step(cls, recording: Recording) -> Work:
        """What the step launches that stands for all others (:func:`simgpu.steady.steady_step`).

        Where steps repeat with a period of several, it is all of a period. Where the first is the
        only one, it comes without what is done once: the model's set-up, uploads of parameters, and
        making the optimizer's state.
        """
        period = period_of(recording)
        if period > 1:
            return cls.of_step(recording, recording.steps - period, period)
        step = steady(recording)
        work = cls.of_step(recording, step)
        return work if step else work.without(one_off(recording)[recording.op_step == 0])

    def without(self, ops: NDArray[np.bool_]) -> Work:
        """The work without the operators that ``ops`` (a value each) marks, and their kernels."""
        if len(ops) != len(self.op_phase) or not ops.any():
            return self
        kept = ~ops[self.op]
        number = np.cumsum(~ops) - 1
        return dataclasses.replace(
            self,
            table=self.table[kept],
            stream=self.stream[kept],
            op=number[self.op[kept]],
            op_phase=self.op_phase[~ops],
            op_calls=None if self.op_calls is None else self.op_calls[~ops],
        )

    def part(self, first: int, last: int) -> Work:
        """The kernels from number ``first`` on and before ``last``."""
        part = slice(first, last)
        return dataclasses.replace(
            self, table=self.table[part], stream=self.stream[part], op=self.op[part]
        )

    def column(self, name: str) -> IntArray:
        """One column of :data:`COLUMNS`."""
        return self.table[:, COLUMNS.index(name)]

    @property
    def calls(self) -> IntArray | int:
        """How many alike each kernel stands for."""
        return 1 if self.op_calls is None else self.op_calls[self.op]

    def is_kind(self, *names: str) -> NDArray[np.bool_]:
        """Which rows are of one of these kinds."""
        return among(names, KINDS)[self.column("kind")]


@functools.cache
def among(names: tuple[str, ...], known: tuple[str, ...]) -> NDArray[np.bool_]:
    """Whether each name of ``known`` is one of ``names``; to be indexed by a column of codes.

    A step's time asks dozens of times, in a quarter of the time of ``np.isin``.
    """
    assert set(names) <= set(known), names
    found = np.array([name in names for name in known])
    found.setflags(write=False)
    return found


def steady(recording: Recording) -> int:
    """The number (from 0) of the step that stands for all others; there must be one.

    Of a generated text that was continued it is the call in the middle of what was added.
    """
    if recording.simulated is not None:
        return int(recording.op_step[len(recording.simulated.op_name)])
    steps, trains = recording.steps, ~recording.in_evaluation()
    operators = _operators(recording)
    # Kernels before the first operator belong to the first step.
    op = np.maximum(recording.kernel_op, 0)
    step_of, trained = (recording.op_step[op], trains[op]) if len(trains) else ((), ())
    work = [
        np.bincount(step_of, weights=column * trained, minlength=steps)[:steps].tolist()
        for column in (
            recording.kernel_flops,
            recording.kernel_read + recording.kernel_written,
        )
    ]
    makeup = recording.makeup
    return steady_step(
        operators,
        list(zip(*work, strict=True)),
        makeup.per_step if makeup is not None else (),
        makeup.accumulation if makeup is not None else None,
        _replaying(recording),
    )


def period_of(recording: Recording) -> int:
    """Steps after which what a step does repeats, as far as operators tell; 1: each is alike, or
    no period shows.

    Something that a script does every few steps is in each of the last two periods then.
    """
    makeup = recording.makeup
    if recording.simulated is not None or _replaying(recording):
        return 1
    if makeup is not None and len(set(makeup.per_step[1:])) > 1:
        return 1  # of accumulation that varies, one step stands for all
    operators = _operators(recording)[1:]
    if len(set(operators)) < 2:
        return 1
    for period in range(2, _LONGEST_PERIOD + 1):
        if len(operators) >= 2 * period and operators[period:] == operators[:-period]:
            return period
    return 1


def _operators(recording: Recording) -> list[int]:
    """How many each step has, without those of evaluations."""
    steps, mine = recording.steps, recording.op_step[~recording.in_evaluation()]
    return list(map(int, np.bincount(mine, minlength=steps)[:steps]))


def _replaying(recording: Recording) -> frozenset[int]:
    """Steps that replay a CUDA graph: those before are its warm-up."""
    names = [number for number, name in enumerate(recording.strings) if name == REPLAY]
    return frozenset(recording.op_step[np.isin(recording.op_name, names)].tolist())


def one_off(recording: Recording) -> NDArray[np.bool_]:
    """Which operators do what no later step does, as far as the recording tells."""
    found: NDArray[np.bool_] = recording.op_phase == _SETUP
    called = np.flatnonzero(recording.op_phase == _FORWARD)
    if len(called):
        found[_of_loading(recording, int(called[0]))] = True
    else:  # no module was called: set-up has no end
        found = np.zeros_like(found)
    made = np.isin(recording.alloc_kind, _MADE_ONCE) & (recording.alloc_op >= 0)
    found[recording.alloc_op[made]] = True
    return found


def _of_loading(recording: Recording, called: int) -> IntArray:
    """Operators that copied to the GPU what is gone when a module is first called, by operator
    ``called``: weights that are quantized while they are loaded, and no batch."""
    codes, numbers = recording.events & 3, recording.events >> 2
    later = np.flatnonzero(
        (codes == MALLOC) & (recording.alloc_op[numbers * (codes == MALLOC)] >= called)
    )
    until = later[0] if len(later) else len(codes)
    freed = numbers[:until][codes[:until] == FREE]
    makers = recording.alloc_op[freed]
    makers = makers[makers >= 0]
    gone: IntArray = makers[recording.op_phase[makers] == _INPUT]
    return gone


# ---
# A step's kernels at every batch size, from recordings at two.
#
# Sizes, FLOPs and bytes of kernels are affine in the batch size, and which kernels there are does
# not depend on it (but for how many launches an operator over lists takes, which does not either).


#: Columns that are the same at every batch size.
_FIXED = [COLUMNS.index(name) for name in ("kind", "dtype", "launches")]


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
        """The law between steps at two different batch sizes.

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
