"""What is done with distributions: samples through which a loss is meant to reach what gave them
(``sample()`` has no graph, ``rsample()`` has one), and a policy's log-probabilities times
advantages whose gradients reach the critic as well."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainfit.hooks.losses import VIEWS
from trainfit.hooks.provenance.policies import LOG_PROBABILITIES
from trainfit.torch_private.autograd import nodes_of, only_operand, operands, parameters_of

#: Distributions that are known at once.
_MOST: Final = 64
#: Functions of PyTorch that draw samples without a graph.
OF_SAMPLES: Final = {"normal", "bernoulli", "multinomial", "poisson"}
#: Steps that show it.
_STEPS: Final = 2
#: Where a node keeps the name and the line of a distribution with that mean that was sampled.
_SAMPLED: Final = "trainfit_sampled"
#: What is done to log-probabilities and to advantages before they are multiplied.
_PASSED: Final = ("Neg", "Exp", "Sum", "Sub", "Add", *VIEWS, "Unsqueeze", "Squeeze", "Clamp")
_SCALED: Final = ("Neg", "Div", *VIEWS, "Unsqueeze", "Squeeze", "ToCopy", "Clamp")
_DEEPEST: Final = 8


class _Sampled(NamedTuple):
    distribution: weakref.ref[Any]
    name: str
    place: str | None


class Samples:
    """Follows distributions within a step: one that is sampled without a graph, whose divergence
    is part of the loss, and whose log-probabilities nobody asks for (as policies do)."""

    def __init__(self) -> None:
        self._sampled: dict[int, _Sampled] = {}
        self._diverging: dict[int, _Sampled] = {}
        #: The name and the line of one whose divergence is written out.
        self._by_hand: tuple[str, str | None] | None = None
        self._steps = 0

    def sampled(self, distribution: Any, place: Callable[[], str | None]) -> None:
        """``distribution.sample()`` is called."""
        mean = getattr(distribution, "loc", None)
        if not isinstance(mean, torch.Tensor) or mean.grad_fn is None:
            return
        if torch.is_grad_enabled() and len(self._sampled) < _MOST:
            known = weakref.ref(distribution), type(distribution).__name__, place()
            self._sampled[id(distribution)] = _Sampled(*known)
            for node in _nodes_of_mean(distribution):
                node.metadata[_SAMPLED] = known[1:]

    def asked(self, distribution: Any) -> None:
        """``distribution.log_prob(…)`` is called, or ``rsample()``."""
        for known in (self._sampled, self._diverging):
            known.pop(id(distribution), None)
        for node in _nodes_of_mean(distribution):
            node.metadata.pop(_SAMPLED, None)

    def compared(self, *distributions: Any) -> None:
        """The divergence of these distributions is computed."""
        for each in distributions:
            known = self._sampled.get(id(each))
            if known is not None and known.distribution() is each and torch.is_grad_enabled():
                self._diverging[id(each)] = known

    def used(self, nodes: Sequence[Any], goes_back: Callable[[], bool]) -> None:
        """A backward pass goes through these nodes; ``goes_back``: to a sample, too?

        Its graph has the mean of a distribution by another term, a divergence that is written out,
        and what is computed of the sample trains nothing of that.
        """
        marks = (each.metadata.get(_SAMPLED) for each in nodes)
        marked = next((each for each in marks if each is not None), None)
        if marked is not None and goes_back():
            self._by_hand = marked

    def step(self) -> tuple[str, str | None] | None:
        """A step begins to use its gradients: the name of such a distribution, and where it is
        sampled."""
        found = [(each.name, each.place) for each in self._diverging.values()]
        found += [self._by_hand] if self._by_hand is not None else []
        self._sampled.clear()
        self._diverging.clear()
        self._by_hand = None
        if not found:
            return None
        self._steps += 1
        return found[0] if self._steps >= _STEPS else None


def _nodes_of_mean(distribution: Any) -> list[Any]:
    """The node that gave a distribution's mean, and what that is a view of."""
    node = getattr(getattr(distribution, "loc", None), "grad_fn", None)
    return [] if node is None else [node, *operands(node)]


# ---
# Advantages with a graph: told only where one backward pass trains the critic by a loss of its
# own, too.


def mark(log_probabilities: Any, place: str | None) -> None:
    """A distribution gave log-probabilities."""
    if isinstance(log_probabilities, torch.Tensor) and log_probabilities.grad_fn is not None:
        node: Any = log_probabilities.grad_fn
        node.metadata[LOG_PROBABILITIES] = place or ""


def trains_critic(root: Any, nodes: Sequence[Any]) -> str | None:
    """The line of a policy's log-probabilities that are multiplied by advantages with a graph, in a
    loss that trains what gives those by another term, too; ``None``: there is none."""
    for node in nodes:
        if not node.name().startswith("Mul") or len(node.next_functions) != 2:
            continue
        (left, _), (right, _) = node.next_functions
        for policy, advantage in ((left, right), (right, left)):
            place = _marked(policy)
            if place is None or not _is_difference(advantage):
                continue
            of_policy = {id(each) for each in parameters_of(nodes_of(policy) or ())}
            critic = {id(each) for each in parameters_of(nodes_of(advantage) or ())} - of_policy
            others = nodes_of(root, ends=functools.partial(operator.is_, advantage)) or ()
            if critic and critic <= {id(each) for each in parameters_of(others)}:
                return place
    return None


def _marked(node: Any) -> str | None:
    for _ in range(_DEEPEST):
        if node is None:
            return None
        if LOG_PROBABILITIES in node.metadata:
            place: str = node.metadata[LOG_PROBABILITIES]
            return place
        if not node.name().startswith(_PASSED):
            return None
        node = next(iter(operands(node)), None)
    return None


def _is_difference(node: Any) -> bool:
    """Is it something without a graph (returns) minus something with one (values)?"""
    for _ in range(_DEEPEST):
        if node is None:
            return False
        if node.name().startswith(("Sub", "Rsub")):
            if only_operand(node) is not None:
                return True
        elif not node.name().startswith(_SCALED):
            return False
        node = next(iter(operands(node)), None)
    return False
