"""What becomes of a layer's output: one number of each sample that is compared with all targets, a
softmax that is written out, weights of an attention that nobody asks for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.provenance.cuts import Marks, name_of, tensors_among
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import behind, first_operand, operator_of

#: Functions that give a number of each row, and those that put a dimension in for a comparison of
#: each with each.
_LAYERS: Final = {"linear", "addmm"}
_OF_ROWS: Final = {"argmax", "argmin"}
_PUT_IN: Final = {"unsqueeze", "getitem", "expand"}
#: Where a node of an attention's weights is marked; it goes with the node.
_MARK: Final = "trainfit_weights"
#: Positions of queries and keys, and nodes between their product and its softmax.
_LEAST_POSITIONS: Final = 256
_DEPTH: Final = 6
_OF_SCORES: Final = ("Div", "Mul", "MaskedFill", "Add", "Sub", "Where", "ToCopy", "View")
#: What leaves numbers as they are, what scales them, and what layers compute.
_SAME_NUMBERS: Final = ("View", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "Clone", "ToCopy")
_SCALES: Final = ("Div", "Mul", "MaskedFill", "Transpose")
_COMPUTE: Final = ("Addmm", "Mm", "Bmm", "Linear", "Convolution")
#: Bytes of all heads' weights of one step that are worth a word.
_LARGE: Final = 256 << 20


class Outputs:
    """Follows a layer's single numbers to what they are compared with."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        #: One number of each sample; what got a dimension for a comparison of each with each.
        self._single: Marks[bool] = Marks()
        self._put_in: Marks[bool] = Marks()
        self._compared: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Shapes of what was compared with all of the other, and the line."""
        if self._compared is not None:
            yield self._compared

    def gave(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """A function of PyTorch gave a tensor."""
        if self._compared is not None:
            return
        name = name_of(func).strip("_")
        if name in ("eq", "ne"):
            self._compare(args, result)
            return
        given = tensors_among(args[:2])
        if result.dim() == 2 and result.shape[1] == 1 and result.shape[0] > 1:
            of_rows = name in _OF_ROWS and given and given[0].dim() == 2
            if name in _LAYERS or (of_rows and given[0].shape[1] > 1):
                self._single.put(result, True)
                return
        if name in _PUT_IN:
            self._put_in.put(result, True)
            return
        is_of_one = result.dim() <= 2 and any(self._single.of(each) for each in given)
        if is_of_one and result.numel() == max(each.numel() for each in given):
            self._single.put(result, True)

    def _compare(self, args: Sequence[Any], result: torch.Tensor) -> None:
        if len(args) != 2 or not all(isinstance(each, torch.Tensor) for each in args):
            return
        left, right = args
        number = result.shape[0] if result.dim() == 2 else 0
        if number < 2 or {left.shape, right.shape} != {(number,), (number, 1)}:
            return
        singles = [bool(self._single.of(each)) for each in args]
        if singles.count(True) != 1 or any(self._put_in.of(each) for each in args):
            return
        output, target = (left, right) if singles[0] else (right, left)
        told = shape_of(output), shape_of(target)
        self._compared = Misuse.of("compared_with_all", *told, place=self._place())


def softmax_by_hand(given: Sequence[torch.Tensor], result: torch.Tensor) -> bool:
    """Is this exp(x) / exp(x).sum() of what a layer gives?"""
    if result.grad_fn is None or len(given) != 2 or operator_of(result.grad_fn) != "Div":
        return False
    exponential: Any = given[0].grad_fn
    total: Any = given[1].grad_fn
    if exponential is None or total is None or operator_of(exponential) != "Exp":
        return False
    total = behind(total, _SAME_NUMBERS)
    if total is None or operator_of(total) != "Sum" or first_operand(total) != exponential:
        return False
    made = behind(first_operand(exponential), (*_SAME_NUMBERS, *_SCALES))
    return made is not None and operator_of(made).startswith(_COMPUTE)


class Scores:
    """Follows the scores of attention that a script computes by itself: a product of queries and
    keys, and a softmax over it."""

    def __init__(self) -> None:
        self._layers = self._bytes = 0
        #: Their nodes in this step, by identity: a function of PyTorch may call itself.
        self._seen: set[int] = set()
        self._at: str | None = None
        self._shape = ""
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Softmaxes of a step, their bytes, the shape of one, and its line."""
        if self._found is not None:
            yield self._found

    def computed(self, scores: torch.Tensor, place: Callable[[], str | None]) -> None:
        """A softmax over the last dimension of these is about to be computed."""
        if scores.dim() < 3 or min(scores.shape[-2:]) < _LEAST_POSITIONS:
            return
        node: Any = scores.grad_fn
        for _ in range(_DEPTH):
            if node is None or node.name().startswith(("Bmm", "UnsafeView")):
                break
            if not node.name().startswith(_OF_SCORES):
                return
            node = first_operand(node)
        made = node if node is None or node.name().startswith("Bmm") else first_operand(node)
        if made is None or not made.name().startswith("Bmm") or id(scores.grad_fn) in self._seen:
            return
        self._seen.add(id(scores.grad_fn))
        self._layers, self._bytes = self._layers + 1, self._bytes + scores.nbytes
        if self._at is None:
            self._at, self._shape = place() or "", shape_of(scores)

    def backward(self) -> None:
        """A backward pass begins."""
        if self._bytes >= _LARGE and self._found is None:
            told = self._layers, self._bytes, self._shape
            self._found = Misuse.of("attention_by_hand", *told, place=self._at)
        self.over()

    def over(self) -> None:
        """What was computed so far is of a step that is over."""
        self._layers = self._bytes = 0
        self._seen.clear()


class AttentionWeights:
    """Follows the weights that attention layers give next to their output."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[Any]] = []
        self._bytes = self._heads = 0
        self._at: str | None = None
        self._unused: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Layers whose weights nobody used in a step, the bytes of these, and the line of one."""
        if self._unused is not None:
            yield self._unused

    @property
    def is_inside(self) -> bool:
        """Is such a layer being called?"""
        return self._heads > 0

    def asks(self, heads: int, *, wanted: bool) -> None:
        """An attention layer of so many heads is about to be called."""
        self._heads = heads if wanted and torch.is_grad_enabled() else 0

    def gave(self, result: Any, place: str | None) -> None:
        """An attention layer gave an output and its weights, those of all heads or their
        average."""
        heads, self._heads = self._heads, 0
        weights = result[1] if isinstance(result, tuple) and len(result) == 2 else None
        if not heads or not isinstance(weights, torch.Tensor) or weights.grad_fn is None:
            return
        node: Any = weights.grad_fn
        node.metadata[_MARK] = True
        self._given.append(weakref.ref(weights))
        self._at = place
        self._bytes += weights.nbytes * (1 if weights.dim() == 4 else heads)

    def backward(self, nodes: Iterable[Any]) -> None:
        """A backward pass goes through these nodes."""
        given, nbytes = self._given, self._bytes
        self.over()
        if not given or nbytes < _LARGE or self._unused is not None:
            return
        is_used = any(each() is not None for each in given) or any(
            node.metadata.get(_MARK) for node in nodes if node.name().startswith("Mean")
        )
        if not is_used:
            self._unused = Misuse.of("weights_unused", len(given), nbytes, place=self._at)

    def over(self) -> None:
        """What was given so far is of a step that is over."""
        self._given, self._bytes = [], 0
