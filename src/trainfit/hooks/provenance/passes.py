"""Backward passes and steps of several optimizers: gradients that one pass computes for nothing,
gradients that two optimizers use, models that have one memory, and gradients of an attack on the
inputs that the step uses, too."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.owners import tensors_of
from trainfit.hooks.structure import memory_of
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import nodes_of, operands, walk
from trainfit.torch_private.operators import version

#: Steps that show it.
_STEPS: Final = 2
#: Passes to the inputs in one step: of one alone, on the clean batch, gradients may be wanted.
_ATTACKS: Final = 2
#: Optimizers that are told apart.
_MOST: Final = 8
#: Of a model's matrices, the share that a part of a graph has to have to be all of it.
_ALL: Final = 0.5


class Passes:
    """Follows which optimizers' parameters backward passes reach, and what becomes of these
    gradients; ``names`` are those of parameters, by identity."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []
        #: Have all that stepped been told apart?
        self._are_known = True
        #: Of each parameter, by identity, which of these have it; and those that several have.
        self._owners: dict[int, int] = {}
        self._shared: dict[int, weakref.ref[Any]] = {}
        #: Of an optimizer, the line of the last pass through a part of its own alone, the tensors
        #: there, and one of them.
        self._beyond: dict[int, tuple[str | None, int, int]] = {}
        #: How often what a line's pass gave them was dropped, and lines of which it was used.
        self._dropped: dict[tuple[int, str | None], int] = {}
        self._steps_use: set[tuple[int, str | None]] = set()
        #: Gradients that a step used: of a shared parameter, by identity.
        self._used: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._twice = 0
        #: Steps in which one used other gradients of what another had stepped last.
        self._in_turn = 0
        #: Passes since gradients were last set to zero, from the first on that reached inputs as
        #: well: did each, and which parameters did it reach?
        self._to_inputs: list[tuple[bool, str | None, set[int]]] = []
        self._attacked = 0
        self.is_chosen = False
        """Are gradients of chosen tensors asked for by the pass that begins?"""
        self._found: dict[str, Misuse] = {}
        self._names: dict[str, int] = {}

    def found(self, names: Mapping[int, str]) -> tuple[Misuse, ...]:
        """What was seen, the first of each kind."""
        misuses = []
        for kind, misuse in self._found.items():
            name = names.get(self._names.get(kind, 0), "")
            misuses.append(Misuse(kind, (*misuse.told, name), misuse.place))
        return tuple(misuses)

    def _note(self, kind: str, *told: object, place: str | None, parameter: int = 0) -> None:
        if kind not in self._found:
            self._found[kind] = Misuse(kind, tuple(map(str, told)), place)
            self._names[kind] = parameter

    @property
    def trained(self) -> Collection[int]:
        """Parameters of optimizers, by identity."""
        return self._owners.keys()

    def begins(self, optimizer: Any) -> None:
        """An optimizer is about to make its first step."""
        number = len(self._optimizers)
        if number >= _MOST:
            self._are_known = False
            return
        self._optimizers.append(weakref.ref(optimizer))
        for tensor in tensors_of(optimizer):
            before = self._owners.get(id(tensor), 0)
            if before:
                self._shared[id(tensor)] = weakref.ref(tensor)
            self._owners[id(tensor)] = before | 1 << number

    def backward(self, nodes: Sequence[Any], place: str | None) -> None:
        """A backward pass goes through these nodes, the root first."""
        is_chosen, self.is_chosen = self.is_chosen, False
        if is_chosen or not nodes:
            return
        leaves = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
        if any(id(leaf) in self._owners for leaf in leaves):
            to_inputs = any(
                leaf.dim() > 1 and not isinstance(leaf, torch.nn.Parameter)
                for leaf in leaves
                if id(leaf) not in self._owners
            )
            if to_inputs or self._to_inputs:
                owned = {id(leaf) for leaf in leaves} & self._owners.keys()
                self._to_inputs.append((to_inputs, place, owned))
        if len(self._optimizers) > 1 and self._are_known:
            self._look_beyond(nodes, leaves, place)

    def _look_beyond(self, nodes: Sequence[Any], leaves: Iterable[Any], place: str | None) -> None:
        """Does the pass go through a part with parameters of one optimizer alone, and nothing of
        another behind it: a generator, behind its discriminator?"""
        reached = {self._owners[id(leaf)] for leaf in leaves if id(leaf) in self._owners}
        if len(reached) < 2:
            return
        below = _owners_below(nodes[0], self._owners)
        for mask in reached:
            own = [id(leaf) for leaf in leaves if self._owners.get(id(leaf)) == mask]
            matrices = _largest_part(nodes, below, mask)
            all_of_them = [leaf for leaf in leaves if id(leaf) in own and leaf.dim() > 1]
            if matrices > 1 and matrices > _ALL * len(all_of_them):
                self._beyond[mask] = place, len(own), own[0]

    def zeroed(self, owner: Any) -> None:
        """Gradients of an optimizer or a module are about to be dropped."""
        self._to_inputs.clear()
        for mask, (place, tensors, first) in list(self._beyond.items()):
            if not self._drops(owner, first):
                continue
            del self._beyond[mask]
            key = mask, place
            self._dropped[key] = self._dropped.get(key, 0) + 1
            if self._dropped[key] >= _STEPS and key not in self._steps_use:
                self._note("graph_beyond", tensors, place=place, parameter=first)

    def _drops(self, owner: Any, parameter: int) -> bool:
        if isinstance(owner, torch.optim.Optimizer):
            return any(id(tensor) == parameter for tensor in tensors_of(owner))
        return any(id(each) == parameter for each in owner.parameters())

    def uses(self, optimizer: Any) -> None:
        """An optimizer's step begins: the first after a pass, or one of several after the same
        pass or within it (an optimizer for each parameter, which its hook steps)."""
        own = {id(tensor) for tensor in tensors_of(optimizer)} if self._beyond else set()
        for mask, (at, _, first) in list(self._beyond.items()):
            if first in own:
                del self._beyond[mask]
                self._steps_use.add((mask, at))

    def stepping(self, optimizer: Any, place: str | None) -> None:
        """An optimizer is about to use gradients, whose passes those are."""
        own = {id(tensor) for tensor in tensors_of(optimizer)}
        self._look_at_shared(optimizer, own, place)
        # One that trains other parameters (an earlier stage of an interleaved pipeline, which has
        # the other's gradient sent) is not what those of the inputs' passes are added to.
        last = self._to_inputs[-1] if self._to_inputs else (True, None, set())
        attacks = [at for is_attack, at, owned in self._to_inputs if is_attack and owned & last[2]]
        is_attacked = len(attacks) >= _ATTACKS and not last[0]
        self._attacked = self._attacked + 1 if is_attacked else 0
        if self._attacked >= _STEPS:
            self._note("attack_in_step", len(attacks), place=attacks[0])
        self._to_inputs.clear()

    def _look_at_shared(self, optimizer: Any, own: set[int], place: str | None) -> None:
        again, in_turn = [], []
        for key, known in self._shared.items():
            tensor = known() if key in own else None
            gradient = None if tensor is None else tensor.grad
            if gradient is None:
                continue
            used = self._used.get(key)
            now = id(optimizer), version(gradient)
            is_same = used is not None and used[0]() is gradient and used[2] == now[1]
            if used is not None and is_same and used[1] != now[0]:
                if self._is_part(optimizer, used[1]):
                    return
                again.append(key)
            elif used is not None and used[1] != now[0]:
                in_turn.append(key)
            self._used[key] = weakref.ref(gradient), *now
        self._twice += bool(again)
        if again and self._twice >= _STEPS:
            self._note("step_of_two", len(again), place=place, parameter=again[0])
        if in_turn and own - self._shared.keys():  # two of the same parameters may be stages
            self._in_turn += 1
            if self._in_turn > _STEPS:
                self._note("trained_in_turn", len(in_turn), place=place, parameter=in_turn[0])

    def _is_part(self, optimizer: Any, other: int) -> bool:
        """Has another optimizer, given by identity, this one as a part (ZeroRedundancyOptimizer has
        one for its share): a step of it is one of that one."""
        wholes = (each() for each in self._optimizers)
        whole = next((each for each in wholes if each is not None and id(each) == other), None)
        return whole is not None and any(each is optimizer for each in vars(whole).values())

    def look_at_memory(self, models: Sequence[Any]) -> None:
        """Have two models that were called one memory, with parameters of their own?"""
        for one, other in combinations(models, 2):
            within = {id(parameter) for parameter in one.parameters()}
            places = (
                {memory_of(parameter): parameter for parameter in one.parameters()}
                if within
                else {}
            )
            places.pop(None, None)
            theirs = [
                parameter for parameter in other.parameters() if memory_of(parameter) is not None
            ]
            same = [
                their for their in theirs if id(their) not in within and memory_of(their) in places
            ]
            if theirs and len(same) == len(theirs):
                names = type(one).__name__, type(other).__name__
                self._note("one_memory", *names, len(same), shape_of(same[0]), place="")
                return


