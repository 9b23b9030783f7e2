"""Tensors that each step computes of the one before, with its graph: a hidden state that is never
detached. A backward pass then goes through all steps."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Final

from trainfit.torch_private.autograd import operands

#: Where the node of a tensor is marked.
_CARRIED: Final = "trainfit_carried"
#: Looks of which all nodes must be alive for the graph to be gone through, and nodes of that way.
_LOOKS: Final = 4
_MOST_NODES: Final = 1 << 13


class _Carried:
    """Lives as long as the node that has it."""


class CarriedGraphs:
    """Follows tensors by name: are the graphs of their earlier values alive, and part of that of
    the present one?"""

    def __init__(self) -> None:
        self._marks: dict[Hashable, list[tuple[int, weakref.ref[_Carried]]]] = {}
        self._known: set[Hashable] = set()

    def looks(self, name: Hashable, node: Any, step: int) -> list[int]:
        """The steps of looks through which the graph of a tensor goes back, ``step`` the last of
        them; none: it ends with its own, or that was not seen for long enough. ``node`` is its
        ``grad_fn``."""
        marks = self._marks.setdefault(name, [])
        mark = node.metadata.setdefault(_CARRIED, _Carried())
        if marks and marks[-1][1]() is mark:
            return []  # it was computed once
        if any(ref() is None for _, ref in marks):
            marks.clear()
            self._known.discard(name)
        marks.append((step, weakref.ref(mark)))
        if len(marks) < _LOOKS:
            return []
        if name not in self._known:
            if not _reaches(node, marks[-2][1]()):
                return []  # something else keeps them: a list of results
            self._known.add(name)
        return [each for each, _ in marks]


def _reaches(node: Any, mark: _Carried | None) -> bool:
    """Is a marked node one of those that this one is computed of?"""
    visited, left = {node}, [node]
    while left and len(visited) < _MOST_NODES:
        for operand in operands(left.pop()):
            if operand not in visited:
                if mark is not None and operand.metadata.get(_CARRIED) is mark:
                    return True
                visited.add(operand)
                left.append(operand)
    return False
