"""The arguments that a Triton kernel reads and writes, by its Python source."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

_READS: Final = ("load", "load_tensor_descriptor", "gather", "descriptor_load")
#: Modules whose functions keep to what they are given.
_LANGUAGE: Final = ("tl", "triton", "language", "libdevice", "math", "tle", "gl")
_WRITES: Final = ("store", "store_tensor_descriptor", "scatter", "descriptor_store")


@dataclasses.dataclass(frozen=True)
class Access:
    """Names of the parameters that a kernel reads from and writes to; ``products``: does it
    compute matmuls (``tl.dot``), whose FLOPs its arguments do not tell?"""

    reads: frozenset[str]
    writes: frozenset[str]
    products: bool = False


def access_of(function: Callable[..., Any]) -> Access | None:
    """Of the Python function under a kernel; ``None`` where its source is not to be had.

    A pointer that is handed to another function counts as read and written.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = next((each for each in tree.body if isinstance(each, ast.FunctionDef)), None)
    return None if found is None else _Reader(found).access()


class _Reader:
    """Follows a kernel's parameters through its assignments to loads and stores."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        every = function.args
        names = [each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
        #: For each name the parameters that it points to.
        self._points: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in names}
        self._reads: set[str] = set()
        self._writes: set[str] = set()

    def access(self) -> Access:
        while self._assign():
            pass
        calls = [node for node in ast.walk(self._function) if isinstance(node, ast.Call)]
        for call in calls:
            self._call(call)
        products = any(_name(call).startswith("dot") for call in calls)
        return Access(frozenset(self._reads), frozenset(self._writes), products)

    def _assign(self) -> bool:
        """One pass over all assignments; was there anything new?"""
        changed = False
        for node in ast.walk(self._function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                if node.value is None:
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in _names(targets):
                    known = self._points.get(name, frozenset())
                    points = known | self._pointed(node.value)
                    changed = changed or points != known
                    self._points[name] = points
        return changed

    def _pointed(self, node: ast.AST) -> frozenset[str]:
        """The parameters that an expression points to: what was loaded points nowhere."""
        if isinstance(node, ast.Name):
            return self._points.get(node.id, frozenset())
        if isinstance(node, ast.Call) and _name(node) in _READS:
            return frozenset()
        parts: Iterator[ast.AST] = ast.iter_child_nodes(node)
        return frozenset().union(*map(self._pointed, parts))

    def _call(self, call: ast.Call) -> None:
        name = _name(call)
        where = self._where(call)
        if name in _READS:
            self._reads |= where
        elif name in _WRITES:
            self._writes |= where
        elif name.startswith("atomic_"):
            self._reads |= where
            self._writes |= where
        elif self._is_foreign(call):
            handed = self._pointed(ast.Tuple(elts=_arguments(call)))
            self._reads |= handed
            self._writes |= handed

    def _is_foreign(self, call: ast.Call) -> bool:
        """Is another kernel's function called, not one of Triton's or Python's?"""
        root: ast.expr = call.func
        if isinstance(root, ast.Name):
            return not hasattr(builtins, root.id)
        while isinstance(root, ast.Attribute):
            root = root.value
        return (
            isinstance(root, ast.Name) and root.id not in self._points and root.id not in _LANGUAGE
        )

    def _where(self, call: ast.Call) -> frozenset[str]:
        """What a load or store is of: the first argument, or the descriptor whose method it is."""
        if isinstance(call.func, ast.Attribute):
            own = self._pointed(call.func.value)
            if own:
                return own
        named = [each.value for each in call.keywords if each.arg == "pointer"]
        first = [*call.args[:1], *named][:1]
        return self._pointed(first[0]) if first else frozenset()


def _name(call: ast.Call) -> str:
    """Of the function that is called, without its module."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names(targets: Sequence[ast.expr]) -> Iterator[str]:
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]
