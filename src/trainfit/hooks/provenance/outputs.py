"""What becomes of a layer's output: one number of each sample that is compared with all targets, a
softmax that is written out, weights of an attention that nobody asks for.

What is compared with classes: the largest outputs themselves where their positions are meant,
positions of the largest sample where those of the largest class are, logits as if they were
probabilities.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks, name_of, tensors_among
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
        is_of_one = result.dim() <= 2 and any(self._single.of(tensor) for tensor in given)
        if is_of_one and result.numel() == max(tensor.numel() for tensor in given):
            self._single.put(result, True)

    def _compare(self, args: Sequence[Any], result: torch.Tensor) -> None:
        if len(args) != 2 or not all(isinstance(argument, torch.Tensor) for argument in args):
            return
        left, right = args
        number = result.shape[0] if result.dim() == 2 else 0
        if number < 2 or {left.shape, right.shape} != {(number,), (number, 1)}:
            return
        singles = [bool(self._single.of(argument)) for argument in args]
        if singles.count(True) != 1 or any(self._put_in.of(argument) for argument in args):
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


#: Functions that give the largest of a dimension and where they are, and those of the position.
_LARGEST: Final = {"max", "min"}
_POSITIONS: Final = {"argmax", "argmin"}
#: Layers whose second operand is their weight, and what leaves a prediction as it is.
_WEIGHTED: Final = {"linear", "conv2d", "conv1d"}
_AS_THEY_ARE: Final = {
    *("detach", "clone", "squeeze", "unsqueeze", "view", "reshape", "flatten", "view_as"),
    *("data", "to", "cuda", "contiguous", "float"),
}
#: … and an order of classes.
_TURNED: Final = {"softmax", "log_softmax", "sigmoid"}
_IN_ORDER: Final = _AS_THEY_ARE | _TURNED
_ABOVE: Final = {"gt", "ge"}
_OF_LOGITS: Final = "binary_cross_entropy_with_logits"
_COMPARE: Final = {"eq", "ne"}
_DRAWS: Final = "multinomial"
_FOLLOWED: Final = {_DRAWS} | _LARGEST | _POSITIONS | _WEIGHTED | _IN_ORDER | _COMPARE | _ABOVE


class Predictions(FirstOfKind):
    """Follows what layers give to what it is compared with; ``place`` gives the line that is
    running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Outputs of a layer, and whether they are as the layer gave them; numbers of a sample that
        #: a loss of logits is given; largest outputs; positions that are of no class, what they
        #: are of, the shape there, and the line that asks for them.
        self._outputs: Marks[bool] = Marks()
        self._logits: set[int] = set()
        self._values: Marks[str | None] = Marks()
        self._columns: Marks[tuple[str, str, str | None]] = Marks()

    def gave(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of PyTorch with this name gave a tensor, or two."""
        name = name.strip("_")
        if name not in _FOLLOWED:
            return  # as most are: this is asked of each function
        given = tensors_among(args[:2])
        if not given:
            return
        source = given[0]
        if name == _DRAWS:
            self.drawing(source)
        elif name in _COMPARE:
            self._compare(given)
        elif name in _LARGEST:
            self._choose(source, args, kwargs, result)
        elif not isinstance(result, torch.Tensor):
            return
        elif name in _ABOVE:
            self._look_at_threshold(source, args)
        elif name in _POSITIONS:
            self._note_columns(source, _dimension(args, kwargs), result)
        elif name in _WEIGHTED:
            if len(given) > 1 and isinstance(given[1], torch.nn.Parameter):
                self._outputs.put(result, True)
        else:
            self._pass_on(name, source, result)

    def drawing(self, weights: Any) -> None:
        """Classes are drawn with these as their probabilities."""
        if isinstance(weights, torch.Tensor) and self._outputs.of(weights):
            self._note("scores_drawn", shape_of(weights))

    def comparing(self, name: str, output: Any) -> None:
        """A loss function is given this output."""
        if name == _OF_LOGITS and isinstance(output, torch.Tensor) and self._outputs.of(output):
            self._logits.add(_of_sample(output))

    def _look_at_threshold(self, source: torch.Tensor, args: Sequence[Any]) -> None:
        limit = args[1] if len(args) > 1 else None
        if not isinstance(limit, float) or not 0 < limit < 1 or not self._outputs.of(source):
            return
        if _of_sample(source) in self._logits:
            self._note("threshold_on_logits", f"{limit:g}")

    def _choose(
        self, source: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        dim = _dimension(args, kwargs)
        if not isinstance(result, tuple) or len(result) != 2 or dim is None or source.dim() < 2:
            return
        values, positions = result
        if values.is_floating_point() and "values_as_classes" not in self._found:
            self._values.put(values, self._place())
        self._note_columns(source, dim, positions)

    def _note_columns(self, source: torch.Tensor, dim: int | None, positions: torch.Tensor) -> None:
        if dim is None or self._outputs.of(source) is None or source.dim() < 2:
            return
        if source.shape[dim] == 1 and source.shape[0] > 1:
            known = "one_output_chosen", shape_of(source), self._place()
            self._columns.put(positions, known)
        elif source.dim() == 2 and dim in (0, -2):
            known = "classes_over_samples", shape_of(source), self._place()
            self._columns.put(positions, known)

    def _pass_on(self, name: str, source: torch.Tensor, result: torch.Tensor) -> None:
        is_raw = self._outputs.of(source)
        if is_raw is not None and result.numel() == source.numel():
            self._outputs.put(result, is_raw and name not in _TURNED)
        if name not in _AS_THEY_ARE or result.numel() != source.numel():
            return
        if (at := self._values.of(source)) is not None and result.is_floating_point():
            self._values.put(result, at)
        if (column := self._columns.of(source)) is not None:
            self._columns.put(result, column)

    def _compare(self, given: Sequence[torch.Tensor]) -> None:
        if len(given) != 2:
            return
        for one, other in (given, given[::-1]):
            column = self._columns.of(one)
            if column is not None and not self._columns.of(other) and one.numel() == other.numel():
                self._note(column[0], column[1], place=column[2] or "")
            if other.dtype not in (torch.int64, torch.int32) or one.numel() != other.numel():
                continue
            if (at := self._values.of(one)) is not None:
                self._note("values_as_classes", place=at or "")


def _of_sample(output: torch.Tensor) -> int:
    """Numbers of each sample."""
    return output.numel() // max(1, len(output)) if output.dim() else 0


def _dimension(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The one that a function goes over; ``None``: over all numbers."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None
