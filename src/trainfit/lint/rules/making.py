"""Creates a finding from a syntax node."""

from __future__ import annotations

import ast
from typing import Final

from trainfit.lint.reading.index import Index, Scope
from trainfit.results.machine.doctor import Finding

_NAMES: Final = frozenset({"device", "dev"})


def finding(
    rule: str, index: Index, node: ast.expr | ast.stmt, reason: str, rewrite: str
) -> Finding:
    """A finding at a node; where a chain of calls spans lines, at the last method's name."""
    source = index.file.source
    line, column = node.lineno, source.column(node)
    if isinstance(node, ast.Call) and node.func.end_lineno != node.lineno:
        line, column = source.method_at(node)
    return Finding(rule, source.name, line, column, source.line(line).rstrip(), reason, rewrite)


def named_devices(index: Index) -> dict[Scope | None, str]:
    """The name that holds a device in a function (or at the top) of a file, where there is one."""
    found: dict[Scope | None, str] = {}
    for node in index.parents:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id.lower() in _NAMES:
                found.setdefault(index.scope(node), node.id)
        elif isinstance(node, ast.arg) and node.arg.lower() in _NAMES:
            function = index.parents[index.parents[node]]
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(function, node.arg)
    return found
