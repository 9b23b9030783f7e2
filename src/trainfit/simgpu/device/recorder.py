"""Collects what the simulated device does, column by column."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Container
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trainfit.results.runs.recording import (
    DONE,
    EMPTY_CACHE,
    FREE,
    KINDS,
    MALLOC,
    OTHER,
    PHASES,
    STEP_END,
    USED,
    IntArray,
    Recording,
    RecordingHeader,
)
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.device.settling import StepUse, step_uses

SETUP, INPUT, FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
#: The name of a CUDA graph's replay among the operators.
REPLAY = "cuda_graph.replay"
_COLUMNS = (
    "op_name", "op_phase", "op_module", "op_step", "alloc_bytes", "alloc_op", "alloc_stream",
    "alloc_line", "events", "workspace_alloc", "workspace_model", "workspace_start",
    "workspace_args", "kernel_op", "kernel_stream",
)  # fmt: skip
_KERNEL_ROW = (
    "kernel_kind", "kernel_dtype", "kernel_flops", "kernel_read", "kernel_written", "kernel_rows",
    "kernel_columns", "kernel_depth", "kernel_batches", "kernel_launches",
)  # fmt: skip
#: Of a kernel, in addition to its operator and stream: what the columns of _KERNEL_ROW get.
KernelRow = tuple[int, int, int, int, int, int, int, int, int, int]
_KIND = {name: code for code, name in enumerate(KINDS)}
#: Steps through which what a script made before them is there, if it is data.
_STEPS_OF_DATA = 2


class RecordingBuilder:
    """Append-only columns; :meth:`finish` turns them into a :class:`Recording`."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._op_name, self._op_phase = array("q"), array("q")
        self._op_module, self._op_step = array("q"), array("q")
        self._alloc_bytes, self._alloc_op = array("q"), array("q")
        self._alloc_stream, self._alloc_line = array("q"), array("q")
        self._events = array("q")
        self._workspace_alloc, self._workspace_model = array("q"), array("q")
        self._workspace_start, self._workspace_args = array("q", [0]), array("q")
        self._kernel_op, self._kernel_stream = array("q"), array("q")
        self._kernel_table: list[KernelRow] = []
        self._marked: dict[int, tuple[int, int]] = {}
        self._alike: dict[int, int] = {}
        self.step = 0

    def string(self, text: str) -> int:
        """The index of ``text`` in the string table."""
        return self._strings.setdefault(text, len(self._strings))

    def text(self, index: int) -> str:
        """The string at ``index`` of the table."""
        return next(itertools.islice(self._strings, index, None))

    def op(self, name: int, phase: int, module: int) -> None:
        """One operator ran; ``name`` and ``module`` are indices of :meth:`string`."""
        self._op_name.append(name)
        self._op_phase.append(phase)
        self._op_module.append(module)
        self._op_step.append(self.step)

    @property
    def op_count(self) -> int:
        return len(self._op_name)

    @property
    def alloc_count(self) -> int:
        return len(self._alloc_bytes)

    def since(self, op: int, alloc: int) -> tuple[int, IntArray, IntArray]:
        """Operators since number ``op``; bytes and operators of allocations since ``alloc``."""
        return (
            len(self._op_name) - op,
            np.array(self._alloc_bytes[alloc:], dtype=np.int64),
            np.array(self._alloc_op[alloc:], dtype=np.int64),
        )

    @property
    def kernel_count(self) -> int:
        return len(self._kernel_table)

    def launched(self, ops: slice, kernels: slice) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """A row for each of these kernels (:data:`KernelRow`), their streams, their operators; and
        the phases of these operators."""
        rows = np.array(self._kernel_table[kernels], dtype=np.int64)
        return (
            rows.reshape(-1, len(_KERNEL_ROW)),
            np.array(self._kernel_stream[kernels], dtype=np.int64),
            np.array(self._kernel_op[kernels], dtype=np.int64),
            np.array(self._op_phase[ops], dtype=np.int64),
        )

    def malloc(self, nbytes: int, stream: int, line: int = -1) -> int:
        """An allocation by the latest operator; returns its number.

        ``line`` is the index of "file:line" of the user's code, -1 if there is none.
        """
        number = len(self._alloc_bytes)
        self._alloc_bytes.append(nbytes)
        self._alloc_op.append(len(self._op_name) - 1)
        self._alloc_stream.append(stream)
        self._alloc_line.append(line)
        self._events.append(number * 4 + MALLOC)
        return number

    @property
    def event_count(self) -> int:
        return len(self._events)

    def events(self, first: int, after: int) -> list[tuple[int, int]]:
        """Allocations and frees from event number ``first`` on: each as a code (``MALLOC``,
        ``FREE``, …) and the number that goes with it."""
        return [(value % 4, value // 4) for value in self._events[first:after]]

    def requested(self, number: int) -> tuple[int, int]:
        """Bytes and stream of an allocation."""
        return self._alloc_bytes[number], self._alloc_stream[number]

    def malloc_like(self, number: int) -> int:
        """An allocation by the latest operator, for the same as ``number``; returns its number."""
        made = self.malloc(*self.requested(number), self._alloc_line[number])
        self._alike[made] = number
        index = bisect.bisect_left(self._workspace_alloc, number)
        if index < len(self._workspace_alloc) and self._workspace_alloc[index] == number:
            first, after = self._workspace_start[index : index + 2]
            model, arguments = self._workspace_model[index], self._workspace_args[first:after]
            self.workspace(made, model, tuple(arguments))
        return made

    def phase_of(self, number: int) -> int:
        """The phase of the operator that made an allocation."""
        op = self._alloc_op[number]
        return self._op_phase[op] if op >= 0 else SETUP

    def free(self, number: int) -> None:
        self._events.append(number * 4 + FREE)

    def used(self, number: int) -> None:
        """A stream other than its own uses allocation ``number``."""
        self._events.append((number * 2 + USED) * 4 + OTHER)

    def done(self, number: int) -> None:
        """The other streams are done with allocation ``number``, which was freed before."""
        self._events.append((number * 2 + DONE) * 4 + OTHER)

    def workspace(self, number: int, model: int, arguments: tuple[int, ...]) -> None:
        """Allocation ``number`` is a workspace whose size a model computes."""
        self._workspace_alloc.append(number)
        self._workspace_model.append(model)
        self._workspace_args.extend(arguments)
        self._workspace_start.append(len(self._workspace_args))

    def kernel(self, row: KernelRow, stream: int) -> None:
        """The latest operator launches a kernel on ``stream``."""
        self._kernel_op.append(len(self._op_name) - 1)
        self._kernel_stream.append(stream)
        self._kernel_table.append(row)

    def mark(self, number: int, kind: str, module: int = -1) -> None:
        """Say what allocation ``number`` is for, and whose; the first statement counts.

        A module that was not known at first (-1) may be said later.
        """
        known = self._marked.get(number)
        if known is None:
            self._marked[number] = (_KIND[kind], module)
        elif known[1] < 0 <= module:
            self._marked[number] = (known[0], module)

    def is_for(self, number: int, kinds: Container[str]) -> bool:
        """Was allocation ``number`` said to be for one of ``kinds`` so far?"""
        known = self._marked.get(number)
        return known is not None and KINDS[known[0]] in kinds

    def step_end(self) -> None:
        self._events.append(self.step * 4 + STEP_END)
        self.step += 1

    def empty_cache(self) -> None:
        self._events.append(EMPTY_CACHE * 4 + OTHER)

    def step_uses(self) -> list[StepUse]:
        """What the steps completed so far took."""
        columns = (np.array(each, dtype=np.int64) for each in (self._events, self._alloc_bytes))
        return step_uses(*columns)

    def finish(self, header: RecordingHeader) -> Recording:
        """The recording so far; may be called while the run goes on."""
        columns: dict[str, Any] = {
            name: np.array(getattr(self, f"_{name}"), dtype=np.int64) for name in _COLUMNS
        }
        table = np.array(self._kernel_table, dtype=np.int64).reshape(-1, len(_KERNEL_ROW))
        columns |= dict(zip(_KERNEL_ROW, np.ascontiguousarray(table.T), strict=True))
        kinds = self._kinds(columns["alloc_op"], columns["op_phase"], columns["events"])
        kinds[columns["workspace_alloc"]] = _KIND["workspace"]
        owners = self._owners(columns["alloc_op"], columns["op_module"])
        # What stands for others is for what they were, and of their modules.
        alike = np.array(list(self._alike.items()), dtype=np.int64).reshape(-1, 2)
        for column in (kinds, owners):
            column[alike[:, 0]] = column[alike[:, 1]]
        return Recording(
            header=header,
            strings=tuple(self._strings),
            alloc_kind=kinds,
            alloc_module=owners,
            **columns,
        )

    def _owners(self, alloc_op: IntArray, op_module: IntArray) -> IntArray:
        """Module of each allocation: as marked, else its operator's; -1 for none."""
        owners = np.full(len(alloc_op), -1, dtype=np.int64)
        by_operator = alloc_op >= 0
        owners[by_operator] = op_module[alloc_op[by_operator]]
        for number, (_, module) in self._marked.items():
            if module >= 0:
                owners[number] = module
        return owners

    def _kinds(self, alloc_op: IntArray, op_phase: IntArray, events: IntArray) -> IntArray:
        """What each allocation is for: as marked, else from its birth and death.

        Born in the forward pass and alive when the backward pass begins: an activation.
        Born and dead within the forward pass, or born later: a temporary.
        """
        count = len(alloc_op)
        kinds = np.full(count, _KIND["temporary"], dtype=np.int64)
        if count == 0:
            return kinds
        phase = np.where(alloc_op >= 0, op_phase[np.maximum(alloc_op, 0)], SETUP)
        until = self._operator_at_death(events, alloc_op, count)
        outlives = until >= self._next_backward(op_phase)[np.maximum(alloc_op, 0)]
        kinds[(phase == FORWARD) & (outlives | (until < 0))] = _KIND["activation"]
        if (
            not self.step
        ):  # what the first step of an optimizer has made by now is marked at its end
            kinds[(phase == OPTIMIZER) & (until < 0)] = _KIND["optimizer_state"]
        kinds[phase == INPUT] = _KIND["input"]
        kinds[self._is_data(phase, alloc_op, until, op_phase)] = _KIND["data"]
        for number, (kind, _) in self._marked.items():
            kinds[number] = kind
        return kinds

    def _is_data(
        self, phase: IntArray, alloc_op: IntArray, until: IntArray, op_phase: IntArray
    ) -> npt.NDArray[np.bool_]:
        """Made before any layer ran, and there all through the first two steps."""
        forward = np.flatnonzero(op_phase == FORWARD)[:1]
        if self.step < _STEPS_OF_DATA or not len(forward):
            return np.zeros(len(phase), dtype=bool)
        lasts = (until < 0) | (np.array(self._op_step)[until] >= _STEPS_OF_DATA)
        is_early = (alloc_op < forward[0]) & np.isin(phase, (SETUP, INPUT))
        found: npt.NDArray[np.bool_] = is_early & lasts
        return found

    @staticmethod
    def _operator_at_death(events: IntArray, alloc_op: IntArray, count: int) -> IntArray:
        """Operator of the latest allocation before each free; -1 for what stays alive."""
        values, codes = events // 4, events % 4
        latest = np.maximum.accumulate(np.where(codes == MALLOC, values, -1))
        until = np.full(count, -1, dtype=np.int64)
        freed = codes == FREE
        until[values[freed]] = np.maximum(alloc_op[np.maximum(latest[freed], 0)], 0)
        return until

    @staticmethod
    def _next_backward(op_phase: IntArray) -> IntArray:
        """The first operator of a backward pass from each operator on."""
        count = len(op_phase)
        if count == 0:
            return np.zeros(1, dtype=np.int64)
        places = np.where(op_phase == BACKWARD, np.arange(count), count)
        return np.minimum.accumulate(places[::-1])[::-1]


# ---
# Failure-tolerant accounting: counting a run's work never stops the run.
#
# FLOPs, kernels, bytes, libraries, workspaces and known values are worked out alongside an operator
# whose result is there already. A formula that does not know the operator's current signature must
# not raise in the user's script: the operator is listed once among the notes instead, with how
# often its cost is unknown.


_T = TypeVar("_T")


class Accounting:
    """Attempts what counts; ``notes`` (text → how often) receives what failed.

    Attributes: ``errors``, by operator, is the first exception of each, for who looks into it.
    """

    def __init__(self, notes: dict[str, int]) -> None:
        self._notes = notes
        self.errors: dict[str, Exception] = {}

    def attempt(self, operator: Any, function: Callable[..., _T], *args: Any) -> _T | None:
        """``function(*args)``, or ``None`` where it failed and was noted down.

        Running out of the device's memory is no failure to count: it is raised.
        """
        try:
            return function(*args)
        except OutOfDeviceMemory:
            raise
        except Exception as error:
            name = str(operator).removesuffix(".default")
            self.errors.setdefault(name, error)
            text = f"unknown cost: {name}"
            self._notes[text] = self._notes.get(text, 0) + 1
            return None
