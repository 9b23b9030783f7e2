"""DataLoaders that do something else than they are made for: a sampler that never draws most
samples, workers that do not hear of the next epoch, batches that are put together on the GPU, a
data set that changes the samples that it keeps."""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, WeightedRandomSampler, default_collate

from trainfit.findings.source_code import function_syntax, names_in
from trainfit.hooks.held_objects import is_generator, open_handles
from trainfit.hooks.ranks import length_of
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import is_library

#: Samples of a batch from which it is worth a word that each of them costs kernels.
_MANY: Final = 32
#: Times that a line pins memory, after the first step, that show it does in each.
_PINS: Final = 2
#: Splits that are remembered.
_SPLITS: Final = 8
#: What is compared of a data set: plain values, which each process has of its own.
_PLAIN: Final = (int, float, str, bool, type(None))
#: Methods that workers run.
_OF_WORKERS: Final = ("__getitem__", "__getitems__", "__iter__", "__call__")
#: What a variable of the number of workers is called.
_MANY_WORKERS: Final = ("num_workers", "workers", "n_workers", "nworkers")
#: Modules of PyTorch's DataLoader.
_OF_LOADERS: Final = "torch.utils.data."
_READS: Final = {"LOAD_ATTR", "LOAD_METHOD"}
#: What computes other numbers in place, each time another.
_COMPUTES: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_COMPUTING: Final = {
    *("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "pow_", "neg_"),
    *("sqrt_", "exp_", "log_", "sigmoid_", "tanh_", "lerp_", "addcmul_", "addcdiv_"),
}


class Loaders:
    """Follows the DataLoaders of a script; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self.are_workers_asked = False
        """Do the workers themselves tell what they copy, as in a real run (watch.rules.workers)?"""
        self._found: dict[str, Misuse] = {}
        #: Lines that made samplers.
        self._made: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
        #: Plain values of data sets when their workers were started.
        self._started: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._last: tuple[weakref.ref[Any], str | None] | None = None
        #: How often a line has pinned memory since the first step.
        self._pins: Counter[str] = Counter()
        #: Data sets that were split, with their parts; those that DataLoaders have, by identity,
        #: and the lines that made these.
        self._split: list[tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = []
        self._loaded: dict[int, tuple[weakref.ref[Any], str | None]] = {}

    def found(self, trained: Any) -> tuple[Misuse, ...]:
        """What was seen, the first of each kind; ``trained``: the data set that is trained on."""
        for whole, parts in self._split:
            alive = [part() for part in parts]
            used = [each for each in alive if each is not None and self._is_loaded(each)]
            if trained is not None and whole() is trained and 0 < len(used) < len(parts):
                place = self._loaded[id(trained)][1] if self._is_loaded(trained) else None
                sizes = sum(length_of(each) or 0 for each in used), length_of(trained) or 0
                self._note("validation_trained", *sizes, place=place)
        return tuple(self._found.values())

    def _is_loaded(self, data: Any) -> bool:
        known = self._loaded.get(id(data))
        return known is not None and known[0]() is data

    def made(self, data: Any) -> None:
        """A DataLoader of these is about to be made."""
        if hasattr(data, "__weakref__"):
            self._loaded[id(data)] = weakref.ref(data), self._place()

    def parted(self, parts: Any) -> None:
        """``random_split`` gave these."""
        data = getattr(parts[0], "dataset", None) if parts else None
        if hasattr(data, "__weakref__") and len(self._split) < _SPLITS:
            self._split.append((weakref.ref(data), [weakref.ref(part) for part in parts]))

    def _note(self, kind: str, *told: object, place: str | None) -> None:
        self._found.setdefault(kind, Misuse(kind, tuple(map(str, told)), place))

    def sampling(self, sampler: Any) -> None:
        """A sampler is about to be made."""
        self._made[sampler] = self._place()

    def iterated(self, loader: Any) -> None:
        """A DataLoader begins to be gone over."""
        place = self._place()
        self._last = weakref.ref(loader), place
        sampler, data = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
        if (few := never_drawn(sampler, data, self._made.get(sampler) or place)) is not None:
            self._found.setdefault(few.kind, few)
        self._look_at_workers(loader, data, place)
        if (changed := changed_samples(loader)) is not None:
            self._note("samples_changed", *changed[:3], place=changed[3])
        if not self.are_workers_asked and (copied := copied_generator(loader)) is not None:
            self._note("generator_of_workers", *copied[:3], place=copied[3])
        if not self.are_workers_asked and (shared := shared_handle(loader)) is not None:
            self._note("handle_of_workers", *shared[:2], place=shared[2])
        if not self.are_workers_asked and (parts := few_shards(loader)) is not None:
            self._note("workers_without_shard", *parts[:3], place=parts[3])

    def _look_at_workers(self, loader: Any, data: Any, place: str | None) -> None:
        """Are there workers of an earlier epoch, with what the data set was then?"""
        if not loader.num_workers or not getattr(loader, "persistent_workers", False):
            return
        now = {name: plain for name, plain in _values(data) if isinstance(plain, _PLAIN)}
        before = self._started.setdefault(loader, now)
        changed = [name for name in now if name in before and now[name] != before[name]]
        if changed and (read := [name for name in _read(type(data)) if name in changed]):
            told = type(data).__name__, read[0], before[read[0]], now[read[0]]
            self._note("workers_not_told", *told, place=place)

    def pins(self) -> None:
        """The script pins a tensor, after the first step."""
        if threading.current_thread() is not threading.main_thread() or _is_by_loader():
            return
        place = self._place() or ""
        self._pins[place] += 1
        if self._pins[place] >= _PINS:
            self._note("pinned_by_hand", place=place)

    def given(self, batch: Any) -> None:
        """A DataLoader gave a batch."""
        loader = self._last[0]() if self._last is not None else None
        if loader is not None and self._last is not None and _is_not_pinned(loader, batch):
            self._note("pinned_in_vain", type(batch).__name__, place=self._last[1])
        if loader is None or loader.collate_fn is not default_collate:
            return
        size = loader.batch_size or 0
        if size < _MANY or loader.num_workers or hasattr(loader.dataset, "__getitems__"):
            return
        parts = batch.values() if isinstance(batch, dict) else batch
        on_gpu = [part for part in parts if isinstance(part, torch.Tensor) and part.is_cuda]
        if on_gpu and self._last is not None:
            self._note("batch_from_gpu", size, len(on_gpu), place=self._last[1])


def changed_samples(loader: Any) -> tuple[str, str, str, str] | None:
    """A data set that has its samples in memory and changes them where it gives one: the class, the
    attribute, the line's text, and the line. Workers of an epoch have copies, which end with it."""
    data = getattr(loader, "dataset", None)
    if loader.num_workers and not getattr(loader, "persistent_workers", False):
        return None
    while isinstance(data, Subset):
        data = data.dataset
    if getattr(loader, "batch_size", None) is None or hasattr(data, "__getitems__"):
        return None  # an index may be several, for which there is a copy
    function = inspect.getattr_static(type(data), "__getitem__", None)
    if not isinstance(function, FunctionType) or is_library(function.__code__.co_filename):
        return None
    tree = function_syntax(function.__code__)
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    returns = [statement for statement in ast.walk(tree) if isinstance(statement, ast.Return)]
    given = {name for statement in returns for name in names_in(statement)}
    for name, attribute in _own_samples(tree).items():
        if name in given and _shares_memory(getattr(data, attribute, None)):
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt) and _writes(node, name):
                    text = f"{function.__code__.co_filename}:{node.lineno}"
                    return type(data).__name__, attribute, ast.unparse(node), text
    return None


