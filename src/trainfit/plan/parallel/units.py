"""Parameters that FSDP gathers together, and when a recorded run uses each group of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Parameter, Recording

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
    found = {each.alloc: each for each in recording.parameters() or ()}
    return tuple(Sharded.of(each, recording, ranks) for each in found.values())


def units_of(recording: Recording, parameters: Sequence[Sharded]) -> list[list[Sharded]]:
    """Parameters by the element of a list of modules that they are in (``layers.0``), as
    tutorials shard them. The first unit has the rest: the root's."""
    name = _unit_name(recording, parameters)
    groups: dict[str, list[Sharded]] = {"": []}
    for each in parameters:
        groups.setdefault(name(each.module), []).append(each)
    return list(groups.values())


def uses_of(recording: Recording, parameters: Sequence[Sharded]) -> list[Use]:
    """When each unit but the root is needed, in the order of operators."""
    name = _unit_name(recording, parameters)
    numbers: dict[str, int] = {"": 0}
    for each in parameters:
        numbers.setdefault(name(each.module), len(numbers))
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
    found = np.full(len(phases), -1, dtype=np.int64)
    backward, step = phases[passes] == _BACKWARD, recording.op_step[passes]
    begins = (backward[:-1] & ~backward[1:]) | (step[:-1] != step[1:])
    found[passes] = np.cumsum(np.append(0, begins)) if len(passes) else 0
    return found


def gradients_of(recording: Recording) -> IntArray:
    """The allocations that are gradients, made in a backward pass."""
    op = recording.alloc_op
    backward = (op >= 0) & (recording.op_phase[np.maximum(op, 0)] == _BACKWARD)
    return np.flatnonzero((recording.alloc_kind == _GRADIENT) & backward)


def _unit_name(recording: Recording, parameters: Sequence[Sharded]) -> Callable[[int], str]:
    lists: dict[str, set[str]] = defaultdict(set)
    for each in parameters:
        for prefix in _elements(_path(recording, each.module)):
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
    return [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()]
