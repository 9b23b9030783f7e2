"""What becomes of a policy's log-probabilities times rewards: a loss is minimized, and rewards are
to be maximized, which a minus sign does, or an optimizer with ``maximize=True``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from trainfit.findings.source_code import file_syntax
from trainfit.hooks.losses import VIEWS
from trainfit.results.findings import Place
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.autograd import (
    first_operand,
    number_of,
    operands,
    operator_of,
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
        if place is None or any(each.get("maximize") for each in optimizer.param_groups):
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
    if any(map(_is_minus, ast.walk(side))) or any(each & _WORSE for each in words.values()):
        return None
    return next((name for name, each in words.items() if each & _BETTER), None)


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
