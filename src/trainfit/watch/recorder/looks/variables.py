"""The script's variables that grow with the steps: lists, dictionaries, tensors, sums of losses.

Only lengths are asked for, of what the training loop's functions and the script's modules name;
nothing is compared, copied or computed. A look takes less than a millisecond, and they become
rarer as the run goes on.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import linecache
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings.source_code import relative_place
from trainfit.results.runs.watched import FIGURES, GRAPH, GrowingVariable, Holds
from trainfit.simgpu.device.user_location import is_library, loaded_modules, locals_of
from trainfit.torch_private.autograd import operands
from trainfit.watch.recorder.looks.carried import CarriedGraphs
from trainfit.watch.recorder.looks.object_sizes import entry_bytes

#: Names that are looked at, in one namespace and in all.
_MOST_NAMES: Final = 300
_MOST: Final = 1500
#: Entries of a dictionary up to which its values are looked at, too: histories by their names.
_SMALL: Final = 16
#: Additions that a sum's graph must have, to be one of all steps.
_SUMS: Final = 16
#: Looks in a row at which a variable must have grown, and by how much in all.
_LOOKS: Final = 4
_LEAST: Final = 8
#: Tensors that a state has at most.
_FEW: Final = 4
#: Of its rate so far, what it must have grown by lately: a cache fills and is full.
_GOES_ON: Final = 0.5
_TOLD: Final = 6
#: Data sets within one that are looked at.
_DATASETS: Final = 8
_DICTIONARIES: Final = (dict, collections.defaultdict, collections.OrderedDict)
_SIZED: Final = frozenset(
    (*(list, set, collections.deque, collections.Counter, str, bytes, bytearray), *_DICTIONARIES)
)
#: What ``functools.lru_cache`` makes of a function.
_CACHE: Final = type(functools.lru_cache(lambda: None))
#: Whose attributes are not looked at.
_NEVER: Final = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor),
    np.ndarray,
)


@dataclass(slots=True)
class _Course:
    """Steps and sizes of a variable, where it has only grown so far; ``value`` is not kept."""

    path: str
    lines: range | None
    looks: list[tuple[int, int]] = field(default_factory=list)
    kind: str = ""
    holds: Holds = ""
    nbytes: int = 0
    at: str = ""
    """The line of a function whose results are kept."""
    is_memory: bool = False
    """The training filled it with samples, and it stays that where it is full."""
    of_data: bool = False
    has_limit: bool = False
    """It is a ``deque(maxlen=…)``, which is full some time."""
    ends: tuple[int, int] | None = None
    """Which objects its first and its last entry were; not kept either."""

    def add(self, step: int, size: int, ends: tuple[int, int] | None = None) -> None:
        """A look; ``ends``: see :func:`_ends`."""
        # What is made again (a list of each episode) may be longer by chance.
        other = ends and self.ends and ends[0] != self.ends[0] and ends[1] != self.ends[1]
        if self.looks and (size <= self.looks[-1][1] or other):
            self.looks.clear()
        self.ends = ends or self.ends
        self.looks.append((step, size))
        if len(self.looks) > 2 * _LOOKS:
            del self.looks[1]  # the first one stays

    @property
    def grows(self) -> bool:
        """Has it grown at each of the last looks, and not much less lately?"""
        if len(self.looks) < _LOOKS:
            return False
        (first, small), (before, less), (last, large) = self.looks[0], *self.looks[-2:]
        if large - small < _LEAST or last <= before:
            return False
        rate = (large - small) / (last - first)
        return (large - less) / (last - before) >= _GOES_ON * rate


class VariableLooks:
    """Looks at the variables that a training can reach by name."""

    def __init__(self) -> None:
        self._courses: dict[tuple[str, str], _Course] = {}
        self._loop: frozenset[CodeType] = frozenset()
        self._carried = CarriedGraphs()

    def look(
        self,
        step: int,
        frame: FrameType | None,
        loop: frozenset[CodeType],
        datasets: Iterable[object] = (),
    ) -> None:
        """Look at the variables of the script's modules, of the functions from ``frame`` outwards
        that are in ``loop``, and of data sets that make batches in this process; ``step`` is how
        many there were."""
        self._loop = loop
        self._look(step, itertools.chain(_modules(), _functions(frame, loop), _figures()))
        for dataset in datasets:
            self._look(step, _objects(parts_of(dataset)), of_data=True)

    def look_at(self, step: int, objects: Iterable[object]) -> None:
        """Look at the variables of the script's modules, and of objects (a data set):
        ``self.cache``."""
        self._look(step, itertools.chain(_modules(), _objects(objects)))

    def _look(self, step: int, places: Iterable[_Names], *, of_data: bool = False) -> None:
        left = _MOST
        for file, names, lines in places:
            for path, value in itertools.islice(_reached(names), left):
                left -= 1
                self._note(step, file, _Course(path, lines, of_data=of_data), value)

    def _note(self, step: int, file: str, made: _Course, value: Any) -> None:
        state = _state(value)
        if state is not None:
            self._note_graph(step, file, made, state)
        size = _size(value)
        if size is None:
            return
        course = self._courses.setdefault((file, made.path), made)
        course.add(step, size, _ends(value))
        if course.grows:
            course.kind = _kind(value) if file else FIGURES
            if course.kind == "cache" and (code := _code_of(value)) is not None:
                course.at = f"{code.co_filename}:{code.co_firstlineno}"
            course.holds, course.nbytes = _held(value)
            course.is_memory |= _has_samples(value)
            course.has_limit = type(value) is collections.deque and value.maxlen is not None

    def _note_graph(self, step: int, file: str, made: _Course, value: torch.Tensor) -> None:
        name = file, f"{made.path}.grad_fn"
        steps = self._carried.looks(name, value.grad_fn, step)
        self._courses.pop(name, None)
        if steps and not _additions(value):
            looks = [(each, each - steps[0]) for each in steps]
            self._courses[name] = _Course(
                made.path, made.lines, [looks[0], *looks[1:][-2 * _LOOKS :]], GRAPH, "graphs"
            )

    @property
    def grows(self) -> int:
        """How many variables grow."""
        return sum(course.grows for course in list(self._courses.values()))

    def memories(self) -> tuple[str, ...]:
        """Lists that the training itself filled with samples: a replay memory, a rollout."""
        return tuple(each.path for each in dict(self._courses).values() if each.is_memory)[:_TOLD]

    def found(self) -> tuple[GrowingVariable, ...]:
        """The variables that grow; what keeps tensors first, then the largest."""
        growing = [
            _told(file, course, _runs(self._loop, file))
            for (file, _), course in dict(self._courses).items()
            if course.grows and not course.has_limit
        ]
        order = ("graphs", "tensors", "")
        growing.sort(
            # What a data set holds has a name in the script's modules, too: its own tells more.
            key=lambda each: (
                *(order.index(each.holds), each.kind == GRAPH, -(each.item_bytes or 0)),
                *(not each.of_data, -each.last_size),
            )
        )
        return tuple(growing[:_TOLD])


def _told(file: str, course: _Course, runs: frozenset[int]) -> GrowingVariable:
    (first, small), (last, large) = course.looks[0], course.looks[-1]
    return GrowingVariable(
        name=course.path,
        place=_where(file, course, runs),
        kind=course.kind,
        first_size=small,
        last_size=large,
        steps=last - first,
        holds=course.holds,
        item_bytes=course.nbytes or None,
        of_data=course.of_data,
    )


# ---
# What can be reached by a name.


_Names = tuple[str, Mapping[str, Any], range | None]


#: The script's modules by how many modules there were: it asks for the files of thousands.
_script_modules: dict[int, list[_Names]] = {}


def _modules() -> Iterator[_Names]:
    """Files and variables of the script's modules, each once: the script has two names there."""
    count = len(sys.modules)
    if count not in _script_modules:
        modules = list(_find_modules())
        _script_modules.clear()
        _script_modules[count] = modules
    yield from _script_modules[count]


