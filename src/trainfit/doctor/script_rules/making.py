"""How a finding is made from a node."""

from __future__ import annotations

import ast

from trainfit.doctor.script_index import Index
from trainfit.results.doctor import Finding


def finding(
    rule: str, index: Index, node: ast.expr | ast.stmt, reason: str, rewrite: str
) -> Finding:
    """A finding at a node; where a chain of calls spans lines, at the last method's name."""
    source = index.file.source
    line, column = node.lineno, source.column(node)
    if isinstance(node, ast.Call) and node.func.end_lineno != node.lineno:
        line, column = source.method_at(node)
    return Finding(rule, source.name, line, column, source.line(line).rstrip(), reason, rewrite)


def named_device(index: Index) -> str:
    """The name under which the file already holds a device; "device" where it does not."""
    names = [
        each.id
        for each in ast.walk(index.file.source.tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        if each.id.lower().rstrip("_") in {"device", "dev"}
    ]
    return names[0] if names else "device"
