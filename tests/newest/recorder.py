"""A plugin of pytest that records which private names of PyTorch are taken (``-p``); what it
records is for ``touched``.

Modules of trainfit that take a name of ``torch_private`` are compiled with a call around each place
that takes one. A tracer, which is told of every line, would double what the tests cost.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.newest import touched

#: The name by which compiled modules call :class:`Record`.
CALL: Final = "_touched_private_name"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of trainfit is imported."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        touched.RECORD.write_bytes(b"")  # who starts workers does so first
    assert "trainfit" not in sys.modules
    setattr(builtins, CALL, Record(touched.RECORD))
    sys.meta_path.insert(0, _Finder())


class Record:
    """Appends each name to a file, once in each process: forked ones write to the same."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._names: set[str] = set()

    def __call__(self, name: str, value: Any) -> Any:
        if name not in self._names:
            self._names.add(name)
            os.write(self._file, f"{name}\n".encode())
        return value


class _Finder:
    """Finds trainfit's modules as Python does, and has those with a private name compiled here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("trainfit."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or Path(spec.origin) not in _taking():
            return None
        spec.loader = _Loader(name, spec.origin)
        return spec


@functools.cache
def _taking() -> set[Path]:
    return {use.path for each in touched.uses().values() for use in each}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        return compile(with_calls(Path(self.path).read_text()), self.path, "exec")


def with_calls(text: str) -> ast.Module:
    """The module ``text`` with a call around each place that takes a name."""
    tree = ast.parse(text)
    calls = _Calls({id(node): name for name, node in touched.taken(tree)})
    return ast.fix_missing_locations(calls.visit(tree))


class _Calls(ast.NodeTransformer):
    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> Any:
        name = self._names.get(id(node))
        node = self.generic_visit(node)
        if name is None or not isinstance(getattr(node, "ctx", None), ast.Load):
            return node
        assert isinstance(node, ast.expr)
        call = ast.Call(ast.Name(CALL, ast.Load()), [ast.Constant(name), node], [])
        return ast.copy_location(call, node)