def _find_modules() -> Iterator[_Names]:
    visited: set[str] = set()
    for _, names in loaded_modules():
        file = names.get("__file__")
        if type(file) is not str or file in visited:
            continue
        if os.path.isabs(file) and not is_library(file):
            visited.add(file)
            yield file, names, None


def _objects(objects: Iterable[object]) -> Iterator[_Names]:
    """The names of objects whose classes the script's files define."""
    for each in objects:
        if _is_of_script(type(each)):
            yield str(sys.modules[type(each).__module__].__file__), {"self": each}, None


def parts_of(dataset: Any) -> list[Any]:
    """A data set, and those that it is made of (Subset, ConcatDataset)."""
    found = [dataset]
    for each in found:
        if len(found) < _DATASETS:
            inner = getattr(each, "dataset", None)
            more = [inner] if inner is not None else getattr(each, "datasets", None)
            found += list(more)[:_DATASETS] if isinstance(more, list | tuple) else []
    return found[:_DATASETS]


def _figures() -> Iterator[_Names]:
    """Figures that pyplot keeps until they are closed, which are in no file of the script."""
    kept = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    figures = getattr(kept, "figs", None)
    if type(figures) in _DICTIONARIES:
        yield "", {"pyplot": figures}, None


def _code_of(cache: Any) -> CodeType | None:
    code = getattr(getattr(cache, "__wrapped__", None), "__code__", None)
    return code if type(code) is CodeType else None


