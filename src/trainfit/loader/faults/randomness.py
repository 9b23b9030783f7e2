"""Random generators that workers copy: each of them, and each epoch, draws the same numbers.

PyTorch seeds its own generator, Python's ``random`` and NumPy's global one in every worker, another
way in each epoch (torch/utils/data/_utils/worker.py). A generator that the data set holds, or a
module's, is copied with its state; a ``worker_init_fn`` may set the global ones to the same seed.
Two workers of two epochs show which states are equal, and which are drawn from.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainfit.findings import fixes
from trainfit.loader.faults.held import made_at, walk
from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import InPlaceOf, Workload
from trainfit.results.findings import Finding, failure_finding

#: Samples that each worker makes, in each of two epochs.
_SAMPLES: Final = 4
_EPOCHS: Final = 2
_WORKERS: Final = 2
_GLOBAL: Final = ("numpy.random", "random", "torch's generator")
#: Functions of one class that are looked at, and generators in all.
_MOST_FUNCTIONS: Final = 200
_MOST: Final = 50


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """What a worker began with: digests of the states of generators, by their paths, and which of
    them its samples drew from."""

    worker: int
    states: dict[str, str]
    drawn: tuple[str, ...]


def check_generators(workload: Workload, limit_s: float = 10.0) -> tuple[Finding, ...]:
    """The fault of generators that workers share the state of; none where no sample draws."""
    if not _has_any(workload):
        return ()
    epochs = processes.call(functools.partial(_epochs, workload), limit_s).value
    if not epochs or any(len(each) < _WORKERS for each in epochs):
        return ()  # it fails, or takes long: what runs later says so
    found: dict[str, tuple[bool, bool]] = {}
    stays = workload.present.persistent_workers
    first, second = epochs[0], epochs[1]
    for path, state in first[0].states.items():
        if not any(path in each.drawn for each in (*first, *second)):
            continue
        in_workers = first[1].states.get(path) == state
        in_epochs = second[0].states.get(path) == state and not stays
        if in_workers or in_epochs:
            found[path] = in_workers, in_epochs
    if not found:
        return ()
    place = made_at(workload.dataset, next(iter(found)))
    return (dataclasses.replace(_fault(found), place=place),)


def _fault(found: dict[str, tuple[bool, bool]]) -> Finding:
    """``found`` says of each path whether workers share its state, and whether epochs do."""
    path, (in_workers, again) = next(iter(found.items()))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    if in_workers:
        what = "each worker draws the same random numbers"
        what += ", and each epoch again" if again else ""
    else:
        what = "each epoch draws the same random numbers again"
    is_global = path in _GLOBAL
    begins = "is seeded alike by worker_init_fn" if is_global else "is copied into the workers"
    said = (
        f"{', '.join(found)}: two workers"
        f"{'' if in_workers else ' of two epochs'} began with one state and drew from it"
    )
    fix = fixes.SEED_OF_WORKER if is_global else fixes.GENERATOR_IN_WORKER
    return failure_finding("generator_copied", f"{path}{more} {begins}: {what}", said, fix)


# -- which generators there are ------------------------------------------------------------------


def _has_any(workload: Workload) -> bool:
    loader = workload.loader(workload.present)
    return loader.worker_init_fn is not None or any(True for _ in _generators(workload.dataset))


def _is_generator(value: Any) -> bool:
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    return isinstance(value, kinds)


def _generators(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Those that a data set holds, or that its functions name: path and object, each once."""
    seen: set[int] = set()
    for path, value in _places(dataset):
        if _is_generator(value) and id(value) not in seen and len(seen) < _MOST:
            seen.add(id(value))
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


# -- what workers do with them ---------------------------------------------------------------------


def _state(value: Any) -> str:
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


def _all(dataset: Any) -> dict[str, Any]:
    """Every generator by path; the global ones are functions' owners themselves."""
    own = dict(_generators(dataset))
    mine = (np.random.mtrand._rand, random._inst, torch.default_generator)
    return {**dict(zip(_GLOBAL, mine, strict=True)), **own}


def _epochs(workload: Workload) -> list[list[_Drawn]]:
    """Two epochs of two workers, each from a fork as the user's loader makes them."""
    own = workload.loader(workload.present)
    init: Callable[[int], None] | None = own.worker_init_fn
    keys = list(range(_SAMPLES))
    if workload.kind != "iterable":
        sampler = own.batch_sampler if own.batch_sampler is not None else own.sampler
        drawn = itertools.islice(iter(sampler), _SAMPLES)
        keys = [key for each in drawn for key in (each if isinstance(each, list) else [each])]
    watching = _Watching(workload.dataset, keys[:_SAMPLES], own.collate_fn, workload.kind)
    loader: DataLoader[Any] = DataLoader(
        watching,
        batch_size=None,
        num_workers=_WORKERS,
        collate_fn=_same,
        worker_init_fn=init,
        multiprocessing_context="fork",
    )
    return [sorted(loader, key=lambda each: each.worker) for _ in range(_EPOCHS)]


def _same(item: Any) -> Any:
    return item


class _Watching(InPlaceOf, Dataset[Any]):
    """A data set with an item for each worker: what became of generators as it made samples."""

    def __init__(self, inner: Any, keys: list[Any], collate: Any, kind: str) -> None:
        super().__init__(inner, _picked=keys, _collate=collate, _kind=kind)

    def __len__(self) -> int:
        return _WORKERS

    def __getitem__(self, _: int) -> _Drawn:
        before = _all(self._inner)
        states = {path: _state(value) for path, value in before.items()}
        if self._kind == "iterable":
            samples = list(itertools.islice(self._inner, _SAMPLES))
        else:
            samples = [self._inner[key] for key in self._picked]
        try:
            self._collate(samples)
        except Exception:  # the user's: samples may not fit together
            samples.clear()
        drawn = tuple(path for path, value in before.items() if _state(value) != states[path])
        info = get_worker_info()
        return _Drawn(info.id if info is not None else 0, states, drawn)
