"""What losses over classes are given as targets: none that counts, several classes at once, the
tokens that the model was given, moved by one, while its attention sees all of them, or as they are.
And a divergence that is averaged over what it is the sum of.

Numbers of a schedule that each sample gets by a step drawn for it, as in diffusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainfit.hooks.losses import ELEMENTWISE, VIEWS, gives_layer, shape_of
from trainfit.hooks.provenance.cuts import FirstOfKind, Marks, NumberMarks, tensors_among
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import behind, operands, operator_of, walk
from trainfit.torch_private.operators import no_dispatch

#: What leaves the numbers of targets as they are.
_AS_THEY_ARE: Final = {
    *("to", "cuda", "float", "type", "contiguous", "clone", "detach", "view", "reshape"),
    *("squeeze", "unsqueeze", "type_as", "requires_grad_"),
}
#: Losses of probabilities, whose gradient goes to what they are given first.
_OF_PROBABILITIES: Final = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
#: Losses whose targets are 1 and -1, and which have no term, or a constant one, for 0.
OF_PAIRS: Final = (
    *("cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    "soft_margin_loss",
)
#: Nodes that compute something of each step for itself, and those of a layer's weights.
_BY_STEP: Final = (
    *(*VIEWS, "Transpose", "Permute", "Clone", "ToCopy", "Addmm"),
    *("Mm", "Add", "NativeDropout", "FusedDropout", "NativeLayerNorm", "Relu", "Gelu", "Tanh"),
    *("LogSoftmax", "Linear"),
)
_MOVES: Final = ("Cat", "ConstantPadNd", "Roll", "Flip", "Index", "Gather")
_OF_WEIGHTS: Final = ("torch::autograd::AccumulateGrad", "TBackward", "ExpandBackward")
#: Where the node of an embedding keeps the tokens that it is of; it goes with the node.
_MARK: Final = "trainfit_tokens"
#: Nodes between an embedding and the first attention: sums with positions, norms, a dropout, views,
#: a projection.
_NODES: Final = 64
#: Of targets of single numbers, the mean that a layer does not get to: its outputs begin near 0,
#: and a step of Adam moves a bias by the learning rate, 0.001 as a rule, a million times for this.
_LARGE: Final = 1000
_MOST_TARGETS: Final = 1 << 16
#: Numbers of targets that are looked at (some ms on a core), and how far above 1 rounding and
#: interpolation leave a probability.
_MOST_NUMBERS: Final = 1 << 22
_ROUNDED: Final = 0.01
#: What the nodes of activations give, and those that leave numbers as they are; the share of
#: targets outside of that from which it is told: single ones may be noise.
_RANGES: Final = {
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
}
_VIEWS: Final = (*VIEWS, "Squeeze", "Unsqueeze", "Select", "ToCopy")
_MANY_OUTSIDE: Final = 0.05
#: Tokens of a row from which it is told that labels are the tokens moved by one, and how many
#: different ones there must be: a row of one token is like itself in any case.
_LEAST_TOKENS: Final = 8
_LEAST_KINDS: Final = 4
_DIMENSIONS: Final = 2
#: Numbers of one sample from which it matters that a divergence is divided by them.
_LEAST_CLASSES: Final = 4


class _UnmaskedTokens(NamedTuple):
    """Tokens that were attended to without a mask, and the line that did."""

    tokens: torch.Tensor
    place: str | None


#: Functions that make rows of positions.
_FLATTEN: Final = {"view", "reshape", "flatten"}


class Targets(FirstOfKind):
    """Follows the targets of losses; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        #: Are functions told of? In a real run they are not: nothing is followed.
        self._is_told = False
        #: Batches of a DataLoader that have several classes in one row: how many at most.
        self._several: NumberMarks[int] = NumberMarks()
        #: Those of large numbers: their mean.
        self._large: NumberMarks[float] = NumberMarks()
        #: What was flattened to a row for each position, by the shape that it had.
        self._flattened: Marks[tuple[int, ...]] = Marks()
        #: The numbers of a batch's tensors, which the GPU's copies have as well: a sample of many.
        self._numbers: NumberMarks[torch.Tensor] = NumberMarks()
        #: Of the pass that goes on: tokens that were attended to with no mask, and whether others
        #: had one.
        self._unmasked: list[_UnmaskedTokens] = []
        self._is_masked = False
        #: … and tokens that were attended to with a mask for those that follow.
        self._causal: list[torch.Tensor] = []
        #: … and those that a recurrent layer went over.
        self._recurring: list[torch.Tensor] = []

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """A DataLoader gave a batch with these."""
        for tensor in tensors if self._is_told else ():
            if tensor.device.type != "cpu" or not tensor.is_floating_point() or not tensor.numel():
                continue
            with no_dispatch():
                every = -(-tensor.numel() // _MOST_TARGETS)
                self._numbers.put(tensor, tensor.reshape(-1)[::every].clone())
            if tensor.dim() <= _DIMENSIONS and tensor.numel() <= _MOST_TARGETS:
                with no_dispatch():
                    mean = float(tensor.abs().mean())
                if mean >= _LARGE:
                    self._large.put(tensor, mean)
            if tensor.dim() != _DIMENSIONS or min(tensor.shape) < 2:
                continue
            with no_dispatch():
                ones = tensor == 1
                maximum = int(ones.sum(1).max())
                is_of_both = maximum > 1 and bool((ones | (tensor == 0)).all())
            if is_of_both:
                self._several.put(tensor, maximum)

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch with this name gave a tensor."""
        self._is_told = True
        if name in _FLATTEN and result.dim() in (1, 2) and tensors_among(args[:1]):
            self._flattened.put(result, tuple(args[0].shape))
        if name not in _AS_THEY_ARE and name != "embedding":
            return  # as most are: this is asked of each function
        given = tensors_among(args[:2])
        if name == "embedding" and result.grad_fn is not None:
            # A copy on the host: the mark is not to keep memory of the GPU.
            whole = [_numbers_of(each) for each in given if not each.is_floating_point()]
            if whole and whole[0] is not None and whole[0].dim() == _DIMENSIONS:
                node: Any = result.grad_fn
                node.metadata[_MARK] = whole[0]
        if not self._several and not self._large and not self._numbers:
            return
        for tensor in given[:1]:
            if (most := self._several.of(tensor)) is not None:
                self._several.put(result, most)
            if (numbers := self._numbers.of(tensor)) is not None and result.is_floating_point():
                self._numbers.put(result, numbers)
            if (mean := self._large.of(tensor)) is not None:
                self._large.put(result, mean)

    def attends(self, query: Any, key: Any, mask: Any, *, is_causal: bool) -> None:
        """Attention is about to be computed."""
        if not torch.is_grad_enabled() or "sees_ahead" in self._found:
            return
        if mask is not None or is_causal:
            self._is_masked = True
            is_square = (
                isinstance(mask, torch.Tensor) and mask.dim() == 2 and len({*mask.shape}) == 1
            )
            known = tokens_of(query, in_place=True) if is_causal or is_square else None
            if known is not None and all(tensor is not known for tensor in self._causal):
                self._causal.append(known)
            return
        tokens = tokens_of(query)
        is_to_itself = query is key or tokens_of(key) is tokens
        if (
            tokens is not None
            and is_to_itself
            and all(each.tokens is not tokens for each in self._unmasked)
        ):
            self._unmasked.append(_UnmaskedTokens(tokens, self._place()))

    def recurs(self, module: Any, x: Any) -> None:
        """A recurrent layer is about to be called."""
        if module.bidirectional or not torch.is_grad_enabled() or not isinstance(x, torch.Tensor):
            return
        if (known := tokens_of(x, in_place=True)) is not None:
            self._recurring.append(known)

    def diverging(self, output: Any, *, averages: bool) -> None:
        """``kl_div`` is called: does it average over all numbers, those of one sample, too?"""
        if not averages or not isinstance(output, torch.Tensor) or output.dim() < _DIMENSIONS:
            return
        own = output.numel() // max(1, output.shape[0])
        if output.requires_grad and own >= _LEAST_CLASSES:
            self._note("divergence_averaged", shape_of(output), own)

    def _look_at_range(self, name: str, output: torch.Tensor, target: torch.Tensor) -> None:
        """Are there targets that the last activation never gives?"""
        by = _last_activation(output)
        if by not in _RANGES or "targets_unreachable" in self._found:
            return
        numbers = self._numbers.of(target)
        if numbers is None:
            numbers = _numbers_of(target)
        if numbers is None or not 0 < numbers.numel() <= _MOST_NUMBERS:
            return
        least, largest = _RANGES[by]
        with no_dispatch():
            outside = (numbers < least - _ROUNDED) | (numbers > largest + _ROUNDED)
            share = float(outside.float().mean())
            ends = [f"{float(each):.4g}" for each in numbers.aminmax()]
        if share >= _MANY_OUTSIDE:
            self._note("targets_unreachable", name, by.lower(), *ends, f"{share:.3f}")

    def probable(self, name: str, output: Any, target: Any) -> None:
        """A loss of probabilities is called, of all numbers alike: are the targets such?"""
        if name not in _OF_PROBABILITIES or "targets_outside" in self._found:
            return
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        numbers = _numbers_of(target) if output.requires_grad and not target.requires_grad else None
        if numbers is None or not 0 < numbers.numel() <= _MOST_NUMBERS:
            return
        with no_dispatch():
            least, largest = (float(each) for each in numbers.aminmax())
        if least < 0 or largest > 1 + _ROUNDED:
            self._note("targets_outside", name, f"{least:.4g}", f"{largest:.4g}")

    def pairing(self, name: str, target: Any) -> None:
        """A loss of :data:`OF_PAIRS` is called with these targets, of 1 and -1."""
        known = _numbers_of(target) if isinstance(target, torch.Tensor) else None
        if known is None or not 1 < known.numel() <= _MOST_TARGETS or not torch.is_grad_enabled():
            return
        with no_dispatch():
            zeros, ones = int((known == 0).sum()), int((known == 1).sum())
        if zeros and zeros + ones == known.numel():
            self._note("targets_of_zero", name, zeros, known.numel())

    def transcribing(self, targets: Any, lengths: Any, blank: Any) -> None:
        """``ctc_loss`` is called with these labels, as many of each row as its length says."""
        labels = _numbers_of(targets) if isinstance(targets, torch.Tensor) else None
        counts = _numbers_of(lengths) if isinstance(lengths, torch.Tensor) else None
        if counts is None and isinstance(lengths, list | tuple):
            counts = torch.tensor(lengths)
        if labels is None or counts is None or not counts.numel() or not isinstance(blank, int):
            return
        with no_dispatch():
            if labels.dim() == _DIMENSIONS and len(counts) == len(labels):
                used = torch.arange(labels.shape[1])[None, :] < counts[:, None]
                labels = labels[used]
            blanks = int((labels == blank).sum())
        if blanks:
            self._note("blank_in_labels", blank, blanks, labels.numel())

    def comparing(
        self, name: str, output: Any, target: Any, ignored: Any, *, averages: bool
    ) -> None:
        """A loss function of torch.nn.functional is called, which leaves ``ignored`` out."""
        unmasked, self._unmasked = self._unmasked, []
        is_masked, self._is_masked = self._is_masked, False
        causal, self._causal = self._causal, []
        recurring, self._recurring = self._recurring, []
        if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
            return
        if averages and not output.numel() and output.requires_grad:
            self._note("loss_of_nothing", name)
        if name == "cross_entropy":
            self._look_at_order(output, target)
        if name in _OF_PROBABILITIES and target.requires_grad and not output.requires_grad:
            self._note("arguments_swapped", name)
        if name in ELEMENTWISE and output.requires_grad and not target.requires_grad:
            self._look_at_range(name, output, target)
        mean = self._large.of(target) if name in ELEMENTWISE else None
        if mean is not None and output.requires_grad and gives_layer(output):
            self._note("targets_large", name, f"{mean:,.0f}")
        if name != "cross_entropy" or not output.requires_grad:
            return
        if target.is_floating_point():
            most = self._several.of(target)
            if most is not None and target.shape == output.shape:
                self._note("several_classes", most, shape_of(target))
            return
        labels = _numbers_of(target)
        if labels is None or not labels.numel():
            return
        causal += recurring if recurring and _is_of_steps(output.grad_fn) else []
        with no_dispatch():
            if averages and isinstance(ignored, int) and bool((labels == ignored).all()):
                self._note("labels_ignored", ignored, shape_of(target))
            elif causal and all(_are_same(labels, each) for each in causal):
                self._note("labels_not_shifted", shape_of(target))
            elif not is_masked:
                for each in unmasked:
                    if _are_next(labels, each.tokens):
                        self._note("sees_ahead", place=each.place or "")

    def _look_at_order(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Were both flattened, one with its samples first and one with its positions?"""
        given, wanted = self._flattened.of(output), self._flattened.of(target)
        if given is None or wanted is None or (len(given), len(wanted)) != (3, 2):
            return
        if given[:2] == wanted[::-1] and given[0] != given[1] and output.requires_grad:
            told = ("×".join(map(str, each)) for each in (given, wanted))
            self._note("targets_misordered", *told)


def _last_activation(output: torch.Tensor) -> str:
    """The node of the activation that gave these numbers, as they are."""
    node = behind(output.grad_fn, _VIEWS, most=_NODES)
    return "" if node is None else operator_of(node)


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor of the host, or of a simulated one where they are known."""
    if tensor.device.type == "cpu":
        return tensor
    content: Callable[[], torch.Tensor | None] | None = getattr(tensor, "_content", None)
    return None if content is None else content()


def tokens_of(query: Any, *, in_place: bool = False) -> torch.Tensor | None:
    """The tokens whose embedding is attended to, at the first layer; ``None``: not known. With
    ``in_place`` those that nothing moves to another place (a model may shift them by itself)."""

    def following(node: Any) -> list[Any]:
        return [] if in_place and node.name().startswith(_MOVES) else operands(node)

    for node in walk(getattr(query, "grad_fn", None), following=following, most=_NODES):
        tokens: torch.Tensor | None = node.metadata.get(_MARK)
        if tokens is not None and tokens.shape[-1] in query.shape[:-1]:
            return tokens
    return None


def _are_next(labels: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Is each label the token that follows in its row?"""
    rows, columns = tokens.shape
    if columns < _LEAST_TOKENS or len(tokens[0].unique()) < _LEAST_KINDS:
        return False
    following = tokens[:, 1:]
    if labels.numel() == tokens.numel():
        given = labels.reshape(rows, columns)[:, :-1]
    elif labels.numel() == following.numel():
        given = labels.reshape(rows, columns - 1)
    else:
        return False
    # Labels of padding may be left out.
    same = given == following
    is_out = given < 0
    return bool((same | is_out).all()) and int(same.sum()) >= _LEAST_TOKENS


def _is_of_steps(node: Any) -> bool:
    """Is it made of a recurrent layer's outputs, each step's of its own, not of its last state?"""
    for _ in range(_NODES):
        if node is None or not node.name().startswith(_BY_STEP):
            return False
        edges = [function for function in node.next_functions if function[0] is not None]
        of_tensors = [edge for edge in edges if not edge[0].name().startswith(_OF_WEIGHTS)]
        if len(of_tensors) != 1:
            return False
        node, output = of_tensors[0]
        if "Rnn" in node.name():
            return bool(output == 0)
    return False


def _are_same(labels: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Is each label the token at its own place?"""
    if labels.numel() != tokens.numel() or len(tokens[0].unique()) < _LEAST_KINDS:
        return False
    given = labels.reshape(tokens.shape)
    same = given == tokens
    return bool((same | (given < 0)).all()) and int(same.sum()) >= _LEAST_TOKENS


_DRAW: Final = {"randint", "randint_like"}
_CHOOSE: Final = {"getitem", "index_select", "gather", "take"}
#: What leaves one number for each sample, in one dimension.
_KEEP: Final = {
    *("sqrt", "rsqrt", "pow", "exp", "neg", "rsub", "sub", "add", "mul", "div", "truediv", "float"),
    *("to", "square", "clone", "cuda", "reciprocal", "sigmoid", "log", "clamp", "half", "type"),
}
#: Dimensions of what is noised, at least: samples, channels and positions.
_NOISED_DIMENSIONS: Final = 3


class DrawnSteps:
    """Follows steps that are drawn for the samples of a batch to what is multiplied by them."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._drawn: Marks[bool] = Marks()
        self._of_samples: Marks[bool] = Marks()
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Shapes of both, and the line that multiplies along another dimension."""
        if self._found is not None:
            yield self._found

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if self._found is not None or result.dim() != 1:
            return
        name = name.strip("_")
        if name in _DRAW:
            self._drawn.put(result, True)
            return
        tensors = [tensor for tensor in _flat(args) if isinstance(tensor, torch.Tensor)]
        if name in _KEEP and any(self._drawn.of(tensor) for tensor in tensors):
            self._drawn.put(result, True)
            return
        chosen = name in _CHOOSE and any(self._drawn.of(tensor) for tensor in tensors[1:])
        if chosen or (name in _KEEP and any(self._of_samples.of(tensor) for tensor in tensors)):
            self._of_samples.put(result, True)

    def computed(self, left: Any, right: Any, result: Any) -> None:
        """A sum, a difference or a product was computed."""
        if self._found is not None or not self._of_samples:
            return
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            return
        factor, other = (left, right) if left.dim() < right.dim() else (right, left)
        if factor.dim() != 1 or other.dim() < _NOISED_DIMENSIONS or not self._of_samples.of(factor):
            return
        if factor.shape[0] == other.shape[0] == other.shape[-1] > 1:
            self._found = Misuse.of(
                "samples_over_width", shape_of(factor), shape_of(other), place=self._place()
            )


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for argument in args:
        yield from argument if isinstance(argument, list | tuple) else (argument,)
