"""Abstract values of expressions: the lattice and its facts.

A value is described only where the reading is certain; everything else is :data:`UNKNOWN`, about
which no rule says anything.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Final, Literal

Kind = Literal[
    "unknown",
    "module",  # an nn.Module: a network, a layer or a loss
    "optimizer",
    "scheduler",
    "scaler",
    "loader",  # a DataLoader; iterating it gives a batch
    "dataset",
    "batch",  # what a loader gives: a tensor or a structure of tensors
    "output",  # what a module gives: a tensor or a structure of tensors
    "tensor",
    "array",  # NumPy's
    "number",
    "text",
    "device",  # a torch.device, or its name
    "tuple",
    "list",
    "function",
]
Place = Literal["", "host", "device"]


@dataclasses.dataclass(frozen=True)
class Value:
    """``graph``: it certainly holds an autograd graph; ``place``: where its memory is, if known.

    ``items`` are a tuple's or list's; ``loaders`` the DataLoader calls that a loader or batch is
    certainly from, all of them; ``call`` is the expression that made a data set or module.
    """

    kind: Kind = "unknown"
    graph: bool = False
    place: Place = ""
    items: tuple[Value, ...] = ()
    loaders: frozenset[ast.Call] = frozenset()
    call: ast.AST | None = None

    @property
    def is_unknown(self) -> bool:
        """Is nothing certain?"""
        return self.kind == "unknown" and not self.place

    @property
    def is_tensors(self) -> bool:
        """Is it a tensor or a structure of tensors?"""
        return self.kind in {"tensor", "output", "batch"}


UNKNOWN: Final = Value()
NUMBER: Final = Value("number")
#: Deeper nested tuples and lists are not followed.
_DEPTH: Final = 4


def joined(one: Value, other: Value, depth: int = 0) -> Value:
    """What is certain of a value that is one or the other."""
    if one is other or one == other:
        return one
    if one.kind != other.kind:
        if one.is_tensors and other.is_tensors:
            return dataclasses.replace(_both(one, other), kind="output")
        return Value(place=one.place if one.place == other.place else "")
    items: tuple[Value, ...] = ()
    if depth < _DEPTH and len(one.items) == len(other.items):
        items = tuple(joined(a, b, depth + 1) for a, b in zip(one.items, other.items, strict=True))
    return dataclasses.replace(_both(one, other), items=items)


def join_all(values: Iterable[Value]) -> Value:
    """What is certain of a value that is any of these; nothing is certain of none."""
    result: Value | None = None
    for value in values:
        result = value if result is None else joined(result, value)
    return UNKNOWN if result is None else result


def element(value: Value) -> Value:
    """What iterating over or indexing a value gives."""
    if value.kind == "loader":
        return Value("batch", place="host", loaders=value.loaders)
    if value.is_tensors:
        return value
    if value.kind in {"list", "tuple"}:
        return join_all(value.items)
    return UNKNOWN


def unpacked(value: Value, count: int) -> list[Value]:
    """The parts of a value that is assigned to ``count`` targets."""
    if value.kind == "tuple" and len(value.items) == count:
        return list(value.items)
    return [element(value)] * count


def shallow(value: Value, depth: int = 0) -> Value:
    """A value whose nesting is cut, so that wrapping it again in every pass of a loop ends."""
    if not value.items:
        return value
    if depth >= _DEPTH or len(value.items) > 64:
        return dataclasses.replace(value, items=())
    return dataclasses.replace(value, items=tuple(shallow(each, depth + 1) for each in value.items))


def _both(one: Value, other: Value) -> Value:
    loaders = one.loaders | other.loaders if one.loaders and other.loaders else frozenset()
    return Value(
        one.kind,
        one.graph and other.graph,
        one.place if one.place == other.place else "",
        (),
        loaders,
        one.call if one.call is other.call else None,
    )
