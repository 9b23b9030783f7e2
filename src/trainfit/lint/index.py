"""Index of a script: parents, functions, loops, guards, call sites."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from trainfit.lint.imports import File, Source
from trainfit.results.findings import Finding, Fix, Place, Severity

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
#: A function, or the module's own statements.
Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BOUNDARIES = (*FUNCTIONS, ast.Lambda, ast.ClassDef, ast.Module)
#: How a DataLoader is named that a function is given, and methods that make samples.
LOADER_NAME: Final = re.compile(r"(?i)loader$|^loader|_dl$|^dl$")
PER_SAMPLE: Final = ("__getitem__", "__getitems__")


@dataclasses.dataclass(eq=False)
class Index:
    """One file's nodes, in the order in which they stand."""

    file: File
    parents: dict[ast.AST, ast.AST] = dataclasses.field(default_factory=dict)
    functions: list[Function] = dataclasses.field(default_factory=list)
    classes: list[ast.ClassDef] = dataclasses.field(default_factory=list)
    calls: list[ast.Call] = dataclasses.field(default_factory=list)
    fors: list[ast.For] = dataclasses.field(default_factory=list)
    constants: list[ast.Constant] = dataclasses.field(default_factory=list)
    #: Last part of a name → where it is read.
    reads: dict[str, list[ast.Name | ast.Attribute]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (parent, its child on the way), outwards, within one function."""
        child = node
        while not isinstance(child, _BOUNDARIES) or child is node:
            parent = self.parents.get(child)
            if parent is None:
                return
            yield parent, child
            child = parent

    def scope(self, node: ast.AST) -> Scope | None:
        """The function or module whose statements a node belongs to; None in a lambda or class."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, FUNCTIONS):
                # Decorators, defaults and annotations are evaluated outside.
                return parent if child in parent.body else self.scope(parent)
            if isinstance(parent, ast.Lambda | ast.ClassDef):
                return None
            if isinstance(parent, ast.Module):
                return parent
        return None

    def owner(self, function: Function) -> ast.ClassDef | None:
        """The class whose method a function is."""
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def loops(self, node: ast.AST) -> Iterator[Loop]:
        """The loops whose body a node stands in, innermost first, within one function."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, _LOOPS) and _is_repeated(parent, child):
                yield parent

    def is_guarded(self, node: ast.AST, region: ast.AST) -> bool:
        """May a step of ``region`` (a loop or function) go by without running ``node``?"""
        leave = ast.Continue if isinstance(region, _LOOPS) else ast.Return
        for parent, child in self.ancestors(node):
            if _is_conditional(parent, child) or _follows(parent, child, leave):
                return True
            if parent is region:
                return False
        return True


def index_of(file: File) -> Index:
    """Walks one file once, without recursion."""
    index = Index(file)
    stack: list[ast.AST] = [file.source.tree]
    while stack:
        node = stack.pop()
        _note(index, node)
        below = children(node)
        for child in below:
            index.parents[child] = node
        stack.extend(reversed(below))
    return index


def children(node: ast.AST) -> list[ast.AST]:
    """A node's own nodes, in order (faster than :func:`ast.iter_child_nodes`)."""
    nodes: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            nodes.extend([each for each in value if isinstance(each, ast.AST)])
        elif isinstance(value, ast.AST):
            nodes.append(value)
    return nodes


def path_of(node: ast.AST) -> str:
    """ "self.model" for such an expression; empty for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def assigned_calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.Assign, ast.Call]]:
    """Assignments of what a call gives (``loader = DataLoader(data)``), each with the call."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield node, node.value


def assignments(nodes: Iterable[ast.AST], path: str) -> list[ast.Assign]:
    """Assignments to ``path``, a name or an attribute."""
    lines = (node for node in nodes if isinstance(node, ast.Assign))
    return [line for line in lines if path in map(path_of, line.targets)]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument given by position or by name."""
    if len(call.args) > position and not any(
        isinstance(each, ast.Starred) for each in call.args[: position + 1]
    ):
        return call.args[position]
    return keyword(call, name)


def has_stars(call: ast.Call) -> bool:
    """Are there arguments that the call does not show?"""
    return any(each.arg is None for each in call.keywords) or any(
        isinstance(each, ast.Starred) for each in call.args
    )


def is_literal(node: ast.AST | None, value: object) -> bool:
    """Is it this constant (True is not 1)?"""
    return isinstance(node, ast.Constant) and node.value is value


def method_of(call: ast.Call) -> str:
    """ "cuda" for `x.cuda()`; empty for a call of a plain name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all that is in it, without the functions and classes defined there."""
    stack = [node]
    while stack:
        each = stack.pop()
        yield each
        for child in children(each):
            if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
                stack.append(child)


def _note(index: Index, node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        index.calls.append(node)
    elif isinstance(node, ast.For):
        index.fors.append(node)
    elif isinstance(node, ast.Constant):
        index.constants.append(node)
    elif isinstance(node, FUNCTIONS):
        index.functions.append(node)
    elif isinstance(node, ast.ClassDef):
        index.classes.append(node)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        index.reads[node.id].append(node)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        index.reads[node.attr].append(node)


def _is_repeated(loop: ast.AST, child: ast.AST) -> bool:
    if isinstance(loop, ast.While):
        return child is loop.test or child in loop.body
    assert isinstance(loop, ast.For | ast.AsyncFor)
    return child in loop.body


def _is_conditional(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(parent, ast.If | ast.IfExp):
        return child is not parent.test
    if isinstance(parent, ast.BoolOp):
        return child is not parent.values[0]
    if isinstance(parent, ast.Try | ast.TryStar):
        return child not in parent.body and child not in parent.finalbody
    if isinstance(parent, ast.Match):
        return child is not parent.subject
    if isinstance(parent, _LOOPS):
        return child in parent.orelse
    return isinstance(parent, ast.comprehension | ast.Assert)


def _follows(parent: ast.AST, child: ast.AST, leave: type[ast.stmt]) -> bool:
    """Can a `continue` (in a function: a `return`) before the statement skip it?"""
    if not isinstance(child, ast.stmt):
        return False
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(parent, field, None)
        if isinstance(statements, list) and child in statements:
            return any(
                _leaves(statement, leave) for statement in statements[: statements.index(child)]
            )
    return False


def _leaves(statement: ast.stmt, leave: type[ast.stmt]) -> bool:
    stack: list[ast.AST] = [statement]
    while stack:
        each = stack.pop()
        if isinstance(each, leave):
            return True
        if isinstance(each, _BOUNDARIES) or (leave is ast.Continue and isinstance(each, _LOOPS)):
            continue  # a `continue` in there is that loop's
        stack.extend(ast.iter_child_nodes(each))
    return False


# ---
# Creates a finding from a syntax node.


_NAMES: Final = frozenset({"device", "dev"})


def finding(
    rule: str, index: Index, node: ast.expr | ast.stmt, reason: str, rewrite: str
) -> Finding:
    """A finding at a node; where a chain of calls spans lines, at the last method's name."""
    source = index.file.source
    line, column = node.lineno, source.column(node)
    if isinstance(node, ast.Call) and node.func.end_lineno != node.lineno:
        line, column = source.method_at(node)
    place = Place(source.name, line, column, source.line(line).rstrip())
    return Finding(
        rule, "warning", rule.replace("-", " "), (), reason, (Fix(rewrite),), place=place
    )


def line_finding(
    source: Source,
    node: ast.stmt | ast.expr,
    kind: str,
    title: str,
    cause: str,
    fix: str,
    severity: Severity = "critical",
) -> Finding:
    """A finding at the line of a node, which says more than its rule's name."""
    place = Place(source.name, node.lineno, source.column(node), source.line(node.lineno).rstrip())
    return Finding(kind, severity, title, (), cause, (Fix(fix),), place=place)


def named_devices(index: Index) -> dict[Scope | None, str]:
    """The name that holds a device in a function (or at the top) of a file, where there is one."""
    devices: dict[Scope | None, str] = {}
    for node in index.parents:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id.lower() in _NAMES:
                devices.setdefault(index.scope(node), node.id)
        elif isinstance(node, ast.arg) and node.arg.lower() in _NAMES:
            function = index.parents[index.parents[node]]
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                devices.setdefault(function, node.arg)
    return devices
