"""Tensors that a script cut off from what computed them, and those whose graph goes on for ever.

argmax, a comparison, a cast to whole numbers, ``.data`` and ``detach()`` give tensors without a
graph. They and what comes of them carry a mark, by which a term of a loss is known that trains
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

_MARK: Final = "_trainfit_cut"
#: What gives a tensor without a graph by its nature.
_NEVER: Final = {"grad"}
#: What is written where no graph is wanted.
_MEANT: Final = {"detach", "data"}


class Cut(NamedTuple):
    """Where a graph was cut, by which operator, and whether that was asked for: detach() of a
    single number, such as a term of a loss."""

    operator: str
    place: str | None
    is_meant: bool


def cut_of(tensor: torch.Tensor) -> Cut | None:
    """How a tensor came to have no graph, though it was computed of one that has."""
    return getattr(tensor, _MARK, None)


def follow(func: Any, args: Any, result: Any, place: Callable[[], str | None]) -> None:
    """Mark what a function of PyTorch gave, if it was cut off or computed of what was."""
    if not isinstance(result, torch.Tensor) or result.requires_grad:
        return
    for each in _tensors(args):
        known = cut_of(each)
        if known is not None:
            setattr(result, _MARK, known)
            return
        if each.requires_grad and torch.is_grad_enabled() and (name := _name(func)) not in _NEVER:
            setattr(result, _MARK, Cut(name, place(), name in _MEANT and not result.dim()))
            return


def _tensors(args: Any) -> list[torch.Tensor]:
    found = []
    for each in args:
        parts = each if isinstance(each, list | tuple) else (each,)
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    return found


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # of a property of tensors
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


# ---
# Graphs that go back to earlier steps.

_MADE: Final = "_trainfit_made"


def steps_back(args: Any, result: Any, now: int) -> int:
    """Through how many steps the graph of a result goes back, which is made in step ``now``: 1 for
    what is computed of a tensor of an earlier step, 2 if that was, in turn, and so on."""
    if not isinstance(result, torch.Tensor) or result.grad_fn is None:
        return 0
    back = 0
    for each in _tensors(args):
        if each.grad_fn is not None and (made := getattr(each, _MADE, None)) is not None:
            step, before = made
            back = max(back, before + (step < now))
    setattr(result, _MADE, (now, back))
    return back