def _functions(frame: FrameType | None, loop: frozenset[CodeType]) -> Iterator[_Names]:
    """The names in the script's functions that are called."""
    while frame is not None:
        code = frame.f_code
        if code in loop and code.co_flags & inspect.CO_OPTIMIZED and frame.f_trace is None:
            last = max((line for _, _, line in code.co_lines() if line), default=0)
            with contextlib.suppress(RuntimeError):  # it goes on meanwhile
                yield code.co_filename, locals_of(frame), range(code.co_firstlineno, last + 1)
        frame = frame.f_back


def _reached(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, attributes of objects ("self.history"), and entries of small dictionaries."""
    # By types alone: ``isinstance`` asks an object for its class, which may run anyone's code.
    for name, value in _items(names):
        yield name, value
        if type(value) in _DICTIONARIES:
            yield from _entries(name, value)
        elif type(value) is type and value.__module__ == names.get("__name__"):
            for key, held in _items(value.__dict__):
                inner = held.__func__ if type(held) in (staticmethod, classmethod) else held
                if type(inner) is _CACHE:
                    yield f"{name}.{key}", inner
        elif type(value) not in _SIZED and not issubclass(type(value), _NEVER):
            with contextlib.suppress(AttributeError, TypeError):  # it has no attributes
                for key, inner in _items(object.__getattribute__(value, "__dict__")):
                    yield f"{name}.{key}", inner
                    if type(inner) in _DICTIONARIES:
                        yield from _entries(f"{name}.{key}", inner)
                    elif type(inner) not in _SIZED and _is_of_script(type(inner)):
                        yield from _attributes(f"{name}.{key}", inner)


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """ "agent.buffer.memory" """
    with contextlib.suppress(AttributeError, TypeError):
        for key, inner in _items(object.__getattribute__(value, "__dict__")):
            yield f"{name}.{key}", inner


def _is_of_script(kind: type) -> bool:
    """Does a file of the script define this class?"""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return type(file) is str and os.path.isabs(file) and not is_library(file)


def _entries(name: str, value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    if len(value) <= _SMALL:
        for key, inner in _items(value):
            yield f"{name}[{key!r}]", inner
            if type(inner) not in _SIZED and _is_of_script(type(inner)):
                yield from _attributes(f"{name}[{key!r}]", inner)


def _items(names: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    with contextlib.suppress(RuntimeError):  # changed meanwhile
        return [
            (name, value)
            for name, value in itertools.islice(list(names.items()), _MOST_NAMES)
            if isinstance(name, str) and not name.startswith("__")
        ]
    return []


# ---
# How large it is, and what it holds.


def _size(value: Any) -> int | None:
    """Entries, rows, elements, or additions of a sum's graph; ``None``: nothing that grows."""
    value = _saved(value)
    kind = type(value)
    if kind in _SIZED:
        return len(value)
    if kind is _CACHE:
        return int(value.cache_info().currsize)
    if kind is torch.Tensor:
        return _additions(value) or value.numel()
    if kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] in ("pandas", "polars"):
        return len(value)
    return value.size if kind is np.ndarray else None


