"""A recording with further allocations, operators, collectives and waits among its own.

Parameters that FSDP gathers together, and when a recorded run uses each group of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from trainfit.memory.affine import renumbered
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    IntArray,
    Parameter,
    Recording,
)
from trainfit.results.runs.steps import DTYPES
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS

_MARKS: Final = ("event", "event_wait")
_NONE: Final[Mapping[str, Any]] = {}
_FLOAT32: Final = DTYPES.index("float32")
#: Columns of a kernel that is none of the recorded ones, with what they are unless it says more.
_KERNEL: Final = {
    "kind": 0, "dtype": _FLOAT32, "flops": 0, "read": 0, "written": 0, "rows": 0, "columns": 0,
    "depth": 0, "batches": 1, "launches": 1, "op": 0, "stream": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Allocation:
    nbytes: int
    kind: int
    op: int
    module: int
    stream: int
    begins: int
    ends: int | None
    ranks: tuple[int, int]


class Rewriting:
    """Changes to ``recording``, all made at once by :meth:`done`.

    Places among events and kernels are those of the recording as it is: what is added comes before
    the one with that number, in the order in which it is added.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.alloc_bytes = recording.alloc_bytes.copy()
        self._added: list[_Allocation] = []
        self._kernels: list[tuple[int, dict[str, int]]] = []
        self._frees: dict[int, int] = {}
        #: Before which operator of the recording how many come, and whose phase they have.
        self._dispatched: list[tuple[int, int, int]] = []
        made = np.flatnonzero(recording.events % 4 == MALLOC)
        self._made = made
        self._op_of_made = np.maximum.accumulate(recording.alloc_op[recording.events[made] >> 2])
        marks = np.isin(recording.kernel_kind, [KERNEL_KINDS.index(name) for name in _MARKS])
        self._event = int(recording.kernel_rows[marks].max(initial=0))
        streams = recording.kernel_stream
        self._stream = max(int(streams.max(initial=0)), int(recording.alloc_stream.max(initial=0)))

    def stream(self) -> int:
        """One that nothing is on yet."""
        self._stream += 1
        return self._stream

    # -- memory ------------------------------------------------------------------------------------

    def before(self, op: int) -> int:
        """The place among the events before what operator ``op`` allocates."""
        return self._place(int(np.searchsorted(self._op_of_made, op, "left")))

    def after(self, op: int) -> int:
        """The place among the events behind what operator ``op`` allocates, and behind what is
        freed then."""
        return self._place(int(np.searchsorted(self._op_of_made, op, "right")))

    def _place(self, number: int) -> int:
        events = self.recording.events
        return int(self._made[number]) if number < len(self._made) else len(events)

    def allocate(
        self,
        nbytes: int,
        kind: str,
        like: tuple[int, int],
        begins: int,
        ends: int | None,
        stream: int = 0,
        ranks: tuple[int, int] = (3, 0),
    ) -> None:
        """Add an allocation from before event ``begins`` to before event ``ends`` (``None``: it
        stays); ``like`` are the operator and the module that it is of. Of what comes to one place,
        the lower of ``ranks`` (of its begin, and of its end) is first."""
        op, module = like
        self._added.append(
            _Allocation(nbytes, KINDS.index(kind), op, module, stream, begins, ends, ranks)
        )

    def freed(self, alloc: int) -> int | None:
        """The event with which a recorded allocation ends."""
        found = np.flatnonzero(self.recording.events == alloc * 4 + FREE)
        return int(found[0]) if len(found) else None

    def free(self, alloc: int, place: int) -> None:
        """A recorded allocation ends before event ``place``, with rank 2 there."""
        self._frees[alloc] = place

    # -- kernels -----------------------------------------------------------------------------------

    def launched_before(self, op: int) -> int:
        """The place among the kernels before those of operator ``op``."""
        return int(np.searchsorted(self.recording.kernel_op, op, "left"))

    def launched_after(self, op: int) -> int:
        """The place among the kernels behind those of operator ``op``."""
        return int(np.searchsorted(self.recording.kernel_op, op, "right"))

    def launch(self, place: int, op: int, kind: str, stream: int = 0, **columns: int) -> None:
        """A kernel of operator ``op``."""
        row = {**_KERNEL, **columns, "kind": KERNEL_KINDS.index(kind), "op": op, "stream": stream}
        self._kernels.append((place, row))

    def dispatch(self, op: int, count: int, *, before: bool = False) -> None:
        """The CPU dispatches so many operators behind operator ``op`` (or before it), of its phase
        and module. What is launched there in addition is theirs, one launch each."""
        self._dispatched.append((op if before else op + 1, count, op))

    def mark(self, place: int, op: int, stream: int = 0) -> tuple[int, int]:
        """An event on a stream; what :meth:`wait` is given."""
        self._event += 1
        self.launch(place, op, "event", stream, rows=self._event, launches=0)
        return self._event, stream

    def wait(self, place: int, op: int, event: tuple[int, int], stream: int = 0) -> None:
        """A stream waits for an event of another."""
        number, recorded_on = event
        columns = {"rows": number, "columns": recorded_on, "launches": 0}
        self.launch(place, op, "event_wait", stream, **columns)

    # -- the whole ---------------------------------------------------------------------------------

    def done(self, header: dict[str, Any], columns: Mapping[str, Any] = _NONE) -> Recording:
        """The recording with all changes; ``header`` and ``columns`` replace its own."""
        changed = dataclasses.replace(self.recording, **columns)
        new_alloc, fields = self._allocations(changed)
        number = self._numbers()
        fields |= self._launches(changed, number)
        found: dict[str, Any] = {**self.recording.header, **header}
        parameters = found.get("parameters")
        if parameters is not None:
            found["parameters"] = [[int(new_alloc[alloc]), *rest] for alloc, *rest in parameters]
        fields["workspace_alloc"] = new_alloc[self.recording.workspace_alloc]
        fields["header"] = found
        self._operators(changed, fields, found, number)
        return dataclasses.replace(changed, simulated=None, **fields)

    def _numbers(self) -> IntArray:
        """The new number of each operator."""
        # At one place those behind the operator before it come first.
        self._dispatched.sort(key=lambda each: (each[0], each[2]))
        ops = np.arange(len(self.recording.op_name) + 1)
        places = np.sort([place for place, count, _ in self._dispatched for _ in range(count)])
        return ops + np.searchsorted(places, ops, "right")

    def _operators(
        self, recording: Recording, fields: dict[str, Any], header: dict[str, Any], number: IntArray
    ) -> None:
        """Columns of operators with those that are added, and new numbers where operators are
        named."""
        rows = np.array(self._dispatched, dtype=np.int64).reshape(-1, 3)
        places, like = (np.repeat(rows[:, column], rows[:, 1]) for column in (0, 2))
        for name in ("op_name", "op_phase", "op_module", "op_step"):
            column = getattr(recording, name)
            fields[name] = np.insert(column, places, column[like])
        made = fields["alloc_op"]
        fields["alloc_op"] = np.where(made < 0, made, number[np.maximum(made, 0)])
        evaluations = header.get("evaluations") or ()
        if evaluations:
            header["evaluations"] = [
                [int(number[end]) for end in evaluation] for evaluation in evaluations
            ]
        if repeated := header.get("repeated"):
            header["repeated"] = [
                [*(int(number[end]) for end in each[:3]), each[3]] for each in repeated
            ]

    def _allocations(self, recording: Recording) -> tuple[IntArray, dict[str, Any]]:
        """The new number of each allocation, and the columns that change by it."""
        count = len(recording.alloc_bytes)
        added = [(place, 2, alloc * 4 + FREE) for alloc, place in self._frees.items()]
        for number, allocation in enumerate(self._added, count):
            added.append((allocation.begins, allocation.ranks[0], number * 4 + MALLOC))
            if allocation.ends is not None:
                added.append((allocation.ends, allocation.ranks[1], number * 4 + FREE))
        events = recording.events
        kept = np.flatnonzero(~np.isin(events, [alloc * 4 + FREE for alloc in self._frees]))
        rows = np.array(added, dtype=np.int64).reshape(-1, 3)
        places, ranks, values = (rows[:, column] for column in range(3))
        last = np.full(len(kept), 1 + int(ranks.max(initial=0)))
        order = np.lexsort((np.append(ranks, last), np.append(places, kept)))
        events = np.append(values, events[kept])[order]
        made = events[events % 4 == MALLOC] >> 2
        new_alloc = np.zeros(count + len(self._added), dtype=np.int64)
        new_alloc[made] = np.arange(len(made))
        fields: dict[str, Any] = {"events": renumbered(events, new_alloc)}
        for name, own, values_of_added in (
            ("alloc_bytes", self.alloc_bytes, [each.nbytes for each in self._added]),
            ("alloc_op", recording.alloc_op, [each.op for each in self._added]),
            ("alloc_kind", recording.alloc_kind, [each.kind for each in self._added]),
            ("alloc_module", recording.alloc_module, [each.module for each in self._added]),
            ("alloc_stream", recording.alloc_stream, [each.stream for each in self._added]),
            ("alloc_line", recording.alloc_line, [-1] * len(self._added)),
        ):
            column = np.concatenate([own, np.array(values_of_added, dtype=np.int64)])
            fields[name] = column[made]
        return new_alloc, fields

    def _launches(self, recording: Recording, number: IntArray) -> dict[str, Any]:
        added = self._added_kernels(number)
        places = [place for place, _ in added]
        own = recording.kernel_op
        renumbered = np.where(own < 0, own, number[np.maximum(own, 0)])
        recording = dataclasses.replace(recording, kernel_op=renumbered)
        return {
            f"kernel_{name}": np.insert(
                getattr(recording, f"kernel_{name}"), places, [row[name] for _, row in added]
            )
            for name in _KERNEL
        }

    def _added_kernels(self, number: IntArray) -> list[tuple[int, dict[str, int]]]:
        """The kernels that are added, each of a dispatched operator where there is one, else of the
        one that it was added to."""
        counts, used = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for place, count, op in self._dispatched:
            counts[op, place] += count
        kernels = []
        for at, row in self._kernels:
            op = row["op"]
            before = counts[op, op] and at <= self.launched_before(op)
            key = op, (op if before else op + 1)
            if not counts[key]:
                kernels.append((at, row | {"op": int(number[op])}))
                continue
            # The first of those that come there.
            first = int(number[op]) - counts[key] if before else int(number[op]) + 1
            mine = first + min(used[key], counts[key] - 1)
            used[key] += row["launches"]
            kernels.append((at, row | {"op": mine}))
        return kernels


