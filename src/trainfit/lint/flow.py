"""Follows values through a script's statements: an abstract interpretation, nothing is run.

Every function is read with what all its visible calls give it; two rounds, so that what a function
returns is known where it is called. Branches are joined: only what holds in all of them is kept.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Final

from trainfit.lint.expressions import FUNCTIONS, Env, Expressions, Known
from trainfit.lint.index import Function, Index, method_of, path_of
from trainfit.lint.project import Project
from trainfit.lint.values import UNKNOWN, Value, element, join_all, joined

_ROUNDS: Final = 3


def follow(project: Project) -> None:
    """Fill ``project.values``."""
    flow = _Flow(project)
    for number in range(_ROUNDS):
        if not flow.round() and number:
            return  # nothing new that another round could use


class _Flow:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.known = Known.of(project)
        self.calls = self.known.calls
        self.closures: dict[Function, Env] = {}

    def round(self) -> bool:
        """All statements of all files once; is anything new known of functions and classes?"""
        self.calls.begin_round()
        self.known.attributes.clear()
        for number, index in enumerate(self.project.indexes):
            body = _Body(self.known, index, self.known.globals[number], None)
            self._run(body, index, index.file.source.tree.body)
            for function in index.functions:
                self._function(index, function)
        before = self.known.classes
        self.known.classes = {
            owner: {path: join_all(values) for path, values in found.items()}
            for owner, found in self.known.attributes.items()
        }
        return self.calls.end_round() or self.known.classes != before

    def _run(self, body: _Body, index: Index, statements: list[ast.stmt]) -> None:
        try:
            body.run(statements)
        except RecursionError:
            self.project.too_deep.add(index.file.source.name)

    def _function(self, index: Index, function: Function) -> None:
        outer = index.scope(function)
        env: Env = {}
        if isinstance(outer, FUNCTIONS):
            env.update(self.closures.get(outer, {}))
        env.update(self.calls.parameters(function))
        body = _Body(self.known, index, env, function)
        self._run(body, index, function.body)
        self.closures[function] = {k: v for k, v in env.items() if not v.is_unknown}


class _Body(Expressions):
    """One function's (or module's) statements."""

    def __init__(self, known: Known, index: Index, env: Env, function: Function | None) -> None:
        super().__init__(known, index, env, function)
        self.nested = 0

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.eval(node.value)
            for target in node.targets:
                self.bind(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.bind(node.target, self.eval(node.value))
        elif isinstance(node, ast.AugAssign):
            self.bind(node.target, self.arithmetic(self.eval(node.target), self.eval(node.value)))
        elif isinstance(node, ast.Return):
            value = UNKNOWN if node.value is None else self.eval(node.value)
            if self.function is not None:
                self.known.calls.note_return(self.function, value)
        elif not self.compound(node):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.eval(child)
            self.note_backward(node)

    def note_backward(self, node: ast.stmt) -> None:
        """What a network gave may be a structure; what has a backward() is a tensor."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or method_of(call) != "backward":
            return
        assert isinstance(call.func, ast.Attribute)
        path = path_of(call.func.value)
        if path and (found := self.lookup(path)).kind == "output":
            self.set(path, dataclasses.replace(found, kind="tensor"))

    def compound(self, node: ast.stmt) -> bool:
        """A statement with statements in it."""
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self.loop(node)
        elif isinstance(node, ast.If):
            self.branches(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self.with_(node)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.alternatives([[*node.body, *node.orelse], *(h.body for h in node.handlers)])
            self.run(node.finalbody)
        elif isinstance(node, ast.Match):
            self.eval(node.subject)
            self.alternatives([*(case.body for case in node.cases), []])
        elif isinstance(node, ast.ClassDef):
            outer, self.env = self.env, dict(self.env)
            self.run([each for each in node.body if not isinstance(each, FUNCTIONS)])
            self.env = outer
        elif isinstance(node, FUNCTIONS):
            for default in (*node.args.defaults, *node.args.kw_defaults, *node.decorator_list):
                if default is not None:
                    self.eval(default)
            self.set(node.name, Value("function"))
        else:
            return False
        return True

    def loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        before = dict(self.env)
        # The second pass sees what the first has carried over; the outermost loop's is enough.
        passes = 1 if self.nested else 2
        self.nested += 1
        for _ in range(passes):
            if isinstance(node, ast.While):
                self.eval(node.test)
            else:
                self.bind(node.target, element(self.eval(node.iter)))
            self.run(node.body)
            self.join(before)
        self.nested -= 1
        self.run(node.orelse)

    def branches(self, node: ast.If) -> None:
        """An if with all its elifs, which the tree nests."""
        bodies: list[list[ast.stmt]] = []
        while True:
            self.eval(node.test)
            bodies.append(node.body)
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                node = node.orelse[0]
            else:
                break
        self.alternatives([*bodies, node.orelse])

    def alternatives(self, bodies: list[list[ast.stmt]]) -> None:
        before, results = dict(self.env), []
        for body in bodies:
            self.replace(before)
            self.run(body)
            if not (body and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)):
                results.append(dict(self.env))
        self.replace(results[0] if results else before)
        for other in results[1:]:
            self.join(other)

    def with_(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.eval(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, UNKNOWN)
        outer = self.records
        if node.body:
            inside = self.known.gradients.inside(self.index, node.body[0])
            self.records = outer and inside == "on"
        self.run(node.body)
        self.records = outer

    def replace(self, env: Env) -> None:
        """Another environment in place: the module's own is shared."""
        self.env.clear()
        self.env.update(env)

    def join(self, other: Env) -> None:
        for name in self.env.keys() | other.keys():
            one, two = self.env.get(name), other.get(name)
            if one is None or two is None:
                # Bound on one way only: it is what it was bound to, or it does not exist.
                self.env[name] = (one or two) or UNKNOWN
            else:
                self.env[name] = joined(one, two)