def _own_samples(tree: ast.FunctionDef) -> dict[str, str]:
    """Names that are given once, and stand for a part of an attribute (``x = self.x[i]``): by the
    name, the attribute."""
    samples: dict[str, str] = {}
    stored = Counter(names_in(tree, ast.Store))
    changes = Counter(
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    )
    for line in tree.body:
        if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
            continue
        value, name = line.value, line.targets[0].id
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "torch.from_numpy":
            value = value.args[0] if value.args else value
        if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Attribute):
            continue
        owner = value.value.value
        is_own = isinstance(owner, ast.Name) and owner.id == tree.args.args[0].arg
        if is_own and stored[name] - changes[name] == 1:
            samples[name] = value.value.attr
    return samples


def _shares_memory(samples: Any) -> bool:
    """Is one of them a view, or the very object that is kept?"""
    if isinstance(samples, list | tuple) and samples:
        one = samples[0]
        return isinstance(one, torch.Tensor) or (isinstance(one, np.ndarray) and one.ndim > 0)
    if isinstance(samples, np.ndarray):
        return samples.ndim > 1 and samples.flags.writeable
    return isinstance(samples, torch.Tensor) and samples.dim() > 0


def _writes(line: ast.stmt, name: str) -> bool:
    """Does a line compute other numbers of those that a name stands for, in their place? What gives
    the same numbers a second time (x[x < 0] = 0, clamp_) does no harm."""
    if isinstance(line, ast.AugAssign):
        return isinstance(line.op, _COMPUTES) and _begins_with(line.target, name)
    if not isinstance(line, ast.Assign | ast.Expr | ast.Return) or line.value is None:
        return False
    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Subscript):
        return name in names_in(line.value) and _begins_with(line.targets[0], name)
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _COMPUTING
        and _begins_with(call.func.value, name)
        for call in ast.walk(line.value)
    )


