"""Looks at a loss: what was done to it last, which parameters it depends on, and whether its
function gets what it is for. No value is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainfit.hooks.held_objects import tensors_in
from trainfit.results.runs.learning import LEAST_HALF, LossMisfit
from trainfit.torch_private.autograd import (
    behind,
    first_operand,
    nodes_of,
    number_of,
    operands,
    parameters_of,
    saved_dimension,
    saved_other,
    sizes_of,
    softmax_over,
)

#: Nodes of a loss that are followed back.
_DEPTH: Final = 8
#: Nodes of a loss with several terms that are looked at.
_TERMS: Final = 100
#: Nodes of a view. Since PyTorch 2.15 the second is the last of a layer of several dimensions.
VIEWS: Final = ("View", "UnsafeView", "ReshapeAlias")
#: Nodes that pass a loss on as it is.
_SAME: Final = (*VIEWS, "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Expand")
#: … and what only changes the order of its numbers.
_ORDER: Final = ("Transpose", "Permute")
#: Functions that compare what they get number by number, and broadcast what differs in shape.
ELEMENTWISE: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
#: Functions that want logits or log-probabilities, and the nodes that make something else of them.
_WANTS: Final = {
    "cross_entropy": ("Softmax", "Sigmoid", "Relu"),
    "binary_cross_entropy_with_logits": ("Sigmoid", "Softmax", "Relu"),
    "nll_loss": ("Softmax", "Sigmoid"),
    "kl_div": ("Softmax", "Sigmoid"),
    "ctc_loss": ("Softmax", "Sigmoid"),
}
#: A dropout of the GPU.
_DROPS: Final = ("NativeDropout", "FusedDropout")
#: Functions that need an activation before them, and that one.
_NEEDS: Final = {
    "nll_loss": "log_softmax",
    "kl_div": "log_softmax",
    "ctc_loss": "log_softmax",
    "binary_cross_entropy": "sigmoid",
}
#: Functions of which dimension 1 is that of the classes.
OF_CLASSES: Final = "nll_loss", "cross_entropy"
#: Nodes of layers, whose output may be any number. (A product without a bias may be a mean of
#: probabilities.)
_UNBOUNDED: Final = ("Addmm", "Linear", "Convolution", "Relu", "LeakyRelu")
#: Nodes of layers whose output has its channels in dimension 1.
_CHANNELS_FIRST: Final = ("Convolution", "Upsample", "NativeBatchNorm", "CudnnBatchNorm")
#: What is looked at, by its name in torch.nn.functional.
LOOKED_AT: Final = (*ELEMENTWISE, *_WANTS, "binary_cross_entropy")


def misfit(name: str, output: Any, target: Any) -> LossMisfit | None:
    """What is wrong with the tensors that a loss function gets; without a place."""
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        return None
    if name in ELEMENTWISE:
        if not isinstance(target, torch.Tensor) or _is_meant(output.shape, target.shape):
            return None
        if target.requires_grad or _was_put_in(output):
            return None  # each with each: what the model gives among itself, or by a view
        return LossMisfit(name, shapes=(shape_of(output), shape_of(target)))
    node = _made_by(output)
    made = node.name() if node is not None else ""
    if _is_of_one_class(name, output.shape, node, made):
        return LossMisfit(name, shapes=(shape_of(output),))
    if name in OF_CLASSES and _goes_elsewhere(output):
        return LossMisfit(name, shapes=(shape_of(output),), activation="log_softmax")
    if name == "nll_loss" and made.startswith("LogBackward") and _is_of_softmax(node):
        return LossMisfit(name, activation="log")
    wants = _WANTS.get(name, ())
    if wants and made.startswith(_DROPS):
        return LossMisfit(name, activation="dropout")
    activation = next((want for want in wants if made.startswith(want)), None)
    if activation is not None:
        return LossMisfit(name, activation=activation.lower())
    if name in _NEEDS and gives_layer(output):
        return LossMisfit(name, missing=_NEEDS[name])
    return None


# ---
# Losses that a script computes itself.

#: Where a node keeps what :func:`mark_broadcast` saw; it goes with the node.
_MARK: Final = "trainfit_broadcast"
#: Nodes that put numbers together, that change each by itself, and that may do so with a number.
_REDUCE: Final = ("Mean", "Sum", "LinalgVectorNorm", "Norm")
_BY_ITSELF: Final = ("Pow", "Abs", "Neg", "Add", "Sqrt", *_SAME)
_BY_NUMBER: Final = ("Mul", "Div")


def mark_broadcast(left: Any, right: Any, result: Any, place: Callable[[], str | None]) -> bool:
    """Were outputs of N×1 and targets of N, or the reverse, broadcast to N×N? Then its node is
    marked; the graph is not kept."""
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.dim() + right.dim() != 3 or left.requires_grad == right.requires_grad:
        return False
    output, target = (left, right) if left.requires_grad else (right, left)
    number = max(output.shape[0], target.shape[0])
    if number < 2 or {output.shape, target.shape} != {(number,), (number, 1)}:
        return False
    made, node = output.grad_fn, result.grad_fn
    if node is None or made is None or made.name().startswith("Unsqueeze"):
        return False  # each with each, as it is written
    node.metadata[_MARK] = shape_of(output), shape_of(target), place()
    return True


def is_lost(tensor: Any, number: Any) -> bool:
    """Is it a number that is 0 in the tensor's type, float16?"""
    if not isinstance(number, float) or not 0 < number < LEAST_HALF / 2:
        return False
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float16


