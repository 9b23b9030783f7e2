"""Checks whether a data set can be pickled for spawned workers, and its pickled size.

Spawned workers get the data set, ``collate_fn`` and ``worker_init_fn`` as a pickle, each its
own. Tensors are not in it: they move to shared memory (`torch/multiprocessing/reductions.py`).
Nothing of that happens here: the pickle is counted, not kept, and tensors stay where they are.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import torch

from trainfit.findings import fixes
from trainfit.findings.source_code import parsed
from trainfit.findings.training.worker_copies import shared_handle
from trainfit.findings.worker_start import unguarded_line
from trainfit.hooks.held_objects import held, walk
from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import Workload
from trainfit.results.findings import Finding, Place, failure_finding
from trainfit.results.text import duration, short, size

#: From here on the pickle is felt when workers start: 16 MiB took 2.9 s for one spawned worker
#: and 22.4 s for eight (reference page on the DataLoader).
LARGE_BYTES: Final = 16 << 20
_DEEPEST: Final = 32
_PARTS: Final = ("dataset", "collate_fn", "worker_init_fn")


@dataclass(frozen=True)
class Unpicklable:
    """An object that pickle refuses: its ``path`` from what is sent ("dataset.file"), ``what`` it
    is (its type; of a function its name and place), and pickle's ``reason``."""

    path: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.what}): {self.reason}"


@dataclass(frozen=True)
class PickleReport:
    """What is sent to a worker that is not forked.

    ``nbytes`` is the pickle's size, ``shared_bytes`` that of the tensors, which go through
    shared memory; ``None`` where there is no pickle. ``culprits`` are what cannot be pickled.
    ``handles`` are files and connections that the data
    set holds open: path → type.
    """

    nbytes: int | None
    shared_bytes: int | None
    culprits: tuple[Unpicklable, ...] = ()
    reason: str = ""
    handles: Mapping[str, str] = field(default_factory=dict)

    @property
    def shared_handle(self) -> Finding | None:
        """A file or connection that is open before the workers start, however they start."""
        if not self.handles:
            return None
        return shared_handle(self.handles)

    @property
    def fault(self) -> Finding | None:
        """What is wrong with that, under any start method but fork."""
        others = [culprit for culprit in self.culprits if not self._is_handle(culprit)]
        if self.culprits and not others:
            return self.shared_handle
        if others:
            first = f"{others[0].path} ({others[0].what})"
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            summary = f"{first}{more} cannot be pickled: only fork starts workers with it"
            evidence = "; ".join(map(str, others))
            return failure_finding(
                "not_picklable", summary, evidence, fixes.not_picklable(evidence)
            )
        if self.nbytes is not None and self.nbytes >= LARGE_BYTES:
            said = size(self.nbytes)
            if self.shared_bytes:
                said += f" ({size(self.shared_bytes)} of tensors in shared memory in addition)"
            summary = f"Each spawned worker receives {size(self.nbytes)} at its start"
            return failure_finding("large_pickle", summary, said, fixes.HANGS["slow_start"])
        return None

    def _is_handle(self, culprit: Unpicklable) -> bool:
        """Is the culprit one of the handles, or a part of one?"""
        path = culprit.path
        return any(
            path == each or path.startswith((f"{each}.", f"{each}[")) for each in self.handles
        )


def pickled(workload: Workload, limit_s: float = 10.0) -> PickleReport:
    """Try it, in a forked process, which is ended at the time limit."""
    ended = processes.call(functools.partial(_pickled, workload), limit_s)
    if ended.value is not None:
        return ended.value
    if ended.hung:
        return PickleReport(None, None, (), f"pickling took more than {duration(limit_s)}")
    died = f"the process exited with {ended.exit_code} while pickling"
    return PickleReport(None, None, (), ended.message or died)


def _pickled(workload: Workload) -> PickleReport:
    loader = workload.loader(workload.present)
    parts = {
        "dataset": workload.dataset,
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
    }
    # What is only sent to a process that starts (locks, shared values) counts as picklable.
    standing_in: Any = _Spawning()
    context.set_spawning_popen(standing_in)
    try:
        culprits = tuple(culprit for name in _PARTS for culprit in find_culprits(parts[name], name))
        handles = workload.open_handles()
        if culprits:
            return PickleReport(None, None, culprits, handles=handles)
        sink = _Sink()
        pickler = _Counting(sink)
        pickler.dump([parts[name] for name in _PARTS])
        return PickleReport(sink.nbytes, pickler.shared_bytes, handles=handles)
    finally:
        context.set_spawning_popen(None)


