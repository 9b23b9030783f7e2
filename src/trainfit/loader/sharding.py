"""Checks whether the workers of an iterable data set share its samples or each yields all of them.

Each worker has a copy of an iterable data set, and iterates all of it unless the data set, or
``worker_init_fn``, asks which worker it is (torch.utils.data.IterableDataset's documentation).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainfit.findings import fixes
from trainfit.findings.training.worker_copies import generator_copied, not_sharded, too_few_shards
from trainfit.hooks.held_objects import all_generators, digest, generators, state_of
from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import InPlaceOf, Workload
from trainfit.loader.pickling import made_at
from trainfit.results.findings import Finding, failure_finding

#: Workers that are started to see whether there are shards for them, at most.
_MANY: Final = 8
#: Samples of each worker that are compared.
SAMPLES: Final = 64
#: Samples of the same digest that two workers may have by chance; above it they are shared.
_SAME_SHARE: Final = 0.5


@dataclass(frozen=True)
class WorkerSamples:
    """What workers gave: the digests of each worker's samples in their order.

    ``ended`` is whether each came to its end; ``again`` how many samples a second pass of the
    same object began with (``None``: not tried); ``empty`` are workers that ended without any.
    """

    digests: tuple[tuple[str, ...], ...]
    ended: bool
    again: int | None = None
    empty: tuple[int, ...] = ()


def check_sharding(workload: Workload, limit_s: float = 10.0) -> tuple[Finding, ...]:
    """Run it with one worker and with two, in forked processes, and compare their samples."""
    if workload.kind != "iterable":
        return ()
    faults: list[Finding] = []
    one = _passes(workload, 1, False, limit_s)
    two = _passes(workload, 2, False, limit_s) if one is not None else None
    if one is not None and one.ended and one.digests[0] and one.again == 0:
        faults.append(
            failure_finding(
                "not_restartable",
                "The iterable data set yields nothing in a second epoch",
                f"{len(one.digests[0])} samples in the first pass, 0 in the second",
                "make __iter__ start from the beginning each time: do not keep a generator in "
                "the data set",
            )
        )
    if one is None or two is None:
        return tuple(faults)
    tried = min(_MANY, 2 * len(os.sched_getaffinity(0)))  # as many as may be advised
    many = max(2, tried, workload.present.num_workers)
    shards = _passes(workload, many, False, limit_s, samples=1)
    if shards is not None and (few := judge_shards(shards)) is not None:
        faults.append(few)
    same = _passes(workload, 2, True, limit_s) if not shares(two, one) else None
    fault = judge(one, two, same)
    return (*faults, fault) if fault is not None else tuple(faults)


def judge_shards(many: WorkerSamples) -> Finding | None:
    """The fault of a data set that has fewer shards than workers, by the first sample of each
    worker; the number of shards is the finding's subject."""
    fed, workers = sum(1 for each in many.digests if each), len(many.digests)
    if not fed or not many.empty or fed + len(many.empty) < workers:
        return None  # all have some, or it took too long to tell
    return too_few_shards("few_shards", fed, workers)


def judge(one: WorkerSamples, two: WorkerSamples, seeded: WorkerSamples | None) -> Finding | None:
    """The fault of what one worker gave, what two gave, and two with the same random seeds."""
    first, second = len(two.digests[0]), len(two.digests[1])
    if shares(two, one):
        evidence = (
            f"{_common(two)} of the second worker's {second} samples are also the first worker's"
        )
    elif one.ended and two.ended and one.digests[0] and first == second == len(one.digests[0]):
        evidence = f"one worker yields {len(one.digests[0])} samples, two yield {first + second}"
    elif seeded is not None and shares(seeded, one):
        return failure_finding(
            "iterable_perhaps_not_sharded",
            "Workers yield the same samples, unless samples are entirely random",
            "with equal random seeds two workers yield the same samples: the data "
            "set does not use get_worker_info()",
            fixes.SHARD_BY_WORKER,
        )
    else:
        return None
    return not_sharded(evidence)


def shares(two: WorkerSamples, one: WorkerSamples) -> bool:
    """Do two workers give the same samples, which do not repeat with one worker?"""
    if len(two.digests) < 2 or not two.digests[1] or not one.digests[0]:
        return False
    alone = one.digests[0]
    if 1 - len(set(alone)) / len(alone) >= _SAME_SHARE / 2 and len(alone) > 1:
        return False  # samples are alike anyway: cannot be distinguished by content
    return _common(two) > _SAME_SHARE * len(two.digests[1])


def _common(two: WorkerSamples) -> int:
    first = set(two.digests[0])
    return sum(1 for each in two.digests[1] if each in first)


def _passes(
    workload: Workload,
    workers: int,
    same_seeds: bool,
    limit_s: float,
    samples: int = SAMPLES,
) -> WorkerSamples | None:
    function = functools.partial(_iterate, workload, workers, same_seeds, limit_s / 2, samples)
    return processes.call(function, limit_s).value


def _iterate(
    workload: Workload, workers: int, same_seeds: bool, seconds: float, samples: int
) -> WorkerSamples | None:
    init = workload.loader(workload.present).worker_init_fn
    # Unbatched, each sample with its worker: batches of two workers differ by their cut alone.
    loader: DataLoader[Any] = DataLoader(
        _Tagged(workload.dataset, workers == 1, samples),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=functools.partial(_begin, init, same_seeds),
        multiprocessing_context="fork",
    )
    found: dict[int, list[str]] = {worker: [] for worker in range(workers)}
    ended, again, deadline = set(), None, time.monotonic() + seconds
    for worker, what in loader:
        if what is None:
            return None
        if isinstance(what, int):
            ended.add(worker)
            again = what if what >= 0 else None
        else:
            found[worker].append(what)
        if time.monotonic() > deadline:
            break
    digests = tuple(tuple(each) for each in found.values())
    empty = tuple(worker for worker in sorted(ended) if not found[worker])
    return WorkerSamples(digests, len(ended) == workers, again, empty)


class _Tagged(InPlaceOf, IterableDataset[Any]):
    """The data set with, of each sample, the worker and the digest; at the end a number.

    The number is how many samples a second pass begins with (1 at most); -1: not tried.
    """

    def __init__(self, inner: Any, try_again: bool, samples: int) -> None:
        super().__init__(inner, _try_again=try_again, _samples=samples)

    def __iter__(self) -> Any:
        info = get_worker_info()
        number = info.id if info is not None else 0
        given = 0
        for sample in itertools.islice(self._inner, self._samples):
            yield number, digest(sample)
            given += 1
        if given < self._samples:
            second = itertools.islice(self._inner, 1) if self._try_again else None
            yield number, -1 if second is None else sum(1 for _ in second)


def _as_it_is(item: Any) -> Any:
    return item


def _begin(init: Callable[[int], None] | None, same_seeds: bool, worker: int) -> None:
    """A ``worker_init_fn``: the user's, after equal seeds if that is wanted."""
    if same_seeds:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
    if init is not None:
        init(worker)


# ---
# Random generators that workers copy: each of them, and each epoch, draws the same numbers.


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
    if not epochs or any(len(epoch) < _WORKERS for epoch in epochs):
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