def _state(value: Any) -> torch.Tensor | None:
    """The tensor with a graph that a variable is, or that is the first of a few: of an LSTM's."""
    first = value[0] if type(value) is tuple and 0 < len(value) <= _FEW else value
    return first if type(first) is torch.Tensor and first.grad_fn is not None else None


def _ends(value: Any) -> tuple[int, int] | None:
    """The objects that the first and the last entry of a list or a dictionary are: of one that is
    added to, one of them stays. ``None``: it has none, or no order."""
    value = _saved(value)
    if type(value) not in (list, collections.deque, *_DICTIONARIES):
        return None
    with contextlib.suppress(RuntimeError):  # it changes meanwhile
        entries = value.values() if type(value) in _DICTIONARIES else value
        first, last = next(iter(entries), None), next(reversed(entries), None)
        return None if first is None or last is None else (id(first), id(last))
    return None


def _saved(value: Any) -> Any:
    """What ``itertools.cycle`` has kept so far to give it again; all else is itself."""
    if type(value) is not itertools.cycle:
        return value
    return next((referent for referent in gc.get_referents(value) if type(referent) is list), value)


def _additions(value: torch.Tensor) -> int:
    """The number of terms of a sum that keeps the graphs of them all; 0: it is none."""
    found, node = 0, value.grad_fn if value.numel() == 1 else None
    while node is not None and found < 1 << 14:
        if not node.name().startswith("Add"):
            break
        found += 1
        node = next(iter(operands(node)), None)
    return found if found >= _SUMS else 0


def _kind(value: Any) -> str:
    if type(value) is torch.Tensor:
        return "sum" if _additions(value) else "tensor"
    if type(value) is _CACHE:
        return "cache"
    return "array" if type(value) is np.ndarray else type(value).__name__


def _held(value: Any) -> tuple[Holds, int]:
    """What its last entry keeps, and the bytes of tensors and arrays in it, or of Python's objects
    where it has none."""
    value = _saved(value)
    if type(value) is torch.Tensor:
        return ("graphs" if value.grad_fn is not None else "tensors"), 0
    if type(value) is np.ndarray:
        return "tensors", 0
    last = _last(value)
    tensors = [leaf for leaf in _leaves(last) if issubclass(type(leaf), torch.Tensor | np.ndarray)]
    if not tensors:
        return "", entry_bytes(value, last)
    graphs = any(getattr(tensor, "grad_fn", None) is not None for tensor in tensors)
    return ("graphs" if graphs else "tensors"), sum(tensor.nbytes for tensor in tensors)


def _last(value: Any) -> Any:
    """The entry that was added last; ``None``: it has none."""
    with contextlib.suppress(RuntimeError, TypeError):  # it changes meanwhile, or is a set
        return next(reversed(value.values() if type(value) in _DICTIONARIES else value), None)
    return None


def _has_samples(value: Any) -> bool:
    """Are its entries what a batch can be made of, numbers in rows? Not so a history of losses, nor
    results that keep their graphs."""
    if type(value) not in (list, collections.deque):
        return False
    last = _last(value)
    parts = last if issubclass(type(last), list | tuple) else [last]
    if not issubclass(type(last), list | tuple) and _is_of_script(type(last)):
        with contextlib.suppress(AttributeError, TypeError):  # it has no attributes
            parts = list(object.__getattribute__(last, "__dict__").values())
    return any(map(_is_row, parts[:_SMALL]))


