"""Containers of layers that have one and the same layer several times: ``[Block()] * 6``.

That is told where each passes its result on to the next, as layers of a stack do. One head for the
results of several layers is meant to be one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainfit.torch_private.autograd import only_operand, operands, walk

#: Containers that are known at most.
_MOST: Final = 32


class Repeated(NamedTuple):
    """A layer that a container has several times: its class, how often, the line that made the
    container."""

    layer: weakref.ref[torch.nn.Module]
    name: str
    times: int
    place: str | None


def repeated(layers: Any, place: Callable[[], str | None]) -> Repeated | None:
    """The layer with parameters that is there more than once, if one is."""
    if not isinstance(layers, Sequence):
        return None
    counts: dict[int, int] = defaultdict(int)
    for each in layers:
        counts[id(each)] += 1
    for each in layers:
        if counts[id(each)] < 2 or not isinstance(each, torch.nn.Module):
            continue
        if any(True for _ in each.parameters()):
            found = weakref.ref(each), type(each).__name__
            return Repeated(*found, counts[id(each)], place())
    return None


class Repeats:
    """The containers of repeated layers that were made, until one is seen in a graph, one after
    another."""

    def __init__(self) -> None:
        self._made: list[Repeated] = []

    def made(self, layers: Any, place: Callable[[], str | None]) -> None:
        """A container of ``layers`` is about to be made."""
        if len(self._made) < _MOST and (found := repeated(layers, place)) is not None:
            self._made.append(found)

    def __bool__(self) -> bool:
        return bool(self._made)

    def stacked(self, nodes: Iterable[Any]) -> Repeated | None:
        """The first whose layer goes on with what it gave itself, in the graph of these
        ``nodes``."""
        known = list(nodes)
        users, leaves = _users(known), _leaves(known)
        for each in self._made:
            layer = each.layer()
            parameters = [] if layer is None else list(layer.parameters())
            for parameter in parameters:
                leaf = leaves.get(id(parameter))
                if leaf is not None and _follow_each_other(_calls(leaf, users)):
                    return each
        return None


def _users(nodes: Iterable[Any]) -> Mapping[Any, list[Any]]:
    """The nodes of a graph that use each of them."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for node in nodes:
        for each in operands(node):
            found[each].append(node)
    return found


def _leaves(nodes: Iterable[Any]) -> dict[int, Any]:
    return {id(node.variable): node for node in nodes if hasattr(node, "variable")}


def _calls(leaf: Any, users: Mapping[Any, list[Any]]) -> set[Any]:
    """The nodes that compute with a parameter: those after its transposes and casts."""
    found, waiting = set(), list(users.get(leaf, ()))
    while waiting:
        node = waiting.pop()
        if only_operand(node) is not None:
            waiting += users.get(node, ())
        else:
            found.add(node)
    return found


def _follow_each_other(calls: Collection[Any]) -> bool:
    """Is one of them computed of another?"""
    if len(calls) < 2:
        return False
    operands_of_calls = [each for node in calls for each in operands(node)]
    return any(node in calls for node in walk(*operands_of_calls))
