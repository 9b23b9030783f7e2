"""Python source of a script's files and functions, as syntax; what its files are called.

What cannot be read or parsed (typed at a prompt, made by ``exec``, no Python) is ``None``: who
looks at source has nothing to say then. Line numbers are those of the file.
"""

from __future__ import annotations

import ast
import linecache
import os
import textwrap
from types import CodeType


def parsed(text: str) -> ast.Module | None:
    """The syntax of source, which may be indented as a whole; lines count from 1."""
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError):
        return None


def file_syntax(path: str) -> ast.Module | None:
    """The syntax of a file as it is now, or of a notebook's cell.

    As in tracebacks, a relative path may also be one from a folder on ``sys.path``.
    """
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    return parsed("".join(lines)) if lines else None


def function_syntax(
    code: CodeType,
) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The syntax of a function, or of a module's own code; ``None`` for a lambda, too."""
    tree = file_syntax(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def names_in(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> list[str]:
    """The names in a part of the source, as often as they stand there: all of them, those that get
    a value (``ast.Store``), or those that are read (``ast.Load``)."""
    return [
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    ]


def from_here(path: str) -> str | None:
    """A file's path from the folder that this process runs in; ``None``: it is not below that."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return None if inside.startswith("..") else inside


def short_file(path: str) -> str:
    """A file's path from the folder that this process runs in; its name alone, if it is
    elsewhere."""
    return from_here(path) or os.path.basename(path)


def relative_place(place: str | None) -> str:
    """``file:line``, the file as :func:`short_file` names it; ``None``: empty."""
    if place is None:
        return ""
    path, _, line = place.rpartition(":")
    return f"{short_file(path)}:{line}"