def _begins_with(node: ast.expr, name: str) -> bool:
    """Is it ``x``, ``x[…]`` or ``x.sub_(…)``?"""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if not node.func.attr.endswith("_"):
                return False
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return False
    return node.id == name


def _is_by_loader() -> bool:
    """Does a DataLoader ask for it, as by a method of the script's own batches?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_OF_LOADERS):
            return True
        frame = frame.f_back
    return False


def shared_handle(loader: Any) -> tuple[str, str, str] | None:
    """A file or a connection that a data set opened before its workers start, and that they read:
    its path, its type, and the line of the method that does. None where a ``worker_init_fn`` may
    open it, the reading method does, or it asks which worker it is in."""
    workers = getattr(loader, "num_workers", 0)
    data = getattr(loader, "dataset", None)
    if workers < 2 or getattr(loader, "worker_init_fn", None) is not None:
        return None
    while isinstance(data, Subset):
        data = data.dataset
    read = _drawing(type(data))
    for path, kind in open_handles(data).items() if read else ():
        name = path.split(".")[1] if "." in path else ""
        if name in read:
            code = read[name].__code__
            return path, kind, f"{code.co_filename}:{code.co_firstlineno}"
    return None


def few_shards(loader: Any) -> tuple[str, str, str, str] | None:
    """A list that an iterable data set gives its workers parts of, every so many
    (``self.urls[worker.id :: worker.num_workers]``, by ``islice``, or by the rest of a division),
    and that has fewer than there are workers: its name, how many, the workers, and the line."""
    workers, data = getattr(loader, "num_workers", 0), getattr(loader, "dataset", None)
    if workers < 2 or not isinstance(data, IterableDataset):
        return None
    for function in _methods(type(data)):
        tree = function_syntax(function.__code__)
        if tree is None:
            continue
        worker = _WorkerNames()
        for node in ast.walk(tree):
            worker.note(node)
        for node in ast.walk(tree):
            owner = _parted(node, worker)
            parts = getattr(data, owner, None) if owner is not None else None
            if owner is not None and isinstance(parts, list | tuple) and len(parts) < workers:
                line = node.iter.lineno if isinstance(node, ast.comprehension) else node.lineno  # type: ignore[attr-defined]
                text = f"{function.__code__.co_filename}:{line}"
                return f"{type(data).__name__}.{owner}", str(len(parts)), str(workers), text
    return None


class _WorkerNames:
    """Names in a function for the number of a worker, and for how many there are."""

    def __init__(self) -> None:
        self.number, self.many = {"id", "worker_id"}, {*_MANY_WORKERS}

    def note(self, node: ast.AST) -> None:
        """``n = info.num_workers``, maybe with another value where there is no worker."""
        match node:
            case ast.Assign(targets=[target], value=value):
                self._give(target, value)

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case _, ast.IfExp(body=body, orelse=orelse):
                self._give(target, body)
                self._give(target, orelse)
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                for name, each in zip(names, values, strict=False):
                    self._give(name, each)
            case ast.Name(id=name), ast.Attribute(attr="id"):
                self.number.add(name)
            case ast.Name(id=name), ast.Attribute(attr="num_workers"):
                self.many.add(name)

    def is_number(self, node: ast.expr) -> bool:
        return getattr(node, "attr", getattr(node, "id", "")) in self.number

    def is_many(self, node: ast.expr) -> bool:
        return getattr(node, "attr", getattr(node, "id", "")) in self.many


def _parted(node: ast.AST, worker: _WorkerNames) -> str | None:
    """The attribute of ``self`` that this gives each worker a part of."""
    match node:
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name(id="self"), attr=name),
            slice=ast.Slice(lower=ast.expr() as first, upper=None, step=ast.expr() as step),
        ):
            pass
        case ast.Call(
            args=[
                ast.Attribute(value=ast.Name(id="self"), attr=name),
                ast.expr() as first,
                ast.Constant(value=None),
                ast.expr() as step,
            ]
        ) if getattr(node.func, "attr", getattr(node.func, "id", "")) == "islice":
            pass
        case (ast.For() | ast.comprehension()) as loop:
            match loop.target, loop.iter:
                case (
                    ast.Tuple(elts=[ast.Name(id=index), _]),
                    ast.Call(
                        func=ast.Name(id="enumerate"),
                        args=[ast.Attribute(value=ast.Name(id="self"), attr=name)],
                        keywords=[],
                    ),
                ):
                    within = loop.body if isinstance(loop, ast.For) else loop.ifs
                    return name if any(_is_turn(each, index, worker) for each in within) else None
            return None
        case _:
            return None
    return name if worker.is_number(first) and worker.is_many(step) else None


def _is_turn(node: ast.AST, index: str, worker: _WorkerNames) -> bool:
    """Is it ``index % info.num_workers == info.id``, or an ``if`` of that?"""
    tested = node.test if isinstance(node, ast.If) else node
    match tested:
        case ast.Compare(left=one, ops=[ast.Eq() | ast.NotEq()], comparators=[other]):
            for rest, number in ((one, other), (other, one)):
                match rest:
                    case ast.BinOp(left=ast.Name(id=counted), op=ast.Mod(), right=many):
                        if counted == index and worker.is_many(many) and worker.is_number(number):
                            return True
    return False


def copied_generator(loader: Any) -> tuple[str, str, str, str] | None:
    """A generator of random numbers that a data set, or a transform of it, has as an attribute and
    draws from in workers, each of which has a copy in the same state: its path, the workers, if
    those of each epoch have, and the line of the method that draws. PyTorch seeds the generators of
    the modules random, numpy.random and torch in each worker (torch/utils/data/_utils/worker.py),
    and no others."""
    workers = getattr(loader, "num_workers", 0)
    data = getattr(loader, "dataset", None)
    if workers < 1 or getattr(loader, "worker_init_fn", None) is not None:
        return None
    while isinstance(data, Subset):
        data = data.dataset
    stays = getattr(loader, "persistent_workers", False)
    if workers == 1 and stays:
        return None
    for path, owner in (("", data), *_values(data)):
        names = [name for name, each in _values(owner) if is_generator(each)]
        drawn = _drawing(type(owner)) if names else {}
        for name in names:
            if name in drawn:
                code = drawn[name].__code__
                text = f"{code.co_filename}:{code.co_firstlineno}"
                told = ".".join(filter(None, ("dataset", path, name)))
                return told, str(workers), "" if stays else "each epoch", text
    return None


def _drawing(kind: type) -> dict[str, FunctionType]:
    """Attributes that methods run by workers read, and those methods; none where one of them makes
    the attribute, or asks which worker it is in."""
    found: dict[str, FunctionType] = {}
    for function in _methods(kind):
        instructions = list(dis.get_instructions(function))
        if any(each.argval == "get_worker_info" for each in instructions):
            return {}
        for instruction in instructions:
            if instruction.opname in _READS:
                found.setdefault(instruction.argval, function)
    made = {
        each.argval
        for function in _methods(kind)
        for each in dis.get_instructions(function)
        if each.opname == "STORE_ATTR"
    }
    return {name: function for name, function in found.items() if name not in made}


def _is_not_pinned(loader: Any, batch: Any) -> bool:
    """Is it of a class with tensors that a DataLoader passes on as it is, where it shall pin?"""
    if not getattr(loader, "pin_memory", False) or hasattr(batch, "pin_memory"):
        return False
    if isinstance(batch, torch.Tensor | Mapping | Sequence):
        return False
    return any(isinstance(tensor, torch.Tensor) for _, tensor in _values(batch))


def never_drawn(sampler: Any, data: Any, place: str | None = None) -> Misuse | None:
    """A sampler that has fewer weights than there are samples, as those of classes are."""
    samples = length_of(data)
    if type(sampler) is not WeightedRandomSampler or samples is None:
        return None
    weights = len(sampler.weights)
    told = str(weights), str(samples)
    return Misuse("samples_never_drawn", told, place) if weights < samples else None


def _values(data: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(data, "__dict__", {}).items()


def _read(kind: type) -> list[str]:
    """Attributes of an object that its samples are made with, by the script's own code."""
    names = [
        instruction.argval
        for function in _methods(kind)
        for instruction in dis.get_instructions(function)
        if instruction.opname in _READS
    ]
    return list(dict.fromkeys(names))


def _methods(kind: type) -> list[FunctionType]:
    """The methods of the script's own code that make a sample, or a transform of one."""
    functions = dict(inspect.getmembers(kind, inspect.isfunction))
    waiting = [functions[name] for name in _OF_WORKERS if name in functions]
    known: dict[FunctionType, None] = {}
    while waiting:
        function = waiting.pop()
        if function in known or is_library(function.__code__.co_filename):
            continue
        known[function] = None
        names = (
            instruction.argval
            for instruction in dis.get_instructions(function)
            if instruction.opname in _READS
        )
        waiting += [functions[name] for name in names if name in functions]
    return list(known)
