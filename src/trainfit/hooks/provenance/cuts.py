"""Tensors that a script cut off from what computed them, and those whose graph goes on for ever.

argmax, a comparison, a cast to whole numbers, ``.data`` and ``detach()`` give tensors without a
graph. They and what comes of them carry a mark, by which a term of a loss is known that trains
nothing. And what all rooms here do alike: marks of tensors, notes of what was seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from trainfit.hooks.losses import VIEWS, shape_of
from trainfit.results.runs.learning import CUT_OFF, Misuse
from trainfit.torch_private.autograd import nodes_of, operands, parameters_of, walk
from trainfit.torch_private.operators import version

#: What gives a tensor without a graph by its nature.
_NEVER: Final = {"grad"}
#: Where a node keeps what was cut off from a term that it adds; it goes with the node.
OF_TERM: Final = "trainfit_cut"
#: Nodes of a loss that pass its terms on.
_TERMS: Final = ("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", *VIEWS, "Squeeze", "ToCopy")
_MOST_TERMS: Final = 100
#: Lines that cut a graph off, and parameters behind one, that are remembered.
_LINES: Final = 4
_BEHIND: Final = 64
#: Times that a parameter is copied, which no epoch's copy is.
_COPIES: Final = 2
#: What is written where no graph is wanted.
_MEANT: Final = {"detach", "data"}
_T = TypeVar("_T")


class Cut(NamedTuple):
    """The line at which a graph was cut, by which operator, and whether that was asked for:
    detach() of a single number, such as a term of a loss."""

    operator: str
    place: str | None
    is_meant: bool


class Marks(Generic[_T]):
    """What is known of tensors, as long as they live. The tensors have nothing of it: a script may
    save or copy them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], _T]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def of(self, tensor: torch.Tensor) -> _T | None:
        """What a tensor was marked with."""
        reference, mark = self._known.get(id(tensor), (None, None))
        return mark if reference is not None and reference() is tensor else None

    def put(self, tensor: torch.Tensor, mark: _T) -> None:
        """Mark a tensor."""
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), mark


class NumberMarks(Generic[_T]):
    """What is known of tensors' numbers: it holds until somebody changes them."""

    def __init__(self) -> None:
        self._marks: Marks[tuple[_T, int]] = Marks()

    def __bool__(self) -> bool:
        return bool(self._marks)

    def of(self, tensor: torch.Tensor) -> _T | None:
        """What a tensor was marked with, if its numbers are those of then."""
        known = self._marks.of(tensor)
        return known[0] if known is not None and known[1] == version(tensor) else None

    def put(self, tensor: torch.Tensor, mark: _T) -> None:
        """Mark a tensor, with the numbers that it has now."""
        self._marks.put(tensor, (mark, version(tensor)))