def reaches_inputs(root: Any, optimizers: Iterable[Any]) -> bool:
    """Does a backward pass from ``root`` give a gradient to a batch as well as to parameters, as
    one that looks for an adversarial example does? What one of the optimizers has is no batch."""
    leaves = [
        leaf
        for node in nodes_of(getattr(root, "grad_fn", None)) or ()
        if (leaf := getattr(node, "variable", None)) is not None
    ]
    others = [each for each in leaves if not isinstance(each, torch.nn.Parameter)]
    given = [each for each in others if each.dim() > 1]
    if not given or len(others) == len(leaves):
        return False
    own = {id(tensor) for optimizer in optimizers for tensor in tensors_of(optimizer)}
    return any(id(each) not in own for each in given)


def _owners_below(root: Any, owners: Mapping[int, int]) -> dict[Any, int]:
    """The optimizers that have parameters at the ends of a graph, for each node."""
    below: dict[Any, int] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, is_over = waiting.pop()
        if node in below and not is_over:
            continue
        following = operands(node)
        if not is_over:
            below[node] = owners.get(id(getattr(node, "variable", None)), 0)
            waiting.append((node, True))
            waiting += [(each, False) for each in following if each not in below]
            continue
        for operand in following:
            below[node] |= below[operand]
    return below


def _largest_part(nodes: Iterable[Any], below: Mapping[Any, int], mask: int) -> int:
    """Matrices at the ends of the part of a graph that has them, of those parts which have
    parameters of ``mask`` alone, the one with most."""
    maximum = 0
    for node in nodes:
        if below.get(node, 0) & ~mask == 0 or not below.get(node, 0) & mask:
            continue  # within such a part, or with nothing of it
        for operand in operands(node):
            if below.get(operand) == mask:
                maximum = max(maximum, _matrices_below(operand))
    return maximum


def _matrices_below(root: Any) -> int:
    leaves = (getattr(node, "variable", None) for node in walk(root))
    return sum(leaf is not None and leaf.dim() > 1 for leaf in leaves)
