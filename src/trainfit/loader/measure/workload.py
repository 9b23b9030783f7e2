"""A DataLoader's workload, apart from its settings, and the threads that a batch of it starts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfit.hooks.held_objects import open_handles
from trainfit.loader.measure import processes
from trainfit.results.dataloader import DatasetKind, LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.scripts.library_threads import (
    HELD,
    hold_down,
    hold_down_all_but,
    native_threads,
    pools,
)
from trainfit.torch_private.data_loading import settings_of


class LoaderError(TrainfitError):
    """A loader that cannot be measured; one line with what, the reason and the remedy."""


class Workload:
    """A data set with its sampler and collation: makes DataLoaders of any settings.

    Its loaders never end: after the last batch of an epoch comes the first of the next, in the
    order that the sampler gives then. (Where an epoch ends, workers that are not persistent
    restart; the model accounts for that separately.)

    Args:
        loader: the user's DataLoader; it is neither iterated nor changed.
        library_threads: what libraries in workers are held to where settings do not say.
        handles: what the data set held open before this process took samples from it, path → type
            (``None``: it took none).
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        library_threads: int | None = None,
        handles: Mapping[str, str] | None = None,
    ) -> None:
        self._loader = loader
        self._library_threads = library_threads
        self._handles = handles
        self.kind: DatasetKind = "iterable" if is_iterable(loader.dataset) else "map"
        self.sampler_seconds: list[float] = []
        """What the sampler took for each batch's indices, in this process, so far."""

    @classmethod
    def of(cls, source: DataLoader[Any] | Dataset[Any], batch_size: int | None = 1) -> Workload:
        """The workload of a DataLoader, or of a data set with PyTorch's defaults and this batch
        size."""
        if isinstance(source, DataLoader):
            return cls(source)
        if isinstance(source, type) or not (
            isinstance(source, IterableDataset) or hasattr(source, "__getitem__")
        ):
            raise LoaderError(
                f"{type(source).__name__} is neither a DataLoader nor a data set: return an object "
                "with __getitem__ and __len__, an IterableDataset, or a DataLoader of it"
            )
        return cls(DataLoader(source, batch_size))

    def held_to(self, library_threads: int) -> Workload:
        """The same workload, where libraries in workers have so many threads."""
        return Workload(self._loader, library_threads, self._handles)

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def open_handles(self) -> dict[str, str]:
        """What the data set holds open when its workers start: path → type.

        Not what it opened at its first sample, in this process: with workers that happens there.
        """
        now = open_handles(self.dataset)
        return {
            path: kind
            for path, kind in now.items()
            if self._handles is None or path in self._handles
        }

    @property
    def name(self) -> str:
        """The data set's type."""
        return type(self.dataset).__name__

    @property
    def batch_size(self) -> int | None:
        size = self._loader.batch_size
        if size is None:
            size = getattr(self._loader.batch_sampler, "batch_size", None)
        return size if type(size) is int else None

    @property
    def timeout_s(self) -> float:
        """What the script's loader waits for a batch at most; 0: for ever."""
        return float(self._loader.timeout)

    @property
    def generators(self) -> list[torch.Generator]:
        """The random generators that decide the order of batches, in addition to PyTorch's own."""
        loader = self._loader
        inner = getattr(loader.batch_sampler, "sampler", None)
        holders = (loader, loader.sampler, loader.batch_sampler, inner)
        found = [getattr(holder, "generator", None) for holder in holders]
        return [each for each in found if isinstance(each, torch.Generator)]

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, if that is known: as many as the sampler gives."""
        sampler = getattr(self._loader.batch_sampler, "sampler", None)
        for source in (sampler, self._loader.sampler, self.dataset):
            try:
                return len(source)  # type: ignore[arg-type]
            except Exception:  # a user's __len__ may raise anything
                continue
        return None

    @property
    def epoch_batches(self) -> int | None:
        """Batches of an epoch, if that is known."""
        try:
            return len(self._loader)
        except Exception:  # a user's __len__ may raise anything
            return None

    @property
    def present(self) -> LoaderSettings:
        """The user's settings."""
        return settings_of(self._loader)

    def loader(
        self,
        settings: LoaderSettings,
        wrap_init: Callable[[Callable[[int], None] | None], Callable[[int], None]] | None = None,
        *,
        endless: bool = True,
    ) -> DataLoader[Any]:
        """A new DataLoader with these settings.

        ``wrap_init`` gets the user's ``worker_init_fn`` and gives the one to use. One that is
        not ``endless`` has the user's own epochs.
        """
        own = self._loader
        # Without workers batches are made in this process: files that a data set opens then
        # must not be in the one that later workers get.
        data = own.dataset if settings.num_workers else _copied(own.dataset)
        init = own.worker_init_fn
        if settings.worker_threads != 1:
            init = functools.partial(_set_threads, settings.worker_threads, init)
        if (most := settings.library_threads or self._library_threads) is not None:
            init = functools.partial(_hold_down, most, init)
        common: dict[str, Any] = {
            "collate_fn": own.collate_fn,
            "pin_memory": settings.pin_memory,
            "generator": own.generator,
            "num_workers": settings.num_workers,
            "worker_init_fn": init,
        }
        if settings.num_workers:
            if wrap_init is not None:
                common["worker_init_fn"] = wrap_init(init)
            common |= {
                "prefetch_factor": settings.prefetch_factor,
                "persistent_workers": settings.persistent_workers,
                "in_order": settings.in_order,
                "multiprocessing_context": settings.start_method,
            }
        if self.kind == "iterable":
            dataset = _EndlessIterable(data) if endless else data
            return DataLoader(dataset, own.batch_size, drop_last=own.drop_last, **common)
        sampler: Any = own.sampler if own.batch_sampler is None else own.batch_sampler
        if endless:
            sampler = _Endless(sampler, self.sampler_seconds)
        if own.batch_sampler is not None:
            return DataLoader(data, batch_sampler=sampler, **common)
        return DataLoader(data, batch_size=None, sampler=sampler, **common)