def _is_row(part: Any) -> bool:
    kind = type(part)
    if issubclass(kind, torch.Tensor):
        return part.numel() > 1 and part.grad_fn is None
    if issubclass(kind, np.ndarray):
        return bool(part.size > 1)
    return kind in (list, tuple) and len(part) > 1 and type(part[0]) in (int, float)


def _leaves(value: Any, depth: int = 3) -> Iterable[Any]:
    if type(value) in _DICTIONARIES:
        value = list(value.values())
    elif issubclass(type(value), torch.nn.Module):  # a copy of the model
        value = list(itertools.islice(torch.nn.Module.parameters(value), _SMALL))
    if issubclass(type(value), list | tuple) and depth:
        for each in value[:_SMALL]:
            yield from _leaves(each, depth - 1)
    else:
        yield value


# ---
# The line that makes it grow.


def _runs(loop: frozenset[CodeType], file: str) -> frozenset[int]:
    """Lines of a file that are the training loop's own."""
    codes = (code for code in loop if code.co_filename == file)
    return frozenset(line for code in codes for _, _, line in code.co_lines() if line)


#: What a library's object keeps is added to by a method of another name.
_REGISTERS: Final = {".handlers": r"\.addHandler\s*\(", "_hooks": r"\.register_\w*hook\s*\("}


#: How a figure is opened.
_OPENS: Final = re.compile(
    r"\b(?:plt|pyplot|pylab)\.(?:figure|subplots|subplot_mosaic|subplot)\s*\("
)


def _first_of(pattern: re.Pattern[str], file: str) -> str:
    """The first line of a file that has it; empty: none."""
    lines = enumerate(linecache.getlines(file), 1)
    found = next((n for n, text in lines if pattern.search(text.partition("#")[0])), None)
    return "" if found is None else relative_place(f"{file}:{found}")


def _where(file: str, course: _Course, runs: frozenset[int]) -> str:
    """The first line that adds to it, one of the training loop before others; where none does, the
    first one of its function."""
    if course.at:
        return relative_place(course.at)
    if not file:
        return next(filter(None, (_first_of(_OPENS, each) for each, _, _ in _modules())), "")
    path, lines = course.path, course.lines
    outer, _, inner = path.partition("[")
    name = re.escape(outer.rpartition(".")[2])  # self. has another name outside
    key = re.escape(inner.partition("]")[0].strip("'\""))  # of a history by names
    adds = re.compile(
        rf"\b{name}\b[^=#]*?(?:\.(?:append|appendleft|extend|add|insert|update|setdefault)\s*\(|\+=)"
        rf"|\b{name}\b\s*=[^=].*\b(?:{name}|cycle)\b|\b{name}\b\s*\[.*\]\s*=[^=]"
    )
    for ending, call in _REGISTERS.items():
        if path.endswith(ending):
            adds = re.compile(call)
    text = linecache.getlines(file)
    whole = range(1, len(text) + 1)
    # What an attribute gets is mostly added by a method of its object.
    for within in (lines or whole, whole if "." in path else range(0)):
        numbers = [
            number
            for number in within
            if number <= len(text) and adds.search(text[number - 1].partition("#")[0])
        ]
        if numbers:
            break
    numbers.sort(
        key=lambda n: (
            path.startswith("self.") and path not in text[n - 1],  # another one of that name
            bool(key) and not re.search(rf"(['\"]?){key}\1\s*\]", text[n - 1]),
            n not in runs or text[n - 1].lstrip().startswith("def "),
            n,
        )
    )
    if not numbers and lines is None:
        return ""
    found = numbers[0] if numbers else (lines or range(1, 2)).start
    return relative_place(f"{file}:{found}")