_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_GRADIENT = KINDS.index("gradient")


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A parameter in equal parts of its first dimension, as ``fully_shard`` has them: the last
    rank's may be padded."""

    alloc: int
    nbytes: int
    shard_bytes: int
    trained: bool
    module: int

    @classmethod
    def of(cls, parameter: Parameter, recording: Recording, ranks: int) -> Sharded:
        nbytes = int(recording.alloc_bytes[parameter.alloc])
        rows = parameter.shape[0] if parameter.shape else 1
        shard = -(-rows // ranks) * (nbytes // rows) if rows else 0
        module = int(recording.alloc_module[parameter.alloc])
        return cls(parameter.alloc, nbytes, shard, parameter.trained, module)


@dataclasses.dataclass(frozen=True)
class Use:
    """Operators ``first`` to ``last``, in one pass, that need the parameters of a unit."""

    unit: int
    backward: bool
    first: int
    last: int
    micro_batch: int


def parameters_of(recording: Recording, ranks: int) -> tuple[Sharded, ...]:
    """Each allocation of parameters once; none where they were not recorded."""
    found = {parameter.alloc: parameter for parameter in recording.parameters() or ()}
    return tuple(Sharded.of(each, recording, ranks) for each in found.values())


def units_of(recording: Recording, parameters: Sequence[Sharded]) -> list[list[Sharded]]:
    """Parameters by the element of a list of modules that they are in (``layers.0``), as
    tutorials shard them. The first unit has the rest: the root's."""
    name = _unit_name(recording, parameters)
    groups: dict[str, list[Sharded]] = {"": []}
    for parameter in parameters:
        groups.setdefault(name(parameter.module), []).append(parameter)
    return list(groups.values())


def uses_of(recording: Recording, parameters: Sequence[Sharded]) -> list[Use]:
    """When each unit but the root is needed, in the order of operators."""
    name = _unit_name(recording, parameters)
    numbers: dict[str, int] = {"": 0}
    for parameter in parameters:
        numbers.setdefault(name(parameter.module), len(numbers))
    modules = recording.op_module.tolist()
    unit = np.array([numbers.get(name(module), 0) for module in modules], dtype=np.int64)
    batches, phases = micro_batches(recording), recording.op_phase
    rows = np.flatnonzero((unit > 0) & (batches >= 0))
    keys = np.stack([batches[rows], phases[rows], unit[rows]])
    starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    ends = np.append(starts[1:], len(rows)) - 1
    return [
        Use(
            int(unit[rows[start]]),
            bool(phases[rows[start]] == _BACKWARD),
            int(rows[start]),
            int(rows[end]),
            int(batches[rows[start]]),
        )
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if len(rows)
    ]


def micro_batches(recording: Recording) -> IntArray:
    """The number of each operator's forward and backward pass; -1: it is of none."""
    phases = recording.op_phase
    passes = np.flatnonzero(np.isin(phases, (_FORWARD, _BACKWARD)))
    batches = np.full(len(phases), -1, dtype=np.int64)
    backward, step = phases[passes] == _BACKWARD, recording.op_step[passes]
    begins = (backward[:-1] & ~backward[1:]) | (step[:-1] != step[1:])
    batches[passes] = np.cumsum(np.append(0, begins)) if len(passes) else 0
    return batches


def gradients_of(recording: Recording) -> IntArray:
    """The allocations that are gradients, made in a backward pass."""
    op = recording.alloc_op
    backward = (op >= 0) & (recording.op_phase[np.maximum(op, 0)] == _BACKWARD)
    return np.flatnonzero((recording.alloc_kind == _GRADIENT) & backward)


def _unit_name(recording: Recording, parameters: Sequence[Sharded]) -> Callable[[int], str]:
    lists: dict[str, set[str]] = defaultdict(set)
    for parameter in parameters:
        for prefix in _elements(_path(recording, parameter.module)):
            lists[prefix.rpartition(".")[0]].add(prefix)
    sizes = {name: len(members) for name, members in lists.items() if len(members) > 1}
    return functools.lru_cache(None)(functools.partial(_name, recording, sizes))


def _name(recording: Recording, sizes: dict[str, int], module: int) -> str:
    """The path of the longest list's element that a module is in; "": it is in none."""
    found = [
        prefix
        for prefix in _elements(_path(recording, module))
        if prefix.rpartition(".")[0] in sizes
    ]
    return max(found, key=lambda prefix: sizes[prefix.rpartition(".")[0]], default="")


def _path(recording: Recording, module: int) -> str:
    return recording.strings[module] if module >= 0 else ""


def _elements(path: str) -> list[str]:
    """The beginnings of a path that end in a number."""
    parts = path.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()]
