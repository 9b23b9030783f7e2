"""Two results of one backward pass that are one and the same: a layer got one tensor twice, or two
tensors of a data set with the same numbers, where two views of a sample are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import VIEWS, shape_of
from trainfit.hooks.provenance.cuts import NumberMarks, tensors_among
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import first_operand, operator_of
from trainfit.torch_private.operators import no_dispatch
from trainfit.torch_private.tensors import version

#: Layers with weights, by the functions that compute them.
_LAYERS: Final = {"linear", "conv1d", "conv2d", "conv3d"}
#: What passes numbers on as they are.
_AS_THEY_ARE: Final = {"to", "cuda", "float", "contiguous", "clone", "view", "reshape", "flatten"}
_JOINS: Final = {"cat", "concat", "concatenate"}
#: Functions that draw numbers: what is computed after them may differ for one input.
_DRAWS: Final = ("rand", "dropout", "bernoulli", "normal_", "multinomial", "uniform", "poisson")
#: Where a node of a layer has what it was computed of; it goes with the node.
_INPUT: Final = "trainfit_input"
#: Of a batch's tensors, the dimensions and the numbers from which they may be views of a sample.
_DIMENSIONS: Final = 2
_NUMBERS: Final = 64
#: Steps that show it.
_STEPS: Final = 2
#: Nodes between a weight and the matmul that it goes into.
_OF_WEIGHTS: Final = (*VIEWS, "T", "Transpose", "Permute", "Expand", "ToCopy", "Unsqueeze")


class SameInputs:
    """Follows what layers get within a step; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        #: Tensors of a batch that have the same numbers: one object for all of them; and those that
        #: are one of these with another.
        self._equal: NumberMarks[object] = NumberMarks()
        self._joined: NumberMarks[bool] = NumberMarks()
        #: Were numbers drawn since a layer got something; did one get joined ones, and where.
        self._is_drawn = False
        self._joined_at: str | None = None
        self._steps = 0
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """What got the same twice, and whether its results are compared with each other."""
        if self._found is not None:
            yield self._found

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """A DataLoader gave a batch with these."""
        views = [each for each in tensors if _may_be_view(each)]
        for number, one in enumerate(views):
            for other in views[:number]:
                with no_dispatch():
                    is_same = one.shape == other.shape and bool(torch.equal(one, other))
                if is_same:
                    mark = self._equal.of(other) or object()
                    self._equal.put(other, mark)
                    self._equal.put(one, mark)
                    break

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch with this name gave a tensor."""
        if name in _LAYERS:
            self._look_at_layer(args, result)
        elif name == "normal" or name.startswith(_DRAWS):
            self._is_drawn = True
        elif name in _JOINS:
            given = tensors_among(args[:1])
            keys = [self._key(each) for each in given]
            if len(keys) > len(set(keys)) and _may_be_views(given):
                self._joined.put(result, True)
        elif name in _AS_THEY_ARE and (self._equal or self._joined):
            source = args[0] if args else None
            if isinstance(source, torch.Tensor) and source is not result:
                if (mark := self._equal.of(source)) is not None:
                    self._equal.put(result, mark)
                if self._joined.of(source):
                    self._joined.put(result, True)

    def _key(self, tensor: torch.Tensor) -> object:
        return self._equal.of(tensor) or (id(tensor), version(tensor))

    def _look_at_layer(self, args: Sequence[Any], result: torch.Tensor) -> None:
        if self._found is not None or result.grad_fn is None or len(args) < 2:
            return
        x, weight = args[:2]
        if not isinstance(weight, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
            return
        if x.grad_fn is not None:
            return  # of an inner layer
        self._is_drawn = False
        if self._joined.of(x):
            self._joined_at = self._place() or ""
        node: Any = result.grad_fn
        node.metadata[_INPUT] = (id(weight), self._key(x)), shape_of(x), self._place() or ""

    def backward(self, nodes: Sequence[Any]) -> None:
        """A backward pass goes through these nodes."""
        joined, self._joined_at = self._joined_at, None
        is_random = self._is_drawn or any("Dropout" in operator_of(each) for each in nodes)
        if self._found is not None or is_random:
            return
        seen: set[object] = set()
        twice: tuple[str, str] | None = None
        for node in nodes:
            if (known := node.metadata.get(_INPUT)) is not None:
                key, shape, place = known
                twice = (shape, place) if key in seen else twice
                seen.add(key)
        are_compared = any(map(_compares_results, nodes))
        if twice is None and joined is not None and are_compared:
            twice = "", joined
        if twice is None:
            return
        self._steps += 1
        if self._steps >= _STEPS:
            told = twice[0], "compared" if are_compared else ""
            self._found = Misuse.of("same_views", *told, place=twice[1])


def _may_be_view(tensor: torch.Tensor) -> bool:
    is_known = tensor.device.type == "cpu" and tensor.is_floating_point()
    return is_known and tensor.dim() >= _DIMENSIONS and tensor.numel() >= _NUMBERS


def _may_be_views(tensors: Sequence[torch.Tensor]) -> bool:
    return all(it.is_floating_point() and it.dim() > _DIMENSIONS for it in tensors)


def _compares_results(node: Any) -> bool:
    """Is it a matmul of two results, or the cosine of two, and of no weight?"""
    name = operator_of(node)
    if name.startswith("CosineSimilarity"):
        return True
    if name not in ("Mm", "Bmm"):
        return False
    behind = [each for each, _ in node.next_functions]
    return all(each is not None and not _is_weight(each) for each in behind)


def _is_weight(node: Any) -> bool:
    while node is not None and operator_of(node).startswith(_OF_WEIGHTS):
        if not node.next_functions:
            return False
        node = first_operand(node)
    return node is None or hasattr(node, "variable")
