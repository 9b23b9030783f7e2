"""Reinforcement learning: losses of a policy, samples of distributions, a replay buffer.

What becomes of a policy's log-probabilities times rewards: a loss is minimized, and rewards are
to be maximized, which a minus sign does, or an optimizer with ``maximize=True``.

What is done with distributions: samples through which a loss is meant to reach what gave them
(``sample()`` has no graph, ``rsample()`` has one), and a policy's log-probabilities times
advantages whose gradients reach the critic as well.

Transitions that a replay buffer keeps: a state that is the same object as the one after it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from trainfit.findings.source_code import file_syntax
from trainfit.hooks.losses import VIEWS
from trainfit.results.findings import Place
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.torch_private.autograd import (
    first_operand,
    nodes_of,
    number_of,
    only_operand,
    operands,
    operator_of,
    parameters_of,
    saved_other,
)

#: Where a node of log-probabilities, by a distribution, is marked.
LOG_PROBABILITIES: Final = "trainfit_log_prob"
#: … and one of log-probabilities times what has no graph, with its line.
_TERM: Final = "trainfit_policy_term"
#: Nodes that keep the sign of what they get, and those that turn it around.
_SAME: Final = (
    *(*VIEWS, "Unsqueeze", "Squeeze", "Sum", "Mean", "Stack", "Cat", "ToCopy", "Clone", "Add"),
    *("Exp", "Minimum", "Maximum", "Clamp", "Select", "Slice", "Index", "Expand", "Unbind"),
)
_CHOICES: Final = ("Gather", "Index", "Select")
_DEEPEST: Final = 12
_TERMS: Final = 256
#: Steps that show it.
_STEPS: Final = 2
#: Words of the name of what is multiplied, which say that more of it is better, or less.
_BETTER: Final = {
    *("r", "ret", "rets", "return", "returns", "reward", "rewards", "rew", "rews", "rtg"),
    *("adv", "advs", "advantage", "advantages", "gae", "g", "discounted"),
}
_WORSE: Final = {
    *("cost", "costs", "loss", "losses", "penalty", "regret", "energy", "length", "distance"),
    *("error", "errors", "neg", "negative", "nll", "minus", "latency", "time"),
}


class PolicyTerms:
    """Follows log-probabilities times rewards from where they are multiplied to the loss."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        #: Of the last backward pass, a term that is minimized as it is; steps that used one.
        self._minimized: str | None = None
        self._steps = 0
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """The line that multiplies, of a loss that minimizes what is to be maximized."""
        if self._found is not None:
            yield self._found

    def multiplied(self, graph: torch.Tensor, node: Any) -> None:
        """Something with a graph was multiplied by a number or a tensor without one."""
        if self._found is None and _marked(graph.grad_fn):
            node.metadata[_TERM] = self._place() or ""

    def backward(self, root: Any) -> None:
        """A backward pass begins at this node."""
        if self._found is None and (place := _minimized(root)) is not None:
            self._minimized = place

    def stepping(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        place, self._minimized = self._minimized, None
        if place is None or any(group.get("maximize") for group in optimizer.param_groups):
            return
        self._steps += 1
        if self._steps >= _STEPS and (name := rewards_at(place)) is not None:
            self._found = Misuse.of("return_minimized", name, place=place)


def _marked(node: Any) -> bool:
    """Are these log-probabilities of chosen actions, or what is computed of them alone?"""
    for _ in range(_DEEPEST):
        if node is None:
            return False
        if LOG_PROBABILITIES in node.metadata or _is_choice(node):
            return True
        name = operator_of(node)
        if name not in ("Neg", "Sub") and not name.startswith(_SAME):
            return False
        node = next(iter(operands(node)), None)
    return False


def _is_choice(node: Any) -> bool:
    """Is it what a script picks out of a log-softmax, or the logarithm of what it picks out of a
    softmax?"""
    of = "LogSoftmax"
    if operator_of(node) == "Log":
        of, node = "Softmax", first_operand(node)
    if node is None or not operator_of(node).startswith(_CHOICES):
        return False
    behind = first_operand(node)
    return behind is not None and operator_of(behind) == of


def _minimized(root: Any) -> str | None:
    """The line of a term that a loss has with the sign that it was multiplied with."""
    waiting, known = [(root, 1)], {root}
    while waiting and len(known) <= _TERMS:
        node, sign = waiting.pop()
        if node is None:
            continue
        place: str | None = node.metadata.get(_TERM)
        if place is not None:
            if sign * _sign_below(node) > 0:
                return place
            continue
        for following, each in _signs(node, sign):
            if following not in known:
                known.add(following)
                waiting.append((following, each))
    return None


def _sign_below(node: Any) -> int:
    """The sign of log-probabilities in what is computed of them alone."""
    sign = 1
    for _ in range(_DEEPEST):
        if node is None or LOG_PROBABILITIES in node.metadata or _is_choice(node):
            break
        behind = [(each, turned) for each, turned in _signs(node, sign) if each is not None]
        if not behind:
            break
        node, sign = behind[0]
    return sign


def _signs(node: Any, sign: int) -> Iterator[tuple[Any, int]]:
    """What a node gets, with the sign by which it goes into what the node gives; nothing of an
    operator that has no such thing."""
    name, following = operator_of(node), [each for each, _ in node.next_functions]
    if name == "Neg":
        yield following[0], -sign
    elif name in ("Sub", "Rsub"):
        signs = (sign, -sign) if name == "Sub" else (-sign, sign)
        yield from zip(following, signs, strict=False)
    elif name in ("Mul", "Div"):
        factor = number_of(saved_other(node))
        yield from (
            (each, -sign if factor is not None and factor < 0 else sign) for each in following
        )
    elif name.startswith(_SAME):
        yield from ((each, sign) for each in following)


def rewards_at(place: str) -> str | None:
    """The name of what a line multiplies that is the better the more there is of it, as its name
    says, and gets no other sign anywhere in the file; ``None``: the source does not tell."""
    where = Place.parse(place)
    tree = None if where is None else file_syntax(where.file)
    if tree is None or where is None:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        if not node.lineno <= where.line <= (node.end_lineno or node.lineno):
            continue
        for side in (node.left, node.right):
            if (name := _better(side)) is not None and not _is_turned(tree, name):
                return name
    return None


def _better(side: ast.expr) -> str | None:
    """The first name in a factor that is of rewards; ``None``: there is none, or one of costs, or a
    sign."""
    words = {name: _words(name) for name in _names(side)}
    if any(map(_is_minus, ast.walk(side))) or any(word & _WORSE for word in words.values()):
        return None
    return next((name for name, word in words.items() if word & _BETTER), None)


def _names(value: ast.AST) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _words(name: str) -> set[str]:
    return set(re.split(r"[\W_\d]+", name.lower()))


def _is_minus(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_turned(tree: ast.Module, name: str) -> bool:
    """Does the file give it a value with a sign, or one of costs?"""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.For):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.iter if isinstance(node, ast.For) else node.value
        given = {each.id for it in targets for each in ast.walk(it) if isinstance(each, ast.Name)}
        if name not in given:
            continue
        words = {word for each in _names(value) for word in _words(each)}
        if words & _WORSE or any(map(_is_minus, ast.walk(value))):
            return True
    return False


#: Distributions that are known at once.
_MOST: Final = 64
#: Functions of PyTorch that draw samples without a graph.
OF_SAMPLES: Final = {"normal", "bernoulli", "multinomial", "poisson"}
#: Where a node keeps the name and the line of a distribution with that mean that was sampled.
_SAMPLED: Final = "trainfit_sampled"
#: What is done to log-probabilities and to advantages before they are multiplied.
_PASSED: Final = ("Neg", "Exp", "Sum", "Sub", "Add", *VIEWS, "Unsqueeze", "Squeeze", "Clamp")
_SCALED: Final = ("Neg", "Div", *VIEWS, "Unsqueeze", "Squeeze", "ToCopy", "Clamp")
_DEEPEST_SAMPLE: Final = 8


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
        for distribution in distributions:
            known = self._sampled.get(id(distribution))
            if (
                known is not None
                and known.distribution() is distribution
                and torch.is_grad_enabled()
            ):
                self._diverging[id(distribution)] = known

    def used(self, nodes: Sequence[Any], goes_back: Callable[[], bool]) -> None:
        """A backward pass goes through these nodes; ``goes_back``: to a sample, too?

        Its graph has the mean of a distribution by another term, a divergence that is written out,
        and what is computed of the sample trains nothing of that.
        """
        marks = (node.metadata.get(_SAMPLED) for node in nodes)
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
            place = _sampled_place(policy)
            if place is None or not _is_difference(advantage):
                continue
            of_policy = {id(parameter) for parameter in parameters_of(nodes_of(policy) or ())}
            critic = {
                id(parameter) for parameter in parameters_of(nodes_of(advantage) or ())
            } - of_policy
            others = nodes_of(root, ends=functools.partial(operator.is_, advantage)) or ()
            if critic and critic <= {id(parameter) for parameter in parameters_of(others)}:
                return place
    return None


def _sampled_place(node: Any) -> str | None:
    for _ in range(_DEEPEST_SAMPLE):
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
    for _ in range(_DEEPEST_SAMPLE):
        if node is None:
            return False
        if node.name().startswith(("Sub", "Rsub")):
            if only_operand(node) is not None:
                return True
        elif not node.name().startswith(_SCALED):
            return False
        node = next(iter(operands(node)), None)
    return False


#: Transitions of one container that are looked at, and how many there must be.
_MOST_TRANSITIONS: Final = 64
_LEAST: Final = 16
#: Parts of a transition: a state, what was done, the next state.
_PARTS: Final = 3
#: Of them, the share whose states are one object, and that of another transition, too: no state of
#: an environment stays as it is that often. Samples whose labels are their input have one each.
_SHARE: Final = 0.9


def with_transitions(facts: LearningFacts) -> LearningFacts:
    """The facts of a run that is over, with what its replay buffers hold."""
    return dataclasses.replace(facts, misuses=(*facts.misuses, *_aliased()))


def _aliased() -> Iterator[Misuse]:
    """The misuse of the first container whose transitions have one array as two of their parts."""
    for each in gc.get_objects():
        if type(each) not in (list, deque) or len(each) < _LEAST:
            continue
        with contextlib.suppress(RuntimeError):  # changed by another thread
            looked = list(itertools.islice(each, _MOST_TRANSITIONS))
            if not all(map(_is_transition, looked)):
                continue
            twice = [_twice(transition) for transition in looked]
            often = Counter(number for numbers in twice for number in numbers)
            shared = sum(any(often[number] > 1 for number in numbers) for numbers in twice)
            if shared >= _SHARE * len(looked):
                yield Misuse.of("states_aliased", len(each))
                return


def _is_transition(value: Any) -> bool:
    return isinstance(value, tuple | Mapping) and len(value) >= _PARTS


def _twice(transition: Any) -> set[int]:
    """The arrays that are two of its parts."""
    parts = transition.values() if isinstance(transition, Mapping) else transition
    arrays = [
        id(part)
        for part in parts
        if (isinstance(part, np.ndarray) and part.size > 1)
        or (isinstance(part, torch.Tensor) and part.numel() > 1)
    ]
    return {array for array, number in Counter(arrays).items() if number > 1}
