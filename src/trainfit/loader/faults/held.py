"""What a data set holds, in words, and where the script makes it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from trainfit.hooks.held_objects import walk
from trainfit.results.findings import Place


def described(value: Any) -> str:
    """An object's type, or of a function its name and place."""
    if inspect.isfunction(value):
        code = value.__code__
        return f"{value.__qualname__}, {code.co_filename}:{code.co_firstlineno}"
    kind = type(value)
    module = kind.__module__.split(".")[0]
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__name__}"


def made_at(dataset: Any, path: str) -> Place | None:
    """The line that gives an attribute its value in the class of what holds it; ``None``: not
    found, or found more than once."""
    outer, _, name = path.rpartition(".")
    owner = next((each for at, each in walk(dataset, "dataset") if at == outer), None)
    if owner is None:
        return None
    try:
        file = inspect.getsourcefile(type(owner))
        lines, begin = inspect.getsourcelines(type(owner))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.With)
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and target.attr == name
        and not (isinstance(node, ast.Assign) and _is_none(node.value))
    ]
    if file is None or len(set(found)) != 1:
        return None
    return Place(file, begin + found[0] - 1)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