class FirstOfKind:
    """Notes what is seen, the first of each kind; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._found: dict[str, Misuse] = {}

    def found(self) -> tuple[Misuse, ...]:
        """What was seen, the first of each kind."""
        return tuple(self._found.values())

    def _note(self, kind: str, *told: object, place: str | None = None) -> None:
        if kind not in self._found:
            at = self._place() if place is None else place
            self._found[kind] = Misuse.of(kind, *told, place=at)


def follow(
    cuts: Marks[Cut],
    func: Any,
    given: Sequence[torch.Tensor],
    result: torch.Tensor,
    place: Callable[[], str | None],
    lost: Lost,
) -> None:
    """Mark what a function of PyTorch gave, if it was cut off or computed of what was."""
    if result.requires_grad:
        return
    for tensor in given:
        known = cuts.of(tensor)
        if known is not None:
            cuts.put(result, known)
            return
        if (
            tensor.requires_grad
            and torch.is_grad_enabled()
            and (name := name_of(func)) not in _NEVER
        ):
            at = place()
            cuts.put(result, Cut(name, at, name in _MEANT and not result.dim()))
            lost.cut(tensor, name, at)
            return


class Lost:
    """Parameters whose gradients end where a line of the script cuts a graph off."""

    def __init__(self) -> None:
        #: By line: what cuts, and the parameters behind it, by identity.
        self._behind: dict[str, tuple[str, frozenset[int]]] = {}
        #: … parameters of layers that it computes where no gradients are, and how often it copies
        #: which.
        self._without: dict[str, set[int]] = {}
        self._copied: dict[str, Counter[int]] = {}
        self._shapes: dict[int, str] = {}

    def cut(self, tensor: torch.Tensor, operator: str, place: str | None) -> None:
        """Something without a graph was made of a tensor that has one."""
        if tensor.numel() < 2 or not place or place in self._behind or len(self._behind) >= _LINES:
            return
        parameters = parameters_of(nodes_of(tensor.grad_fn) or ())
        self._behind[place] = operator, frozenset(map(id, parameters[: _BEHIND + 1]))

    def computed(
        self, weights: Iterable[torch.nn.Parameter], where: Callable[[], str | None]
    ) -> None:
        """A layer with these weights was computed where no gradients are."""
        new = {id(weight) for weight in weights}.difference(*self._without.values())
        place = where() if new else None
        if not place or (place not in self._without and len(self._without) >= _LINES):
            return
        mine = self._without.setdefault(place, set())
        if len(mine) <= _BEHIND:
            mine.update(new)

    def copying(self, parameter: torch.nn.Parameter, place: str | None) -> None:
        """A line copies a parameter (copy.deepcopy)."""
        if place and (place in self._copied or len(self._copied) < _LINES):
            self._copied.setdefault(place, Counter())[id(parameter)] += 1
            self._shapes[id(parameter)] = shape_of(parameter)

    def found(self, names: Mapping[int, str]) -> Iterator[Misuse]:
        """A misuse for each line: what cuts, and the names of all parameters behind it, if they are
        few."""
        for place, (operator, behind) in self._behind.items():
            if behind and len(behind) <= _BEHIND:
                known = (names.get(each, "") for each in behind)
                yield Misuse(CUT_OFF, (operator, *sorted(filter(None, known))), place)
        for place, without in self._without.items():
            known = (names.get(each, "") for each in without)
            yield Misuse(CUT_OFF, ("no_grad", *sorted(filter(None, known))), place)
        for place, times in self._copied.items():
            often = [
                names.get(each, self._shapes[each])
                for each, number in times.items()
                if number >= _COPIES
            ]
            if 0 < len(often) <= _BEHIND:
                yield Misuse(CUT_OFF, ("deepcopy", *sorted(filter(None, often))), place)


def cut_in(node: Any) -> tuple[str, str | None, str | None] | None:
    """What was cut off from the first term of a loss that has no graph though it was computed of
    what has one."""

    def terms(node: Any) -> list[Any]:
        return [operand for operand in operands(node) if operand.name().startswith(_TERMS)]

    is_term = node is not None and node.name().startswith(_TERMS)
    for each in walk(node, following=terms, most=_MOST_TERMS) if is_term else ():
        marked: tuple[str, str | None, str | None] | None = each.metadata.get(OF_TERM)
        if marked is not None:
            return marked
    return None


def tensors_among(args: Any) -> list[torch.Tensor]:
    """The tensors that a function is given, those of a list included."""
    tensors = []
    for argument in args:
        parts = argument if isinstance(argument, list | tuple) else (argument,)
        tensors += [part for part in parts if isinstance(part, torch.Tensor)]
    return tensors


def name_of(func: Any) -> str:
    """The name of a function of PyTorch, or of a property of tensors."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # of a property of tensors
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


# ---
# Graphs that go back to earlier steps.


def steps_back(
    made: Marks[tuple[int, int]], given: Sequence[torch.Tensor], result: torch.Tensor, now: int
) -> int:
    """The number of steps through which the graph of a result goes back, which is made in step
    ``now``: 1 for what is computed of a tensor of an earlier step, 2 if that was, in turn, and so
    on."""
    if result.grad_fn is None:
        return 0
    back = 0
    for tensor in given:
        if tensor.grad_fn is not None and (known := made.of(tensor)) is not None:
            step, before = known
            back = max(back, before + (step < now))
    made.put(result, (now, back))
    return back
