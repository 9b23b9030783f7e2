"""What layers are given: images with the numbers of their files, weights of an attention that add
up to one over the wrong dimension, the last step of a layer that goes in both directions, a large
table of which a batch needs few rows.

Two results of one backward pass that are one and the same: a layer got one tensor twice, or two
tensors of a data set with the same numbers, where two views of a sample are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import VIEWS, shape_of
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks, NumberMarks, tensors_among
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import (
    behind,
    first_operand,
    operands,
    operator_of,
    saved_dimension,
    sizes_of,
)
from trainfit.torch_private.operators import no_dispatch, version

#: What leaves the numbers of images as they are.
_AS_THEY_ARE: Final = {
    *("to", "cuda", "float", "type", "contiguous", "clone", "detach", "view", "reshape"),
    *("flatten", "permute", "pad", "squeeze", "unsqueeze"),
    *("__getitem__", "requires_grad_", "type_as"),
}
#: Layers that the numbers get to, and what brings what such a layer gives to a common scale.
_LAYERS: Final = {"conv2d", "linear"}
_NORMS: Final = {"batch_norm", "group_norm", "layer_norm", "instance_norm", "rms_norm"}
#: Dimensions of images of the host, and the largest number of 8 bits, above whose half one of a
#: batch is where they were not scaled.
_IMAGES: Final = 4
_LARGEST: Final = 255
_BRIGHT: Final = 127
#: Batches that show it.
_BATCHES: Final = 2
#: Functions whose first operand's last dimension is summed over.
_PRODUCTS: Final = {"matmul", "__matmul__", "bmm"}
#: All that is followed where no images are.
_FOLLOWED: Final = _PRODUCTS | _LAYERS | _AS_THEY_ARE
#: Nodes between weights of an attention and their product with values, and between the product of
#: queries and keys and the softmax.
_BETWEEN: Final = ("NativeDropout", "FusedDropout", "ToCopy", "View", "Expand", "UnsafeView", "Mul")
_OF_SCORES: Final = ("Div", "Mul", "MaskedFill", "Add", "Sub", "Where", "ToCopy", "View")
_DEPTH: Final = 6
#: Bytes of a table whose gradient costs an optimizer's step some 10 ms on a CPU (Adam reads and
#: writes four such tensors, at 10 GB/s), and of its rows the share that a batch needs at most: then
#: the gradient's other rows, which are 0, are all that costs.
_TABLE: Final = 32 << 20
_FEW_ROWS: Final = 0.01


class Inputs(FirstOfKind):
    """Follows what layers are given; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Are functions told of? In a real run they are not: nothing is followed.
        self._is_told = False
        #: Images as they were read; what a first layer made of some, and its line.
        self._raw: NumberMarks[bool] = NumberMarks()
        self._of_raw: Marks[str | None] = Marks()
        self._batches = 0
        #: Outputs of layers that go in both directions: the dimension of their steps.
        self._both_ways: Marks[int] = Marks()
        self._steps_at: int | None = None
        #: By the identity of large tables, the most rows that a lookup since the last backward pass
        #: has asked for, and its line.
        self._rows: dict[int, tuple[int, str | None]] = {}

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """A DataLoader gave a batch with these."""
        for tensor in tensors if self._is_told else ():
            if _is_as_read(tensor):
                self._raw.put(tensor, True)

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch with this name gave a tensor."""
        self._is_told = True
        if name not in _FOLLOWED and not self._of_raw:
            return  # as most are: this is asked of each function
        given = tensors_among(args[:1])
        if not given:
            return
        self._follow_images(name, given[0], result)
        if name in _PRODUCTS and result.grad_fn is not None:
            self._look_at_weights(given[0])
        steps = self._both_ways.of(given[0]) if name == "__getitem__" and len(args) > 1 else None
        if steps is not None and is_last_step(args[1], steps) and given[0].shape[steps] > 1:
            self._note("backward_at_its_start", shape_of(given[0]))

    def _follow_images(self, name: str, given: torch.Tensor, result: torch.Tensor) -> None:
        if (at := self._of_raw.of(given)) is not None and name not in _AS_THEY_ARE:
            if name not in _NORMS:
                self._batches += 1
                if self._batches >= _BATCHES:
                    self._note("images_unscaled", place=at)
            return
        if not self._raw.of(given) or "images_unscaled" in self._found:
            return
        if name in _AS_THEY_ARE:
            self._raw.put(result, True)
        elif name in _LAYERS and result.grad_fn is not None:
            self._of_raw.put(result, self._place() or "")

    def _look_at_weights(self, weights: torch.Tensor) -> None:
        """Look at the weights of a matmul of weights and values: do they add up to one over the
        dimension that it goes over?"""
        node = behind(weights.grad_fn, _BETWEEN)
        if node is None or not node.name().startswith("Softmax"):
            return
        dim, sizes = saved_dimension(node), sizes_of(node)
        if dim is None or sizes is None or len(sizes) < 3 or dim % len(sizes) != len(sizes) - 2:
            return
        made = behind(first_operand(node), _OF_SCORES)
        if made is not None and made.name().startswith("UnsafeView"):
            made = first_operand(made)
        if made is not None and made.name().startswith("Bmm"):
            self._note("softmax_over_queries", "×".join(map(str, sizes)), dim % len(sizes))

    def recurs(self, module: Any) -> None:
        """A recurrent layer is about to be called."""
        self._steps_at = int(module.batch_first) if module.bidirectional else None
        if module.training and module.dropout > 0 and module.num_layers == 1:
            self._note("dropout_of_one_layer", type(module).__name__, f"{module.dropout:g}")

    def recurred(self, result: Any) -> None:
        """A recurrent layer gave its outputs and states."""
        output = result[0] if isinstance(result, tuple) and result else None
        if self._steps_at is None or not isinstance(output, torch.Tensor):
            return  # packed steps have no last one in common
        if output.requires_grad and output.dim() > 2:
            self._both_ways.put(output, self._steps_at)

    def embedded(self, indices: Any, table: Any, *, is_sparse: bool) -> None:
        """Rows of a table are about to be looked up, whose gradient is sparse or has all rows."""
        if is_sparse or not isinstance(table, torch.nn.Parameter) or not torch.is_grad_enabled():
            return
        if not table.requires_grad or table.nbytes < _TABLE:
            return
        rows = indices.numel()
        if rows > self._rows.get(id(table), (0, None))[0]:
            self._rows[id(table)] = rows, self._place()

    def backward(self, nodes: Sequence[Any]) -> None:
        """A backward pass goes through these nodes."""
        asked, self._rows = self._rows, {}
        if not asked or "rows_untouched" in self._found:
            return
        used: dict[int, list[str]] = {}
        trained: dict[int, Any] = {}
        for node in nodes:
            for operand in operands(node):
                if (leaf := getattr(operand, "variable", None)) is None:
                    continue
                trained[id(leaf)] = leaf
                if id(leaf) in asked:
                    used.setdefault(id(leaf), []).append(node.name())
        tables = {key: trained[key] for key in used}
        rows = {key: asked[key][0] * len(names) for key, names in used.items()}
        # Of a table that is the output layer's weight, too, each row has a gradient.
        keys = [
            key
            for key, table in tables.items()
            if rows[key] <= _FEW_ROWS * len(table)
            and all(name.startswith("Embedding") for name in used[key])
        ]
        if keys:
            every = sum(len(tables[key]) for key in keys)
            numbers = sum(tables[key].numel() for key in keys)
            nbytes = sum(tables[key].nbytes for key in keys)
            share = numbers / sum(each.numel() for each in trained.values())
            largest = max(keys, key=lambda key: int(tables[key].numel()))
            told = sum(rows[key] for key in keys), every, numbers, nbytes, f"{share:.3f}"
            self._note("rows_untouched", *told, place=asked[largest][1])


def _is_as_read(tensor: torch.Tensor) -> bool:
    """Are these images of the host with whole numbers from 0 to 255?"""
    if tensor.dim() != _IMAGES or tensor.device.type != "cpu" or tensor.dtype == torch.bool:
        return False
    if tensor.dtype not in (torch.uint8, torch.float32, torch.float64, torch.float16):
        return False
    is_image = tensor.shape[1] in (1, 3) or tensor.shape[-1] in (1, 3)
    if not is_image or sum(size > 7 for size in tensor.shape[1:]) < 2:
        return False
    with no_dispatch():
        one = tensor[0]
        least, largest = one.aminmax()
        is_bright = float(least) >= 0 and _BRIGHT < float(largest) <= _LARGEST
        return is_bright and (not one.is_floating_point() or bool((one == one.round()).all()))


def is_last_step(index: Any, steps: int) -> bool:
    """Is it ``[:, -1]``, ``[:, -1, :]`` (of ``steps`` in dimension 1) or ``[-1]``, with all
    features?"""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) <= steps or parts[steps] != -1 or isinstance(parts[steps], torch.Tensor):
        return False
    others = [part for number, part in enumerate(parts) if number != steps]
    return all(part is Ellipsis or part == slice(None) for part in others)


#: Layers with weights, by the functions that compute them.
_WEIGHTED: Final = {"linear", "conv1d", "conv2d", "conv3d"}
#: What passes numbers on as they are.
_PASSES_ON: Final = {"to", "cuda", "float", "contiguous", "clone", "view", "reshape", "flatten"}
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
        views = [tensor for tensor in tensors if _may_be_view(tensor)]
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
        if name in _WEIGHTED:
            self._look_at_layer(args, result)
        elif name == "normal" or name.startswith(_DRAWS):
            self._is_drawn = True
        elif name in _JOINS:
            given = tensors_among(args[:1])
            keys = [self._key(tensor) for tensor in given]
            if len(keys) > len(set(keys)) and _may_be_views(given):
                self._joined.put(result, True)
        elif name in _PASSES_ON and (self._equal or self._joined):
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
        visited: set[object] = set()
        twice: tuple[str, str] | None = None
        for node in nodes:
            if (known := node.metadata.get(_INPUT)) is not None:
                key, shape, place = known
                twice = (shape, place) if key in visited else twice
                visited.add(key)
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