def broadcast_in(node: Any) -> LossMisfit | None:
    """The first marked node that a loss puts together number by number."""
    waiting, known = [(node, True)] if node is not None else [], {node}
    while waiting and len(known) <= _TERMS:
        node, is_one = waiting.pop()
        name = node.name()
        if not is_one and (marked := node.metadata.get(_MARK)):
            output, target, place = marked
            return LossMisfit("", shapes=(output, target), place=place)
        if name.startswith(_REDUCE):
            is_one = False
        elif name.startswith(_BY_NUMBER):
            if not is_one and number_of(saved_other(node)) is None:
                continue  # weighted one by one
        elif not name.startswith(_BY_ITSELF):
            continue
        following = [operand for operand in operands(node) if operand not in known]
        known.update(following)
        waiting += [(operand, is_one) for operand in following]
    return None


def _made_by(output: torch.Tensor) -> Any:
    """The node that computed a tensor, whatever shape and type it was given then."""
    return behind(output.grad_fn, (*_SAME, *_ORDER))


def gives_layer(output: torch.Tensor) -> bool:
    """Is it a layer's output, which may be any number, as it is?"""
    node = _made_by(output)
    made = node.name() if node is not None else ""
    return made.startswith(_UNBOUNDED) or product_of(node) is not None


def product_of(node: Any) -> Any | None:
    """The matmul in the sum of a matmul and a parameter, as a layer of several dimensions may
    compute it; ``None`` of all else."""
    if node is None or not node.name().startswith("Add"):
        return None
    terms = operands(node)
    products = [term for term in terms if _is_product(term)]
    is_layer = len(terms) == 2 and len(products) == len(parameters_of(terms)) == 1
    return products[0] if is_layer else None


def _is_product(node: Any) -> bool:
    if node.name().startswith("UnsafeView"):
        node = first_operand(node)
    return node is not None and node.name().startswith(("Mm", "Bmm"))


def _is_of_one_class(name: str, output: Sequence[int], node: Any, made: str) -> bool:
    """Is a softmax taken over one number for each of several samples? (A similarity of all pairs of
    one sample is of one, too.)"""
    if name == "cross_entropy":  # takes it itself, over the second dimension
        return len(output) > 1 and output[1] == 1 and output[0] > 1
    return made.startswith(("Softmax", "LogSoftmax")) and softmax_over(node) == 1


def classes_by_view(name: str, output: Any) -> tuple[str, str] | None:
    """Shapes of a layer's output with its classes in dimension 1, as (N, classes, H, W), and of the
    view of it whose rows were meant to be of one position each, as (N·H·W, classes)."""
    if name not in OF_CLASSES or not isinstance(output, torch.Tensor) or output.dim() != 2:
        return None
    node, classes = output.grad_fn, output.shape[1]
    if node is None or not node.name().startswith(VIEWS) or classes < 2:
        return None
    made = first_operand(node)
    if made is None or not made.name().startswith(_CHANNELS_FIRST):
        return None
    sizes = sizes_of(made)
    if sizes is None or len(sizes) < 3 or sizes[1] != classes or sizes[-1] == classes:
        return None
    return "×".join(map(str, sizes)), shape_of(output)


