"""Loops of a model's forward pass over the elements of a tensor: over samples, or time steps.

Told by the source of the loop and by what its names stand for: it goes over a tensor, or one is
indexed by its variable. Loops over layers, experts or levels index a list or a module.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final

import torch

from trainfit.findings.source_code import names_in, relative_place
from trainfit.results.runs.watched import ElementLoop
from trainfit.scripts.call_sites import Call, locals_in, undisturbed
from trainfit.simgpu.device.user_location import is_library
from trainfit.watch.recorder.looks.stacks import line_at

#: Where a module's call is, by the end of its file's name.
_MODULES: Final = "torch/nn/modules/module.py"
#: Rounds of a loop from which it is one over elements: fewer are unrolled by hand as well.
_LEAST_ROUNDS: Final = 8
#: Looks at a line for what its names stand for, before it is taken for no such loop.
_TRIES: Final = 3
_LONGEST_OVER: Final = 60


class ElementLoops:
    """Counts looks at the training thread's stack in the forward pass."""

    def __init__(self) -> None:
        self.looks = 0
        self._found: collections.Counter[tuple[str, str]] = collections.Counter()
        self._rounds: dict[tuple[str, str], int] = {}
        self._known: dict[tuple[CodeType, int], int] = {}
        self._tries: collections.Counter[tuple[CodeType, int]] = collections.Counter()

    def look(self, thread: int, stack: Sequence[Call]) -> bool:
        """Look at a thread's stack, innermost first. Was it in such a loop? No look where no module
        is called."""
        modules = [n for n, node in enumerate(stack) if node[0].co_filename.endswith(_MODULES)]
        if not modules:
            return False
        self.looks += 1
        # From the outermost module inwards: what a loop calls is the loop's.
        for code, lasti, _ in reversed(stack[: modules[-1]]):
            if is_library(code.co_filename):
                continue
            loop = loop_at(code, line_at(code, lasti))
            if loop is not None and (rounds := self._rounds_of(thread, code, loop)):
                key = relative_place(f"{code.co_filename}:{loop.line}"), loop.over
                self._found[key] += 1
                self._rounds[key] = max(rounds, self._rounds.get(key, 0))
                return True
        return False

    def _rounds_of(self, thread: int, code: CodeType, loop: ForLoop) -> int:
        """How often a loop goes round; 0: it is not known to go over a tensor's elements."""
        key = code, loop.line
        if key not in self._known and self._tries[key] < _TRIES:
            self._tries[key] += 1
            with undisturbed():
                rounds = rounds_of(loop, locals_in(thread, code))
            if rounds >= _LEAST_ROUNDS:
                self._known[key] = rounds
        return self._known.get(key, 0)

    def summary(self) -> tuple[ElementLoop, ...]:
        """The loop with most looks; empty: none."""
        return tuple(
            ElementLoop(place, over, self._rounds[place, over], looks, self.looks)
            for (place, over), looks in self._found.most_common(1)
        )


# ---
# Loops in the source of a function.


class ForLoop:
    """A ``for``, or that of a comprehension: what it goes over, and what it computes."""

    def __init__(
        self, line: int, target: ast.expr, over: ast.expr, body: Sequence[ast.AST]
    ) -> None:
        self.line, self.iterates, self.body = line, over, body
        self.over = ast.unparse(over)[:_LONGEST_OVER]
        self.variables = set(names_in(target))


@functools.lru_cache(1 << 8)
def loop_at(code: CodeType, number: int) -> ForLoop | None:
    """The innermost loop around a line of a function; ``None``: there is none."""
    around = [loop for loop in _loops(code) if loop[0] <= number <= loop[1]]
    return min(around, key=lambda each: each[1] - each[0])[2] if around else None


@functools.lru_cache(1 << 6)
def _loops(code: CodeType) -> tuple[tuple[int, int, ForLoop], ...]:
    """First and last line of each loop of a function."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, ValueError, IndexError):
        return ()
    first = code.co_firstlineno - 1
    return tuple(_found(tree, first))


def _found(tree: ast.AST, first: int) -> Iterator[tuple[int, int, ForLoop]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            end = first + (node.end_lineno or node.lineno)
            loop = ForLoop(first + node.lineno, node.target, node.iter, node.body)
            yield first + node.body[0].lineno, end, loop
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            each = node.generators[0]
            loop = ForLoop(first + node.lineno, each.target, each.iter, [node.elt])
            yield first + node.lineno, first + (node.end_lineno or node.lineno), loop


# ---
# What its names stand for.


#: Methods and functions that give the elements of a tensor, and drivers of iterators.
_GIVES: Final = ("unbind", "enumerate", "zip", "reversed", "list", "tuple")


def rounds_of(loop: ForLoop, names: Mapping[str, Any]) -> int:
    """The number of elements of a tensor among ``names`` that a loop goes over; else 0."""
    if _calls_each(loop):
        return 0  # layers, or experts: a tensor that is indexed has a weight for each
    return _gone_over(loop.iterates, names) or _indexed(loop, names)


def _calls_each(loop: ForLoop) -> bool:
    """Does a loop call what it goes over, or what its variable is an index of?"""
    for node in (inner for each in loop.body for inner in ast.walk(each)):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Subscript):
            called = called.slice
        if isinstance(called, ast.Name) and called.id in loop.variables:
            return True
    return False


def _gone_over(node: ast.expr, names: Mapping[str, Any]) -> int:
    """Elements of the tensor that a loop goes over itself."""
    if isinstance(node, ast.Name):
        value = names.get(node.id)
        return _size(value, 0)
    if not isinstance(node, ast.Call):
        return 0
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    called = node.func.id if isinstance(node.func, ast.Name) else called
    if called not in _GIVES:
        return 0
    if called != "unbind":
        return max((_gone_over(argument, names) for argument in node.args), default=0)
    own = node.func.value if isinstance(node.func, ast.Attribute) else None
    arguments = [own, *node.args] if own is not None else node.args
    tensors = [argument for argument in arguments if isinstance(argument, ast.Name)]
    dimensions = [*node.args, *(keyword.value for keyword in node.keywords)]
    dimension = next((d for d in map(_number, dimensions) if d is not None), 0)
    return max((_size(names.get(tensor.id), dimension) for tensor in tensors), default=0)


def _indexed(loop: ForLoop, names: Mapping[str, Any]) -> int:
    """Elements of the dimension of a tensor that the loop's variable is an index of."""
    found = 0
    for node in (inner for each in loop.body for inner in ast.walk(each)):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        index = node.slice
        places = index.elts if isinstance(index, ast.Tuple) else [index]
        for dimension, place in enumerate(places):
            begins = place.lower if isinstance(place, ast.Slice) else place
            if isinstance(begins, ast.Name) and begins.id in loop.variables:
                found = max(found, _size(names.get(node.value.id), dimension))
    return found


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _size(value: Any, dimension: int) -> int:
    # A class of its own may compute anything where its shape is asked for.
    if type(value) is not torch.Tensor or not -value.ndim <= dimension < value.ndim:
        return 0
    return int(value.shape[dimension])
