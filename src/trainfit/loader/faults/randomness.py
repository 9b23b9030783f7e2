"""Random generators that workers copy: each of them, and each epoch, draws the same numbers.

PyTorch seeds its own generator, Python's ``random`` and NumPy's global one in every worker, another
way in each epoch (torch/utils/data/_utils/worker.py). A generator that the data set holds, or a
module's, is copied with its state; a ``worker_init_fn`` may set the global ones to the same seed.
Two workers of two epochs show which states are equal, and which are drawn from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainfit.findings.worker_copies import generator_copied
from trainfit.hooks.held_objects import all_generators, generators, state_of
from trainfit.loader.faults.held import made_at
from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import InPlaceOf, Workload
from trainfit.results.findings import Finding

#: Samples that each worker makes, in each of two epochs.
_SAMPLES: Final = 4
_EPOCHS: Final = 2
_WORKERS: Final = 2


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
    in_workers, in_epochs = next(iter(found.values()))
    fault = generator_copied(list(found), by_workers=in_workers, by_epochs=in_epochs)
    return (dataclasses.replace(fault, place=place),)


def _has_any(workload: Workload) -> bool:
    loader = workload.loader(workload.present)
    return loader.worker_init_fn is not None or any(True for _ in generators(workload.dataset))


# -- what workers do with them ---------------------------------------------------------------------


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
        before = all_generators(self._inner)
        states = {path: state_of(value) for path, value in before.items()}
        if self._kind == "iterable":
            samples = list(itertools.islice(self._inner, _SAMPLES))
        else:
            samples = [self._inner[key] for key in self._picked]
        try:
            self._collate(samples)
        except Exception:  # the user's: samples may not fit together
            samples.clear()
        drawn = tuple(path for path, value in before.items() if state_of(value) != states[path])
        info = get_worker_info()
        return _Drawn(info.id if info is not None else 0, states, drawn)
