"""What a data set consists of: its attributes and what they hold, each with its path."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings.worker_start import library_of
from trainfit.loader.measure.workload import Workload
from trainfit.results.findings import Place

#: Objects that are looked at, elements of one container, and how deep.
_MOST_OBJECTS: Final = 5000
_MOST_ELEMENTS: Final = 64
_DEEPEST: Final = 12
_LEAVES: Final = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray)


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The object and all that it holds, breadth first, as far as the limits go."""
    seen: set[int] = set()
    level = [(path, value)]
    for _ in range(_DEEPEST):
        following: list[tuple[str, Any]] = []
        for name, each in level:
            if id(each) in seen or len(seen) >= _MOST_OBJECTS:
                continue
            seen.add(id(each))
            yield name, each
            following += held(each, name)
        level = following


def held(value: Any, path: str) -> list[tuple[str, Any]]:
    """What an object holds, one level down; of long containers the first elements."""
    if isinstance(value, (*_LEAVES, torch.Tensor, type)) or inspect.ismodule(value):
        return []
    if isinstance(value, Mapping):
        pairs = [(f"{path}[{key!r:.40}]", each) for key, each in _first(value.items())]
        return pairs + _attributes(value, path)
    if isinstance(value, list | tuple | set | frozenset):
        items = [(f"{path}[{number}]", each) for number, each in enumerate(_first(value))]
        return items + _attributes(value, path)
    if isinstance(value, functools.partial):
        arguments = [(f"{path}.args[{n}]", each) for n, each in enumerate(value.args)]
        named = [(f"{path}.keywords[{key!r}]", each) for key, each in value.keywords.items()]
        return [(f"{path}.func", value.func), *arguments, *named]
    if inspect.ismethod(value):
        return [(f"{path}.__self__", value.__self__)]
    if inspect.isroutine(value) or inspect.isgenerator(value):
        return []
    return _attributes(value, path)


def described(value: Any) -> str:
    """An object's type, or of a function its name and place."""
    if inspect.isfunction(value):
        code = value.__code__
        return f"{value.__qualname__}, {code.co_filename}:{code.co_firstlineno}"
    kind = type(value)
    module = kind.__module__.split(".")[0]
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__name__}"


def _attributes(value: Any, path: str) -> list[tuple[str, Any]]:
    """As they are stored, without running the object's own code."""
    names: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        names |= object.__getattribute__(value, "__dict__")
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                names.setdefault(name, object.__getattribute__(value, name))
            except AttributeError:
                continue
    return [(f"{path}.{name}", each) for name, each in names.items()]


def _first(values: Any) -> list[Any]:
    return [each for _, each in zip(range(_MOST_ELEMENTS), values, strict=False)]


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


def open_handles(workload: Workload) -> dict[str, str]:
    """What the data set holds open, each once, by the outermost attribute: path → type."""
    found: dict[str, str] = {}
    for path, value in walk(workload.dataset, "dataset"):
        if is_within(path, found):
            continue
        if library := _handle_library(value):
            found[path] = f"{library}.{type(value).__name__}"
    return found


def _handle_library(value: Any) -> str:
    kind = type(value)
    library = library_of(kind.__module__ or "", kind.__name__)
    if not library or _is_closed(value, library):
        return ""
    # What is only written to has no position that matters (logs); nor do the standard streams.
    if library == "_io" and (not value.readable() or value is sys.__stdin__):
        return ""
    return library


def _is_closed(value: Any, library: str) -> bool:
    try:
        if library == "h5py":
            return not value
        if library == "zipfile":
            return getattr(value, "fp", value) is None
        return getattr(value, "closed", False) is True or not getattr(value, "isopen", True)
    except Exception:  # a library's object may raise anything
        return False


def is_within(path: str, outer: Iterable[str]) -> bool:
    """Is it one of these objects, or a part of one?"""
    return any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in outer)