class _Spawning:
    """Stands for a process that is being started: its files keep their numbers."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    DupFd = duplicate_for_child


def find_culprits(value: Any, path: str) -> tuple[Unpicklable, ...]:
    """What in an object cannot be pickled; ``path`` names the object."""
    culprits: list[Unpicklable] = []
    _search(value, path, culprits, set(), 0)
    return tuple(culprits)


def _search(
    value: Any, path: str, culprits: list[Unpicklable], visited: set[int], depth: int
) -> None:
    reason = why_not(value)
    if not reason or id(value) in visited or depth > _DEEPEST:
        return
    visited.add(id(value))
    before = len(culprits)
    inner = _sent(value, path)
    for name, each in inner:
        _search(each, name, culprits, visited, depth + 1)
    if len(culprits) == before and not any(id(each) in visited for _, each in inner):
        culprits.append(Unpicklable(path, described(value), short(reason)))


def why_not(value: Any) -> str:
    """Why an object cannot be pickled; empty if it can."""
    try:
        _Counting(_Sink()).dump(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _sent(value: Any, path: str) -> list[tuple[str, Any]]:
    """What an object is pickled by: what it holds, or what it says itself."""
    kind: Any = type(value)
    base: Any = object
    if isinstance(value, list | tuple | dict | set | frozenset | functools.partial):
        return held(value, path)
    if kind.__reduce_ex__ is not base.__reduce_ex__ or kind.__reduce__ is not base.__reduce__:
        return []
    if kind.__getstate__ is base.__getstate__:
        return held(value, path)
    try:
        state = value.__getstate__()
    except Exception:
        return []
    if isinstance(state, dict):
        return [(f"{path}.{name}", each) for name, each in state.items()]
    return held(state, path)


class _Sink:
    """A file that only counts."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.nbytes += size
        return size


class _Counting(pickle.Pickler):
    """Pickles as multiprocessing does, but leaves tensors where they are."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink)
        extra: dict[type, Callable[..., Any]] = getattr(ForkingPickler, "_extra_reducers", {})
        self.dispatch_table = {**copyreg.dispatch_table, **extra}
        self.shared_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not value.is_leaf:
                # As torch/multiprocessing/reductions.py, reduce_tensor.
                raise RuntimeError("non-leaf tensor which requires grad; call detach() before")
            self.shared_bytes += value.untyped_storage().nbytes() if _has_storage(value) else 0
            return ("tensor", id(value))
        if isinstance(value, torch.UntypedStorage):
            self.shared_bytes += value.nbytes()
            return ("storage", id(value))
        return None


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


# --- The script, as a worker imports it -------------------------------------------------------


def session_problem(workload: Workload, main: Any = None) -> Finding | None:
    """A data set of a class that a notebook or an interactive session defines.

    ``main`` is the module that runs, by default the real one.
    """
    main = sys.modules["__main__"] if main is None else main
    if getattr(main, "__file__", None) is not None:
        return None
    if type(workload.dataset).__module__ != "__main__":
        return None
    text = f"{described(workload.dataset)} is not defined in a file"
    summary = "Spawned workers cannot import what an interactive session defines"
    return failure_finding("not_importable", summary, text, fixes.NOT_IMPORTABLE)


def guard_problem(main: Any = None) -> Finding | None:
    """Top-level code of the script that spawned workers would run again, from its source.

    That alone does no harm if it starts no worker: it explains workers that end as they start.
    """
    main = sys.modules["__main__"] if main is None else main
    path = getattr(main, "__file__", None)
    line = unguarded_line(Path(path)) if path is not None else None
    if line is None:
        return None
    text = f"{path}:{line} runs when the script is imported"
    return failure_finding("no_main_guard", fixes.UNGUARDED, text, fixes.MAIN_GUARD)


# ---
# What a data set holds, in words, and where the script makes it.


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
    except (OSError, TypeError):
        return None
    tree = parsed("".join(lines))
    linenos = [
        node.lineno
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.With)
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and target.attr == name
        and not (isinstance(node, ast.Assign) and _is_none(node.value))
    ]
    if file is None or len(set(linenos)) != 1:
        return None
    return Place(file, begin + linenos[0] - 1)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
