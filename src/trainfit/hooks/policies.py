"""A policy's loss, log-probabilities times advantages: do its gradients reach the critic as well?

They do where an advantage is computed of the critic's values and not detached. That is told only
where one backward pass trains the critic by a loss of its own, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import nodes_of, parameters_of

#: Where a node keeps the line of the log-probabilities that it computed; it goes with the node.
_MARK: Final = "trainfit_log_prob"
#: What is done to log-probabilities and to advantages before they are multiplied.
_PASSED: Final = ("Neg", "Exp", "Sum", "Sub", "Add", "View", "Unsqueeze", "Squeeze", "Clamp")
_SCALED: Final = ("Neg", "Div", "View", "Unsqueeze", "Squeeze", "ToCopy", "Clamp")
_DEEPEST: Final = 8


def mark(log_probabilities: Any, place: str | None) -> None:
    """A distribution gave log-probabilities."""
    if isinstance(log_probabilities, torch.Tensor) and log_probabilities.grad_fn is not None:
        log_probabilities.grad_fn.metadata[_MARK] = place or ""


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
        if _MARK in node.metadata:
            place: str = node.metadata[_MARK]
            return place
        if not node.name().startswith(_PASSED):
            return None
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return None


def _is_difference(node: Any) -> bool:
    """Is it something without a graph (returns) minus something with one (values)?"""
    for _ in range(_DEEPEST):
        if node is None:
            return False
        if node.name().startswith(("Sub", "Rsub")):
            with_graph = [each for each, _ in node.next_functions if each is not None]
            if len(with_graph) == 1:
                return True
        elif not node.name().startswith(_SCALED):
            return False
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return False
