"""Whether autograd is enabled at a place in a script: yes, no, or unknown."""

from __future__ import annotations

import ast
from typing import Final, Literal

from trainfit.lint.reading import torch_names as script_torch
from trainfit.lint.reading.index import Function, Index, is_literal, path_of
from trainfit.lint.reading.project import Project

Recording = Literal["on", "off", "maybe"]
#: Levels of callers that are examined; beyond, it is unknown.
_DEPTH: Final = 24


class Gradients:
    """Answers for every place; functions are judged by their decorators and by all their calls."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._functions: dict[Function, Recording] = {}
        self._depth = 0
        self._switched = any(
            "torch.set_grad_enabled" in index.file.origins(call.func)
            and isinstance(index.parents.get(call), ast.Expr)
            for index, call in project.calls()
        )

    def at(self, index: Index, node: ast.AST) -> Recording:
        """Are gradients recorded where a node stands?"""
        here = self.inside(index, node)
        if here != "on":
            return here
        scope = index.scope(node)
        if scope is None:
            return "maybe"
        return "on" if isinstance(scope, ast.Module) else self.of_function(scope)

    def inside(self, index: Index, node: ast.AST) -> Recording:
        """The same by the `with` statements alone that a node stands in."""
        if self._switched:
            return "maybe"
        for parent, child in index.ancestors(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
                for item in parent.items:
                    found = self._context(index, item.context_expr)
                    if found is not None:
                        return found
        return "on"

    def of_function(self, function: Function) -> Recording:
        """Are gradients recorded in a function: by its decorators and wherever it is called?"""
        if function in self._functions:
            return self._functions[function]
        self._functions[function] = "maybe"  # for a function that calls itself
        self._functions[function] = found = self._of_function(function)
        return found

    def _of_function(self, function: Function) -> Recording:
        index = self._project.index_of(function)
        for decorator in function.decorator_list:
            found = self._context(index, decorator)
            if found is not None:
                return found
        sites, complete = self._project.call_sites(function)
        if not sites or not complete or self._depth > _DEPTH:
            return "maybe"
        self._depth += 1
        states = {self.at(other, site) for other, site in sites}
        self._depth -= 1
        return states.pop() if len(states) == 1 else "maybe"

    def _context(self, index: Index, node: ast.expr) -> Recording | None:
        """What a context manager or decorator does to gradients; None: nothing."""
        target = node.func if isinstance(node, ast.Call) else node
        origins = index.file.origins(target)
        if origins and origins <= script_torch.NO_GRAD:
            # inference_mode(False), no_grad() has no such argument
            off = isinstance(node, ast.Call) and node.args
            return "maybe" if off and not is_literal(node.args[0], True) else "off"  # type: ignore[attr-defined]
        if origins == {"torch.enable_grad"}:
            return "on"
        if origins == {"torch.set_grad_enabled"} and isinstance(node, ast.Call) and node.args:
            if is_literal(node.args[0], False):
                return "off"
            return "on" if is_literal(node.args[0], True) else "maybe"
        if origins and all(each.startswith(script_torch.HARMLESS_CONTEXTS) for each in origins):
            return None
        if path_of(target).rpartition(".")[2] in script_torch.HARMLESS_NAMES:
            return None
        return "maybe"
