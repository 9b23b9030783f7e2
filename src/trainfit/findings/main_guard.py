"""Top-level code of a script that spawned workers would run again, as its source tells."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path


def unguarded_line(path: Path) -> int | None:
    """The first line at a script's top level that iterates or calls, without a guard."""
    try:
        body = ast.parse(path.read_text(errors="replace")).body
    except (OSError, SyntaxError, ValueError):
        return None
    return _working_line(body)


def _working_line(body: Sequence[ast.stmt]) -> int | None:
    for node in body:
        if isinstance(node, ast.For | ast.While):
            return node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            # "main()", "train(args)"; modules' functions ("torch.manual_seed(0)") only set up.
            if isinstance(function, ast.Name) and function.id != "print":
                return node.lineno
        if isinstance(node, ast.With | ast.Try | ast.If) and not _is_guard(node):
            line = _working_line(node.body)
            if line is not None:
                return line
    return None


def _is_guard(node: ast.stmt) -> bool:
    """Is it `if __name__ == "__main__":`, or another question of the name?"""
    test = node.test if isinstance(node, ast.If) else None
    names = ast.walk(test) if test is not None else ()
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in names)