def _is_of_softmax(log: Any) -> bool:
    node = first_operand(log)
    return node is not None and node.name().startswith("Softmax")


def _goes_elsewhere(output: torch.Tensor) -> bool:
    """Does the log-softmax that made it go along another dimension than that of the classes?"""
    node = output.grad_fn
    if output.dim() < 2 or node is None or not node.name().startswith("LogSoftmax"):
        return False
    dim = saved_dimension(node)
    return dim is not None and dim % output.dim() != 1


def _is_meant(output: Sequence[int], target: Sequence[int]) -> bool:
    """Are the shapes the same, or is one number, or one for each row, compared with all?

    What is hardly meant has more numbers together than each of both: predictions of N×1 against
    targets of N become N×N. With as many dimensions each was given its place (quantiles of N×Q×1
    and N×1×Q, each with each).
    """
    if len(output) == len(target):
        return True
    try:
        together = torch.broadcast_shapes(tuple(output), tuple(target))
    except RuntimeError:
        return True  # the function refuses them itself
    return tuple(together) in (tuple(output), tuple(target))


def _was_put_in(output: torch.Tensor) -> bool:
    """Did the script put a dimension between others last, as for all pairs (``x[:, None]``)?"""
    node = output.grad_fn
    return node is not None and node.name().startswith("Unsqueeze") and output.shape[-1] != 1


def common(losses: Sequence[LossScale]) -> frozenset[float]:
    """Divisors of every loss."""
    return frozenset.intersection(*(loss.divisors for loss in losses)) if losses else frozenset()


class LossScale(NamedTuple):
    """What was done to a loss last: the numbers that it, or each of its terms, was divided by, and
    whether that is all that was done to it."""

    divisors: frozenset[float]
    is_known: bool


def scale_of_loss(node: Any, *, scaled: bool = False) -> LossScale:
    """Follow a loss back from ``node`` to what computes it.

    ``scaled``: a GradScaler's scale, a tensor on the GPU, is among the factors.
    """
    divisors: set[float] = set()
    for _ in range(_DEPTH):
        if node is None:
            break
        name = node.name()
        if name.startswith(("Mul", "Div")):
            value = number_of(saved_other(node))
            if value is None and scaled and name.startswith("Mul"):
                scaled, value = False, 1.0
            if not value:
                return LossScale(frozenset(divisors), False)
            divisors.add(round(value if name.startswith("Div") else 1 / value, 6))
        elif name.startswith("Add"):
            terms = [scale_of_loss(term) for term in operands(node)]
            is_known = all(term.is_known for term in terms)
            return LossScale(common(terms) | divisors, is_known)
        elif not name.startswith(_SAME):
            break
        node = first_operand(node)
    return LossScale(frozenset(divisors), True)


class Leaf(NamedTuple):
    """A parameter that a graph ends in: its shape, and itself, as long as it lives."""

    shape: str
    parameter: weakref.ref[Any]


def leaves_of(node: Any) -> dict[int, Leaf] | None:
    """The parameters that a graph ends in, by identity; ``None``: it is too large for a look."""
    nodes = nodes_of(node)
    if nodes is None:
        return None
    return {id(leaf): Leaf(shape_of(leaf), weakref.ref(leaf)) for leaf in parameters_of(nodes)}


def has_graph(output: Any) -> bool:
    """Has what a model gives, or the first level of what is in it, a graph?"""
    return any(tensor.grad_fn is not None for tensor in tensors_in(output))


def has_no_graph(loss: Any) -> bool:
    """A tensor that was told to need a gradient, and that nothing was computed for."""
    return (
        isinstance(loss, torch.Tensor)
        and not isinstance(loss, torch.nn.Parameter)
        and loss.requires_grad
        and loss.grad_fn is None
    )


def shape_of(tensor: Any) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"
