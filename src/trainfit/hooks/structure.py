"""How a model is put together, and what of it is trained: layers with settings of another library,
weights that are tied by their memory alone, parts that are frozen or unfrozen as it trains.

Containers of layers that have one and the same layer several times: ``[Block()] * 6``.

That is told where each passes its result on to the next, as layers of a stack do. One head for the
results of several layers is meant to be one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from trainfit.hooks.losses import shape_of
from trainfit.hooks.owners import optimized, tensors_of
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import only_operand, operands, walk
from trainfit.torch_private.modules import BatchNorm
from trainfit.torch_private.operators import storage_key

#: From so much on, a BatchNorm's momentum is what other libraries keep of the old statistics; with
#: exactly 1 a script asks for those of the last batch.
_KEPT_ELSEWHERE: Final = 0.9
#: Looks at steps that show frozen tensors with gradients.
_LOOKS: Final = 2
#: Learning rates from which nothing is learned: of Adam and its like a step moves each number by
#: about as much, of SGD by that times its gradient.
_LARGEST_RATES: Final = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"), 1.0),
    "SGD": 100.0,
}
#: Weights of one value that are no choice of one layer.
_LEAST_OF_ONE_VALUE: Final = 2
Names = Mapping[int, str]


def forgetful_norms(models: Iterable[Any]) -> list[tuple[str, float]]:
    """Names of BatchNorm layers in training whose running statistics are nearly those of the last
    batch, and their momentum."""
    return [
        (name or type(part).__name__, part.momentum)
        for model in models
        for name, part in model.named_modules()
        if isinstance(part, BatchNorm)
        and part.training
        and part.track_running_stats
        and isinstance(part.momentum, float)
        and _KEPT_ELSEWHERE <= part.momentum < 1
    ]


def frozen_norms(
    models: Iterable[Any],
    had: Mapping[int, bool],
    ever: Collection[int],
    changed: Callable[[Any], Any],
) -> list[str]:
    """Names of BatchNorm layers whose statistics follow the batches, though their weights are
    frozen (none of those that ``ever`` needed a gradient), in models that are trained. What the
    script has ``changed`` itself is not frozen: an encoder that follows another (MoCo, BYOL)."""
    return [
        name or type(part).__name__
        for model in models
        if any(had.get(id(parameter)) for parameter in model.parameters())
        for name, part in model.named_modules()
        if isinstance(part, BatchNorm)
        and part.training
        and part.track_running_stats
        and part.affine
        and not any(id(parameter) in ever or changed(parameter) for parameter in part.parameters())
    ]


def idle_checkpointing(models: Iterable[Any], had: Mapping[int, bool]) -> tuple[str, int] | None:
    """The class of a model that is trained in evaluation mode, and how many of its parts have
    checkpointing on, which Transformers' and Diffusers' apply in training mode only."""
    for model in models:
        parts = [module for module in model.modules() if vars(module).get("gradient_checkpointing")]
        idle = [part for part in parts if not part.training]
        trained = any(had.get(id(parameter)) for part in idle for parameter in part.parameters())
        if parts and len(idle) == len(parts) and trained:
            return type(model).__name__, len(parts)
    return None


def searches_in_vain(wrappers: Iterable[Any], had: Mapping[int, bool]) -> Any | None:
    """A DistributedDataParallel that looks for parameters without a gradient, where all had one."""
    for wrapper in wrappers:
        needing = [
            parameter for parameter in wrapper.module.parameters() if parameter.requires_grad
        ]
        is_asked = getattr(wrapper, "find_unused_parameters", False) is True
        if is_asked and needing and all(had.get(id(parameter)) for parameter in needing):
            return wrapper
    return None


def of_one_value(
    optimizer: Any, given: Mapping[int, str | None], names: Mapping[int, str]
) -> tuple[str, str, str, str | None] | None:
    """Are all weights of an optimizer among those that were given one value each: how many they
    are, the name of the first with several units, how many these are, and the line?

    With weights of which some are random, those of one value may be meant: the last layer of a
    block that begins as nothing (LoRA, ControlNet), which learns as what it gets differs.
    """
    weights = [tensor for tensor in tensors_of(optimizer) if tensor.dim() > 1]
    if len(weights) < _LEAST_OF_ONE_VALUE or any(id(weight) not in given for weight in weights):
        return None
    first = next((weight for weight in weights[:-1] if weight.shape[0] > 1), None)
    if first is None:
        return None
    name = names.get(id(first), shape_of(first))
    return str(len(weights)), name, str(first.shape[0]), given[id(first)]


def large_rate(optimizer: Any, names: Names) -> float | None:
    """A learning rate with which the first step of PyTorch's own optimizer puts a model's weights
    far from where they are; ``None``: it has none, or what it trains are no weights of a model."""
    kind = type(optimizer)
    most = _LARGEST_RATES.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    if most is None or not all(id(tensor) in names for tensor in tensors_of(optimizer)):
        return None
    rates = [group["lr"] for group in optimizer.param_groups]
    known = [float(rate) for rate in rates if isinstance(rate, int | float)]
    return max(known) if known and min(known) >= most and len(known) == len(rates) else None


# ---
# Weights that are tied.

_Place = tuple[int, int, int]


class Ties:
    """Follows pairs of parameters that have one memory, and are two for an optimizer."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._moving: list[tuple[tuple[str, Any], tuple[str, Any]]] = []
        self._moved_at = ""
        self._lost: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Names of two parameters that had one memory until their module was moved."""
        if self._lost is not None:
            yield self._lost

    def moving(self, module: Any) -> None:
        """A module is about to be moved, maybe to another device."""
        if self._lost is None:
            self._moving = list(_tied(module.named_parameters()))
            self._moved_at = (self._place() or "") if self._moving else ""

    def moved(self) -> None:
        """The module was moved."""
        for (one, first), (other, second) in self._moving:
            if memory_of(first) != memory_of(second):
                self._lost = Misuse.of("tie_lost", one, other, "moved", place=self._moved_at)
        self._moving = []


def tied_in(optimizer: Any, names: Names) -> tuple[str, str] | None:
    """Two parameters of an optimizer that have one memory."""
    given = ((names.get(id(tensor), "a parameter"), tensor) for tensor in tensors_of(optimizer))
    for (one, _), (other, _) in _tied(given):
        return one, other
    return None


def _tied(
    parameters: Iterable[tuple[str, Any]],
) -> Iterable[tuple[tuple[str, Any], tuple[str, Any]]]:
    known: dict[_Place, tuple[str, Any]] = {}
    for name, each in parameters:
        place = memory_of(each)
        if place is None or not each.requires_grad:
            continue
        first = known.setdefault(place, (name, each))
        if first[1] is not each:
            yield first, (name, each)


def memory_of(parameter: Any) -> _Place | None:
    """The place of a matrix of a model in memory; ``None``: it is none, or has none."""
    return place_in_memory(parameter) if isinstance(parameter, torch.nn.Parameter) else None


def place_in_memory(tensor: Any) -> _Place | None:
    """The place of a matrix in memory; ``None``: it is none, or has none."""
    if is_lazy(tensor) or tensor.dim() < 2 or not tensor.numel() or tensor.device.type == "meta":
        return None
    key = storage_key(tensor.untyped_storage())
    return key, int(tensor.storage_offset()), tensor.numel()


# ---
# Parts that are frozen, or trained again, from some epoch on.


class Freezing:
    """Follows which parameters need gradients, from epoch to epoch."""

    def __init__(self) -> None:
        self._needing: set[int] | None = None
        self.unfrozen: set[int] = set()
        """Parameters that are frozen no more, until a step with them is over."""
        self.ever: set[int] = set()
        """All that ever needed one: others may be given theirs by the script."""
        self._stale_looks = 0
        #: Frozen tensors that an optimizer goes on to change, and the name of one; tensors that
        #: are frozen no more, and that no optimizer has.
        self._moves: tuple[int, str] | None = None
        self._untrained: tuple[int, str] | None = None

    def found(self) -> Iterator[Misuse]:
        """The misuses of both kinds: frozen parameters that move, and unfrozen ones that are not
        trained."""
        if self._moves is not None:
            yield Misuse.of("frozen_moves", *self._moves)
        if self._untrained is not None:
            yield Misuse.of("unfrozen_untrained", *self._untrained)

    def begins_pass(self, models: Iterable[Any]) -> bool:
        """A pass over the data begins after some steps: do other parameters need gradients?"""
        needing = {
            id(parameter)
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        before, self._needing = self._needing, needing
        self.ever |= needing
        if before is None or before == needing:
            return False
        self.unfrozen = needing - before
        return True

    def first_pass(self, models: Iterable[Any]) -> None:
        """The first step begins, of these models."""
        if self._needing is None:
            self.begins_pass(models)

    def look(self, optimizer: Any, names: Callable[[], Names]) -> None:
        """Look at a step that an optimizer is about to make: it steps every tensor with a gradient.
        ``names`` are asked for where one is told."""
        groups = filter(_moves, optimizer.param_groups)
        stale = [each for group in groups for each in _stale(group) if id(each) in self.ever]
        self._stale_looks = self._stale_looks + 1 if stale else 0
        if self._stale_looks >= _LOOKS:
            self._moves = len(stale), names().get(id(stale[0]), "")

    def stepped(self, models: Iterable[Any], used: Collection[int]) -> None:
        """A step of the optimizers, which have the tensors ``used``, is over."""
        unfrozen, self.unfrozen = self.unfrozen, set()
        left = {
            id(parameter): name
            for model in models
            for name, parameter in model.named_parameters()
            if id(parameter) in unfrozen
            and parameter.grad is not None
            and id(parameter) not in used
        }
        if not left:
            return
        others = optimized()
        names = [name for key, name in left.items() if key not in others]
        if names:
            self._untrained = len(names), names[0]


def _moves(group: Mapping[str, Any]) -> bool:
    """Does a step change a tensor whose gradient is 0?"""
    if group.get("weight_decay"):
        return True
    return bool(group.get("momentum", 0) or "betas" in group or "alpha" in group)


def _stale(group: Mapping[str, Any]) -> list[Any]:
    return [
        tensor
        for tensor in group["params"]
        if isinstance(tensor, torch.Tensor) and not tensor.requires_grad and tensor.grad is not None
    ]


#: Containers that are known at most.
_MOST: Final = 32


class Repeated(NamedTuple):
    """A layer that a container has several times: its class, how often, the line that made the
    container."""

    layer: weakref.ref[torch.nn.Module]
    name: str
    times: int
    place: str | None


def repeated(layers: Any, place: Callable[[], str | None]) -> Repeated | None:
    """The layer with parameters that is there more than once, if one is."""
    if not isinstance(layers, Sequence):
        return None
    counts: dict[int, int] = defaultdict(int)
    for layer in layers:
        counts[id(layer)] += 1
    for layer in layers:
        if counts[id(layer)] < 2 or not isinstance(layer, torch.nn.Module):
            continue
        if any(True for _ in layer.parameters()):
            found = weakref.ref(layer), type(layer).__name__
            return Repeated(*found, counts[id(layer)], place())
    return None


class Repeats:
    """The containers of repeated layers that were made, until one is seen in a graph, one after
    another."""

    def __init__(self) -> None:
        self._made: list[Repeated] = []

    def made(self, layers: Any, place: Callable[[], str | None]) -> None:
        """A container of ``layers`` is about to be made."""
        if len(self._made) < _MOST and (found := repeated(layers, place)) is not None:
            self._made.append(found)

    def __bool__(self) -> bool:
        return bool(self._made)

    def stacked(self, nodes: Iterable[Any]) -> Repeated | None:
        """The first whose layer goes on with what it gave itself, in the graph of these
        ``nodes``."""
        known = list(nodes)
        users, leaves = _users(known), _leaves(known)
        for each in self._made:
            layer = each.layer()
            parameters = [] if layer is None else list(layer.parameters())
            for parameter in parameters:
                leaf = leaves.get(id(parameter))
                if leaf is not None and _follow_each_other(_calls(leaf, users)):
                    return each
        return None


def _users(nodes: Iterable[Any]) -> Mapping[Any, list[Any]]:
    """The nodes of a graph that use each of them."""
    users: dict[Any, list[Any]] = defaultdict(list)
    for node in nodes:
        for operand in operands(node):
            users[operand].append(node)
    return users


def _leaves(nodes: Iterable[Any]) -> dict[int, Any]:
    return {id(node.variable): node for node in nodes if hasattr(node, "variable")}


def _calls(leaf: Any, users: Mapping[Any, list[Any]]) -> set[Any]:
    """The nodes that compute with a parameter: those after its transposes and casts."""
    nodes, waiting = set(), list(users.get(leaf, ()))
    while waiting:
        node = waiting.pop()
        if only_operand(node) is not None:
            waiting += users.get(node, ())
        else:
            nodes.add(node)
    return nodes


def _follow_each_other(calls: Collection[Any]) -> bool:
    """Is one of them computed of another?"""
    if len(calls) < 2:
        return False
    operands_of_calls = [operand for node in calls for operand in operands(node)]
    return any(node in calls for node in walk(*operands_of_calls))
