"""Constants of a script: whole numbers that it assigns at its top level, each once."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """The nodes of their values (``ast.Constant``) by name."""
    found: dict[str, Any] = {}
    assigned: list[str] = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            assigned += [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and _is_number(value):
            found[targets[0].id] = value
    return {name: value for name, value in found.items() if assigned.count(name) == 1}


def with_constants(source: bytes, path: str, values: Mapping[str, int]) -> Any:
    """The code of a script's ``source`` in which these constants have other values."""
    tree = ast.parse(source, path)
    for name, node in constants_of(tree).items():
        if name in values:
            node.value = values[name]
    return compile(tree, path, "exec", dont_inherit=True)


def _is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
