"""Which lines of a library's code a script reaches, by the names that it and its files mention.

A script that comes with its library (timm's train.py) imports hundreds of files, of whose functions
a run calls few. What is wrong in one that nothing calls spoils no run.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from trainfit.findings.worker_start import is_main_guard
from trainfit.lint.imports import File, around_package

#: What makes the folder next to it a library that is installed, not only a part of a script.
_BUILDS: Final = ("pyproject.toml", "setup.py", "setup.cfg")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unreached(files: Sequence[File], words: Collection[str] = ()) -> dict[str, list[range]]:
    """The lines of functions and classes that nothing mentions of what may run, for each file of a
    library among those that a script (the first) imports.

    ``words`` are the command's: by one of them, or by a text in the script, a registry may find a
    function. What runs when a file is imported is all but the bodies of functions and what is for
    the file as a program; of a class that is mentioned, every method may run.
    """
    libraries = [file for file in files[1:] if _is_of_library(file.source.path)]
    if not libraries:
        return {}
    defined: dict[str, list[ast.AST]] = defaultdict(list)
    mentioned = _mentions(files[0].source.nodes, texts=True) | set(words)
    for file in files[1:]:
        if file not in libraries:
            mentioned |= _mentions(file.source.nodes, texts=True)
    for file in libraries:
        for node in file.source.tree.body:
            if isinstance(node, _NAMED):
                defined[node.name].append(node)
                for decorator in node.decorator_list:
                    mentioned |= _mentions(ast.walk(decorator))
            elif isinstance(node, ast.If) and is_main_guard(node):
                for other in node.orelse:
                    mentioned |= _mentions(ast.walk(other))
            elif not isinstance(node, ast.Import | ast.ImportFrom) and not _exports(node):
                mentioned |= _mentions(ast.walk(node))
    left = list(mentioned)
    while left:
        for each in defined.pop(left.pop(), ()):
            new = _mentions(ast.walk(each)) - mentioned
            mentioned |= new
            left += new
    found = {id(each) for nodes in defined.values() for each in nodes}
    return {
        file.source.name: [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in file.source.tree.body
            if id(node) in found and isinstance(node, _NAMED)
        ]
        for file in libraries
    }


def _is_of_library(path: Path) -> bool:
    """Is the file in a package that the folder around it says how to build?"""
    folder, package = around_package(path)
    around = (folder, folder.parent) if folder.name == "src" else (folder,)
    return bool(package) and any((each / name).is_file() for each in around for name in _BUILDS)


def _exports(node: ast.stmt) -> bool:
    """Is it ``__all__ = …``, which calls nothing?"""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets)


def _mentions(nodes: Iterable[ast.AST], *, texts: bool = False) -> set[str]:
    """Names in them, of attributes as well, and what their texts say."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif texts and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