def _copied(dataset: Any, depth: int = 3) -> Any:
    """A copy that attributes can be set on, of the data sets in it too; of one that cannot be
    copied, itself."""
    try:
        made = copy.copy(dataset)
        inner = list(vars(made).items())
    except Exception:  # whatever a user's __copy__ or __reduce__ raises
        return dataset
    for name, value in inner if depth else ():
        if isinstance(value, Dataset):
            made.__dict__[name] = _copied(value, depth - 1)
        elif isinstance(value, list | tuple) and any(isinstance(each, Dataset) for each in value):
            each = (_copied(v, depth - 1) if isinstance(v, Dataset) else v for v in value)
            made.__dict__[name] = list(each) if isinstance(value, list) else tuple(each)
    return made


def is_iterable(dataset: Any) -> bool:
    """Does PyTorch take it as an iterable data set?"""
    return isinstance(dataset, IterableDataset)


class _Endless:
    """A sampler that restarts when it is exhausted, and records the time of each batch of
    indices."""

    def __init__(self, sampler: Any, seconds: list[float]) -> None:
        self._sampler, self._seconds = sampler, seconds

    def __iter__(self) -> Iterator[Any]:
        while True:
            given = 0
            began = time.perf_counter()
            for indices in self._sampler:
                self._seconds.append(time.perf_counter() - began)
                yield indices
                given += 1
                began = time.perf_counter()
            if not given:
                return


class InPlaceOf:
    """What stands in the place of a data set: to a ``worker_init_fn`` it is the data set itself,
    attributes are read and written there (PyTorch's documentation shards so).

    Args:
        inner: the data set.
        own: attributes that are not the data set's.
    """

    def __init__(self, inner: Any, **own: Any) -> None:
        self.__dict__.update(_inner=inner, **own)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class _EndlessIterable(InPlaceOf, IterableDataset[Any]):
    """An iterable data set that restarts when it is exhausted."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            given = 0
            for sample in self._inner:
                yield sample
                given += 1
            if not given:
                return


def _set_threads(count: int, init: Callable[[int], None] | None, worker: int) -> None:
    """A ``worker_init_fn``: so many threads, then what the user's does."""
    torch.set_num_threads(count)
    if init is not None:
        init(worker)


def _hold_down(count: int, init: Callable[[int], None] | None, worker: int) -> None:
    """A ``worker_init_fn``: so many threads for each library, then what the user's does."""
    hold_down(count)
    if init is not None:
        init(worker)


# ---
# Libraries' threads in a worker, and whether a batch starts any.
#
# After a fork a library's threads are gone until they are used again: what a worker has more
# after a batch than before works in it, unlike most pools.


@dataclass(frozen=True)
class WorkerThreads:
    """``pools``: threads by library, only those above one; ``started``: how many a batch started,
    ``None`` where that is not told. ``used``: the pools whose threads these are, ``None`` where
    it was not measured."""

    pools: Mapping[str, int] = field(default_factory=dict)
    started: int | None = None
    used: tuple[str, ...] | None = None


def worker_threads(workload: Workload, limit_s: float = 5.0) -> WorkerThreads:
    """Once a batch was made as in a worker.

    Empty where no batch could be made in ``limit_s`` seconds: other parts of a probe say why.
    """
    began = time.monotonic()
    ended = processes.call(functools.partial(_after_a_batch, workload), limit_s)
    if ended.value is None:
        return WorkerThreads()
    left_s = limit_s - (time.monotonic() - began)
    return dataclasses.replace(ended.value, used=_used(workload, ended.value, left_s))


def _after_a_batch(workload: Workload, only: str = "") -> WorkerThreads:
    """Threads once a batch was made; with ``only`` that pool has several."""
    if only:
        hold_down_all_but(only)
    before = native_threads()
    next(iter(workload.loader(LoaderSettings(0))), None)
    after = native_threads()
    started = None if before is None or after is None else max(0, after - before)
    return WorkerThreads(pools(), started)


def _used(workload: Workload, threads: WorkerThreads, left_s: float) -> tuple[str, ...] | None:
    """The pools that start threads for a batch when all others have one; ``None``: no time."""
    if threads.started is None:
        return None
    if not threads.started:
        return ()
    known = [name for name in threads.pools if name in HELD]
    used = []
    for index, name in enumerate(known):
        if left_s <= 0:
            return None
        began = time.monotonic()
        make = functools.partial(_after_a_batch, workload, name)
        ended = processes.call(make, left_s / (len(known) - index))
        left_s -= time.monotonic() - began
        if ended.value is None or ended.value.started is None:
            return None
        if ended.value.started:
            used.append(name)
    return tuple(used)
