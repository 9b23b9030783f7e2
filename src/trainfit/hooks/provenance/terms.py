"""What the terms of a loss are computed of: logarithms where probabilities are wanted, a logarithm
of numbers that may be below 0, a mean where single numbers are meant, targets that are trained,
too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import ELEMENTWISE, VIEWS, product_of, shape_of
from trainfit.hooks.provenance.cuts import (
    FirstOfKind,
    Marks,
    NumberMarks,
    name_of,
    tensors_among,
)
from trainfit.hooks.values import holds_nan, is_finite, zeros_inverted
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.torch_private.autograd import (
    first_operand,
    is_mean,
    nodes_of,
    number_of,
    only_operand,
    operands,
    operator_of,
    parameters_of,
    saved_exponent,
    saved_limits,
    saved_other,
    sizes_of,
    walk,
)
from trainfit.torch_private.operators import no_dispatch

#: What functions give, and those that pass it on.
_GIVES: Final = {"log_softmax": "logarithms", "log": "logarithms", "logsigmoid": "logarithms"}
_GIVES_PROBABILITIES: Final = {"softmax": "probabilities"}
_PASS_ON: Final = {
    *("detach", "clone", "contiguous", "to", "float", "view", "reshape", "flatten", "squeeze"),
    *("unsqueeze", "getitem", "permute", "transpose", "cuda", "expand", "repeat", "data"),
}
_LOGARITHMS: Final = {"log", "log2", "log10"}
_ROOTS: Final = {"sqrt", "rsqrt"}
_POWERS: Final = {"pow"}
_QUOTIENTS: Final = {"div", "divide", "truediv", "true_divide"}
#: Those that multiply what they are given, by names without underscores at their ends.
_PRODUCTS: Final = {
    *("mul", "multiply", "rmul", "matmul", "rmatmul", "mm", "bmm", "mv", "linear", "addmm"),
    *("einsum", "spmm", *_QUOTIENTS),
}
_COPIES: Final = {"to", "cuda"}
#: Functions that are infinite where a number is 0, of one tensor or by a divisor.
_INVERTS: Final = {*_QUOTIENTS, *_POWERS, "rsqrt", "reciprocal", "rtruediv", "rdiv"}
_ANGLES: Final = {"acos", "arccos", "asin", "arcsin"}
#: Nodes that put dimensions in or in another order, and those of what is 0 where it was below.
_VIEWS: Final = (
    *(*VIEWS, "Unsqueeze", "Expand", "Alias", "Transpose"),
    *("Permute", "ToCopy"),
)
_CLIPS: Final = ("Relu", "ClampMin", "Clamp")
#: Nodes of a computed cosine: products, sums over them, what scales them.
_COSINES: Final = ("Sum", "Mm", "Bmm", "Mul", "Div", "Sub", "Add", "Dot", "Addmm")
#: A factor that keeps a cosine within what has an angle.
_SHRINKS: Final = (0.9, 1.0)
_DEVIATIONS: Final = {"std", "var", "std_mean", "var_mean"}
#: Where a node is marked that spoils a loss which it is part of; it goes with the node.
_MARK: Final = "trainfit_term"
_OVERLAP: Final = "trainfit_overlap"
#: Nodes that pass numbers on, single ones of them, or them in another order.
_SAME: Final = (
    *(*VIEWS, "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"),
    *("Gather", "Index", "Select", "Slice", "Split", "Unbind", "Transpose", "Permute", "Expand"),
)
_LARGEST: Final = ("Max", "Amax", "Min", "Minimum", "Maximum")
_ADDS: Final = ("Add", "Sub", "Rsub")
_SCALES: Final = ("Mul", "Div", "Neg")
#: Layers, whose output may be any number.
_LAYERS: Final = ("Addmm", "Mm", "Linear", "Convolution")
#: Nodes of loss functions that give one number for all samples.
_LOSSES: Final = ("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")
#: What keeps NaN out of its result, or may.
_WITHOUT_NAN: Final = {"nan_to_num", "where", "isnan", "isfinite", "nanmean", "nansum"}
_DEPTH: Final = 12
_TERMS: Final = 32
#: Factors of what is expected later: the discounts of reinforcement learning.
_DISCOUNT: Final = (0.5, 1.0)
#: So many times its share, a divergence leaves nothing else to learn: the largest weight that
#: beta-VAE was tried with (Higgins and others, 2017).
_LARGEST_WEIGHT: Final = 250
#: Nodes of a sum of exponentials and squares, as the divergence of two normal distributions is.
_OF_DIVERGENCE: Final = 16


class Terms(FirstOfKind):
    """Follows what losses are computed of; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        self._kinds: Marks[str] = Marks()
        #: What is not finite, and what was computed of it: the kind of its finding, what that
        #: tells, the line. It holds until somebody changes the numbers.
        self._nan: NumberMarks[tuple[str, tuple[str, ...], str | None]] = NumberMarks()
        #: Was an overlap of what a model gives and its targets computed?
        self._has_overlap = False
        self.derives = False
        """Are derivatives of what models give part of a loss, as those of an equation?"""

    def gave(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of PyTorch gave a tensor."""
        name = name_of(func).strip("_")
        kind = _GIVES.get(name) or _GIVES_PROBABILITIES.get(name)
        if kind is not None:
            self._kinds.put(result, kind)
        given = tensors_among(args[:1])
        if not given:
            return
        if name in _PASS_ON and (kind := self._kinds.of(given[0])) is not None:
            self._kinds.put(result, kind)
        node = result.grad_fn
        if node is None:
            if name in _DEVIATIONS and _is_of_one(given[0], args, kwargs, result):
                told = name, shape_of(given[0])
                self._nan.put(result, ("deviation_of_one", told, self._place()))
            elif name in _INVERTS and (zeros := zeros_inverted(name, args, result)) is not None:
                self._nan.put(result, ("zeros_inverted", zeros, self._place()))
            elif name in _COPIES and holds_nan(given[0], result):
                self._nan.put(result, ("nan_copied", (shape_of(result),), self._place()))
            elif self._nan:
                self._follow_nan(name, args, result)
            return
        if self._nan and (known := self._nan_used(name, args)) is not None:
            node.metadata[_MARK] = known
        if name in _LOGARITHMS and may_be_negative(given[0].grad_fn):
            self._mark(node, "log_of_output", name)
        elif name in _LOGARITHMS and _is_clipped(_behind_scale(given[0].grad_fn)):
            self._mark(node, "log_of_zero", name)
        elif name in _ROOTS or (name in _POWERS and args[1:2] == (0.5,)):
            self._look_at_root(node, given[0].grad_fn, name)
        elif name in _QUOTIENTS and (zeros := zeros_inverted(name, args, result)) is not None:
            self._mark(node, "zeros_inverted", *zeros)
        elif name == "mean" and not given[0].numel():
            self._mark(node, "loss_of_nothing", name)
        elif name in _QUOTIENTS and _is_overlap(node):
            self._has_overlap = True
            node.metadata[_OVERLAP] = self._place() or ""
        elif name in _ANGLES and (how := _beyond(given[0].grad_fn)) is not None:
            self._mark(node, "angle_beyond", name, how)
        elif name in _DEVIATIONS and _is_of_one(given[0], args, kwargs, result):
            self._mark(node, "deviation_of_one", name, shape_of(given[0]))
        elif name == "exp" and not result.dim() and _is_of_mean(node):
            self._mark(node, "focal_of_mean")

    def _nan_among(self, args: Sequence[Any]) -> tuple[str, tuple[str, ...], str | None] | None:
        return next(filter(None, map(self._nan.of, tensors_among(args))), None)

    def _nan_used(
        self, name: str, args: Sequence[Any]
    ) -> tuple[str, tuple[str, ...], str | None] | None:
        """What is not finite among what is used; of what a mask may leave out only where it is
        multiplied, which its gradient is, too."""
        known = self._nan_among(args)
        is_left_out = known is not None and known[0] != "deviation_of_one"
        return None if is_left_out and name not in _PRODUCTS else known

    def _follow_nan(self, name: str, args: Sequence[Any], result: Any) -> None:
        if name in _WITHOUT_NAN or not result.is_floating_point():
            return
        if (known := self._nan_among(args)) is not None and not is_finite(result):
            self._nan.put(result, known)

    def _look_at_root(self, node: Any, made: Any, name: str) -> None:
        if may_be_negative(made):
            self._mark(node, "root_of_output", name)
        elif _is_distance_to_itself(made):
            self._mark(node, "root_at_zero", name, "itself")
        elif _is_clipped(made):
            self._mark(node, "root_at_zero", name, "clipped")

    def wraps(self, left: Any, right: Any, result: Any) -> None:
        """A sum, a difference or a product was computed: one of bytes, that goes below 0?"""
        both = left, right
        if "bytes_wrap" in self._found or getattr(result, "dtype", None) != torch.uint8:
            return
        if not all(
            isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 for tensor in both
        ):
            return
        if result.device.type != "cpu" or not result.numel() or not called_by_user():
            return
        with no_dispatch():
            below = left < right
            is_wrapped = bool(below.any()) and torch.equal(result, left - right)
            share = float(below.float().mean())
        if is_wrapped:
            self._note("bytes_wrap", f"{share:.3g}", shape_of(result))

    def _mark(self, node: Any, kind: str, *text: str) -> None:
        if kind not in self._found:
            node.metadata[_MARK] = kind, text, self._place()

    def backward(self, root: Any, nodes: Iterable[Any]) -> None:
        """A backward pass begins from a node, and goes through these."""
        for node in nodes:
            if (marked := node.metadata.get(_MARK)) is not None:
                kind, told, place = marked
                self._note(kind, *told, place=place or "")
        for term in _added(root) if self._has_overlap else ():
            if (at := term.metadata.get(_OVERLAP)) is not None:
                self._note("overlap_minimized", place=at)
        if "divergence_dominates" not in self._found and (times := _divergence(root)) is not None:
            self._note("divergence_dominates", f"{times:.3g}")

    def comparing(self, name: str, output: Any, target: Any) -> None:
        """A loss function compares an output with a target."""
        if name not in ELEMENTWISE or not torch.is_grad_enabled() or self.derives:
            return
        both = output, target
        if not all(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in both):
            return
        if any(map(_bootstraps, both)) and _have_parameters_in_common(*both):
            self._note("target_trained", name)

    def diverging(self, target: Any, log_target: Any) -> None:
        """``kl_div`` is called, with a target that it is told are logarithms, or are none."""
        kind = self._kinds.of(target) if isinstance(target, torch.Tensor) else None
        if kind is not None and (kind == "logarithms") != bool(log_target):
            self._note("target_of_logs", kind)

    def transcribing(self, inputs: Any, targets: Any, leaves_out: Any) -> None:
        """``ctc_loss`` is called with so many steps and so many labels of each sample."""
        steps, labels = _numbers(inputs), _numbers(targets)
        if steps is None or labels is None or len(steps) != len(labels) or not steps:
            return
        longer = [(a, b) for a, b in zip(steps, labels, strict=True) if b > a]
        if longer:
            limit = min(longer)
            told = len(longer), len(steps), *limit, "out" if leaves_out else "in"
            self._note("labels_too_long", *told)


def _numbers(lengths: Any) -> list[int] | None:
    """Lengths that the host has."""
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu" or lengths.dim() != 1:
            return None
        with no_dispatch():
            return [int(length) for length in lengths.tolist()]
    if isinstance(lengths, list | tuple) and all(isinstance(length, int) for length in lengths):
        return list(lengths)
    return None


def may_be_negative(node: Any) -> bool:
    """Is it a layer's output, which may be any number, as it is, scaled, or with a number added?"""
    for _ in range(_DEPTH):
        if node is None:
            return False
        name = operator_of(node)
        if name.startswith(_LAYERS):
            return _is_free(node)
        if (product := product_of(node)) is not None:
            node = product
        elif name.startswith((*_ADDS, *_SCALES)):
            node = only_operand(node)
        elif name.startswith(_SAME):
            node = first_operand(node)
        else:
            return False
    return False


def _is_distance_to_itself(node: Any) -> bool:
    """Is it the sum of ``(x[:, None] - x[None, :]) ** 2`` over features, 0 of a row and itself?"""
    if node is None or not operator_of(node).startswith("Sum"):
        return False
    square = first_operand(node)
    name = operator_of(square) if square is not None else ""
    if not name.startswith(("Pow", "Mul")):
        return False
    factors = set(operands(square))
    if len(factors) != 1 or (name == "Pow" and saved_exponent(square) != 2):
        return False
    difference = factors.pop()
    if not operator_of(difference).startswith("Sub"):
        return False
    sides = [_behind_views(each) for each, _ in difference.next_functions]
    sizes = [sizes_of(each) for each in (difference, sides[0]) if each is not None]
    if sides[0] is None or any(side is not sides[0] for side in sides) or len(sizes) != 2:
        return False
    return math.prod(sizes[0] or ()) > math.prod(sizes[1] or ())


def _behind_views(node: Any) -> Any:
    """The first node that is no view of all of a tensor's numbers."""
    for _ in range(_DEPTH):
        if node is None:
            return None
        made = first_operand(node)
        name = operator_of(node)
        is_whole = (
            name.startswith("Slice") and made is not None and sizes_of(made) == sizes_of(node)
        )
        if not is_whole and not name.startswith(_VIEWS):
            return node
        node = made
    return node


def _behind_scale(node: Any) -> Any:
    """What a node is a multiple of, as a share of a sum is, or single numbers of."""
    for _ in range(_DEPTH):
        if node is None or not operator_of(node).startswith((*_SAME, "Mul", "Div")):
            return node
        node = only_operand(node) or first_operand(node)
    return node


def _is_clipped(node: Any) -> bool:
    """Is it 0 where what it is of was below 0?"""
    node = _behind_views(node)
    if node is None or not operator_of(node).startswith(_CLIPS):
        return False
    return operator_of(node) == "Relu" or saved_limits(node)[0] == 0


def _beyond(node: Any) -> str | None:
    """How the cosine that an angle is computed of may be 1 or more: "unclamped", or "at 1", where
    the derivative is infinite; ``None``: it may not, or it is none that was computed."""
    for _ in range(_DEPTH):
        if node is None:
            return None
        name = operator_of(node)
        if name.startswith(("Clamp", "Hardtanh")):
            least, largest = saved_limits(node)
            is_at = (least is not None and least <= -1) or (largest is not None and largest >= 1)
            return "at 1" if is_at else None
        value = number_of(saved_other(node)) if name.startswith("Mul") else None
        if value is not None and _SHRINKS[0] <= abs(value) < _SHRINKS[1]:
            return None
        if name.startswith(_COSINES):
            return "unclamped"
        if not name.startswith((*_SAME, "Abs", "Neg")):
            return None
        node = first_operand(node)
    return None


def _is_free(layer: Any) -> bool:
    """Are a layer's weights a parameter as it is, with no function (softplus, exp) around it?"""
    for operand in operands(layer):
        leaf = first_operand(operand) if operand.name().startswith(("T", "Transpose")) else operand
        weight = getattr(leaf, "variable", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() > 1:
            return True
    return False


def _is_of_mean(exponential: Any) -> bool:
    """Is it exp(-x) of a loss that has averaged over a batch?"""
    node = first_operand(exponential)
    if node is None or not node.name().startswith(("Neg", "Mul")):
        return False
    node = first_operand(node)
    if node is not None and node.name().startswith("Mean"):
        node = first_operand(node)
    if node is None or not node.name().startswith(_LOSSES) or is_mean(node) is False:
        return False
    return next(iter(_given(node)), 1) > 1


def _given(node: Any) -> tuple[int, ...]:
    """Sizes of the first tensor that a node was computed of."""
    made = next(iter(operands(node)), None)
    return (sizes_of(made) if made is not None else None) or ()


def _is_of_one(
    given: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor
) -> bool:
    """Is a deviation from the mean taken over a single number, by which one less is divided?"""
    if given.numel() != result.numel() or not given.numel():
        return False
    told = [kwargs[name] for name in ("correction", "unbiased") if name in kwargs]
    told += [argument for argument in args[1:] if isinstance(argument, bool)][:1]
    return all(each is None or bool(each) for each in told)


def _bootstraps(target: torch.Tensor) -> bool:
    """Is it data and a part of what a layer gives of the next state: ``r + 0.99 * q(s).max()``?"""
    node, is_added, is_discounted = target.grad_fn, False, False
    for _ in range(_DEPTH):
        if node is None:
            return False
        name = operator_of(node)
        if name.startswith(_LAYERS):
            return is_added and is_discounted
        if (product := product_of(node)) is not None:
            node = product
        elif name.startswith("Add"):
            is_added, node = True, only_operand(node)
        elif name.startswith("Mul"):
            value = number_of(saved_other(node))
            is_discounted |= value is not None and _DISCOUNT[0] <= value < _DISCOUNT[1]
            node = only_operand(node)
        elif name.startswith((*_SAME, *_LARGEST)):
            node = first_operand(node)
        else:
            return False
    return False


def _have_parameters_in_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    sets = [
        {id(parameter) for parameter in parameters_of(nodes_of(it.grad_fn) or ())}
        for it in (one, other)
    ]
    return bool(sets[0] & sets[1])


def _divergence(root: Any) -> float | None:
    """How many times its share a divergence has that is summed over a batch, beside an error that
    is averaged over the batch and all numbers of a sample; ``None``: there is no such pair, or it
    is not above what is usual."""
    errors, sums = [], []
    for weight, node in _terms_of(root):
        name = operator_of(node)
        made = only_operand(node)
        is_error = made is not None and made.name().startswith((*_LOSSES, "Pow"))
        if weight and (
            (name.startswith(_LOSSES) and is_mean(node)) or (name.startswith("Mean") and is_error)
        ):
            errors.append(math.prod(_given(node)) / weight)
        elif name.startswith("Sum") and not (sizes_of(node) or ()) and _is_of_normals(node):
            sums.append(weight)
    if not errors or not sums:
        return None
    times = max(sums) * max(errors)
    return times if times >= _LARGEST_WEIGHT else None


def _terms_of(root: Any) -> Iterator[tuple[float, Any]]:
    """The terms of a loss, each with the number by which it is multiplied, without its sign."""
    waiting = [(1.0, root)]
    for _ in range(_TERMS):
        if not waiting:
            return
        weight, node = waiting.pop()
        if node is None:
            continue
        name = operator_of(node)
        if name.startswith(_ADDS):
            waiting += [(weight, operand) for operand in operands(node)]
        elif name.startswith(("Mul", "Div")):
            value = number_of(saved_other(node))
            if value:
                scale = abs(value) if name.startswith("Mul") else 1 / abs(value)
                waiting.append((weight * scale, only_operand(node)))
        elif name.startswith("Neg"):
            waiting.append((weight, only_operand(node)))
        else:
            yield weight, node


def _added(root: Any) -> Iterator[Any]:
    """The terms of a loss that are added to it, none that is subtracted."""
    return (node for node in walk(root, following=_added_to, most=_TERMS) if not _added_to(node))


def _added_to(node: Any) -> list[Any]:
    """What is added to make a node's result, as it is or multiplied by a number above 0."""
    name = operator_of(node)
    if name.startswith("Sub") and len(node.next_functions) == 2:
        return [first_operand(node)]
    if name.startswith("Add"):
        return operands(node)
    return [only_operand(node)] if name.startswith("Mean") or _is_scaled_up(node) else []


def _is_scaled_up(node: Any) -> bool:
    """Is it a product with, or a quotient by, a number above 0?"""
    value = number_of(saved_other(node)) if operator_of(node).startswith(("Mul", "Div")) else None
    return value is not None and value > 0


def _is_overlap(ratio: Any) -> bool:
    """Is it ``2 * (p * t).sum() / (p.sum() + t.sum())``?"""
    if operator_of(ratio) != "Div" or len(ratio.next_functions) != 2:
        return False
    above, below = (each for each, _ in ratio.next_functions)
    above = (
        only_operand(above) if above is not None and operator_of(above).startswith("Add") else above
    )
    if above is None or not operator_of(above).startswith("Mul"):
        return False
    both = only_operand(above)
    product = (
        only_operand(both) if both is not None and operator_of(both).startswith("Sum") else None
    )
    is_twice = number_of(saved_other(above)) == 2
    if not is_twice or product is None or not operator_of(product).startswith("Mul"):
        return False
    output, way = only_operand(product), _arithmetic(below, (*_ADDS, "Sum", "Pow", "Mul"))
    return any(node is output for node in way)


def _is_of_normals(total: Any) -> bool:
    """Is it a sum over samples of ``1 + log_var - mean ** 2 - exp(log_var)``?"""
    made = first_operand(total)
    if made is None or len(sizes_of(made) or ()) < 2:
        return False
    names = {operator_of(node) for node in _arithmetic(made, (*_ADDS, *_SCALES))}
    return {"Exp", "Pow"} <= names


def _arithmetic(root: Any, through: tuple[str, ...]) -> Iterator[Any]:
    """The nodes of a formula, none behind those that are of another operator than these."""

    def following(node: Any) -> list[Any]:
        return operands(node) if operator_of(node).startswith(through) else []

    return walk(root, following=following, most=_OF_DIVERGENCE)
