"""What an object holds: its attributes and what is in them, each with its path; open files and
connections, and random generators among them, as a data set has them.

Nothing of the object's own code runs.

Digests of samples and batches, to compare them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings.worker_start import library_of
from trainfit.results.runs.watched import GLOBAL_GENERATORS

#: Objects that are looked at, elements of one container, and how deep.
_MOST_OBJECTS: Final = 5000
_MOST_ELEMENTS: Final = 64
_DEEPEST: Final = 12
_LEAVES: Final = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray)
#: What has tensors of its own.
_MODELS: Final = (torch.nn.Module, torch.optim.Optimizer)


#: Functions of one class that are looked at, and generators in all.
_MOST_FUNCTIONS: Final = 200
_MOST: Final = 50


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The object and all that it holds, breadth first, as far as the limits go."""
    visited: set[int] = set()
    level = [(path, value)]
    for _ in range(_DEEPEST):
        following: list[tuple[str, Any]] = []
        for name, each in level:
            if id(each) in visited or len(visited) >= _MOST_OBJECTS:
                continue
            visited.add(id(each))
            yield name, each
            following += held(each, name)
        level = following


def tensors_in(
    value: Any, *, depth: int = 1, most: int | None = None, attributes: int = 0
) -> Iterator[torch.Tensor]:
    """The tensors of a batch, a result or a list of these: in mappings, lists and tuples within one
    another, ``most`` parts of each, and in other objects of at most so many ``attributes``."""
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif not depth or isinstance(value, (*_LEAVES, *_MODELS, type)):
        return
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif len(getattr(value, "__dict__", ())) <= attributes:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in itertools.islice(parts, most):
        yield from tensors_in(part, depth=depth - 1, most=most, attributes=attributes)


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
        arguments = [(f"{path}.args[{n}]", argument) for n, argument in enumerate(value.args)]
        named = [(f"{path}.keywords[{key!r}]", keyword) for key, keyword in value.keywords.items()]
        return [(f"{path}.func", value.func), *arguments, *named]
    if inspect.ismethod(value):
        return [(f"{path}.__self__", value.__self__)]
    if inspect.isroutine(value) or inspect.isgenerator(value):
        return []
    return _attributes(value, path)


def _attributes(value: Any, path: str) -> list[tuple[str, Any]]:
    """The attributes as they are stored, without running the object's own code."""
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
    return [value for _, value in zip(range(_MOST_ELEMENTS), values, strict=False)]


def open_handles(dataset: Any) -> dict[str, str]:
    """What the data set holds open, each once, by the outermost attribute: path → type."""
    handles: dict[str, str] = {}
    for path, value in walk(dataset, "dataset"):
        if is_within(path, handles):
            continue
        if library := _handle_library(value):
            handles[path] = f"{library}.{type(value).__name__}"
    return handles


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


# ---
# Random generators.


def is_generator(value: Any) -> bool:
    """Is it one of NumPy's, of Python's or of PyTorch's?"""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds)


def generators(dataset: Any) -> Iterator[tuple[str, Any]]:
    """The generators that a data set holds, or that its functions name: path and object, each
    once."""
    visited: set[int] = set()
    for path, value in _places(dataset):
        if is_generator(value) and id(value) not in visited and len(visited) < _MOST:
            visited.add(id(value))
            yield path, value


def _places(dataset: Any) -> Iterator[tuple[str, Any]]:
    kinds: set[type] = set()
    for path, value in walk(dataset, "dataset"):
        yield path, value
        if isinstance(value, types.FunctionType):
            yield from _named_by(value)
        elif type(value) not in kinds and type(value).__module__ != "builtins":
            kinds.add(type(value))
            for function in itertools.islice(_functions(type(value)), _MOST_FUNCTIONS):
                yield from _named_by(function)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in ("torch", "builtins", "numpy"):
            continue
        yield from (value for value in vars(each).values() if isinstance(value, types.FunctionType))


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and variables of outer functions that a function's code names."""
    names = function.__code__.co_names
    yield from (
        (name, function.__globals__[name]) for name in names if name in function.__globals__
    )
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is yet to be assigned
            continue


def state_of(value: Any) -> str:
    """A digest of a generator's state."""
    if isinstance(value, np.random.Generator):
        state: Any = value.bit_generator.state
    elif isinstance(value, torch.Generator):
        state = value.get_state().tolist()
    elif isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
    else:
        state = value.getstate()
    with np.printoptions(threshold=1 << 20):
        return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()


def all_generators(dataset: Any) -> dict[str, Any]:
    """Every generator by path; the global ones are functions' owners themselves."""
    own = dict(generators(dataset))
    mine = (np.random.mtrand._rand, random._inst, torch.default_generator)
    return {**dict(zip(GLOBAL_GENERATORS, mine, strict=True)), **own}


def digest(sample: Any) -> str | None:
    """The digest of a sample's content; ``None`` where it holds what has no content that we
    know."""
    state = hashlib.blake2b(digest_size=16)
    return state.hexdigest() if _add(state, sample) else None


def _add(state: Any, value: Any) -> bool:
    state.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return False
        data = value.detach().cpu().contiguous().reshape(-1)
        state.update(repr((tuple(value.shape), value.dtype)).encode())
        state.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        return True
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return _add(state, value.tolist())
        state.update(repr((value.shape, value.dtype.str)).encode() + value.tobytes())
        return True
    if isinstance(value, bytes | bytearray):
        state.update(len(value).to_bytes(8, "little") + bytes(value))
        return True
    if isinstance(value, str | int | float | complex | bool | type(None) | np.generic):
        state.update(repr(value).encode(errors="surrogatepass") + b"\0")
        return True
    return _add_container(state, value)


def _add_container(state: Any, value: Any) -> bool:
    if isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow's
        parts = [repr(value.size), value.tobytes()]
    else:
        return False
    state.update(len(parts).to_bytes(8, "little"))
    return all(_add(state, part) for part in parts)
