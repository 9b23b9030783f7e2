"""DataLoaders, their iterators, and what happens in workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader

from trainfit.results.dataloader import LoaderSettings, StartMethod
from trainfit.torch_private.needed import attribute, needed, place

with needed():
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils import fetch, pin_memory, worker
    from torch.utils.data.dataloader import (
        _BaseDataLoaderIter,
        _DatasetKind,
        _MultiProcessingDataLoaderIter,
        _SingleProcessDataLoaderIter,
    )

    MapFetcher: Any = fetch._MapDatasetFetcher
    _IterableFetcher: Any = fetch._IterableDatasetFetcher
    INDEXED: Any = _DatasetKind.Map
    pinned: Callable[..., Any] = pin_memory.pin_memory

#: What a worker makes of an error for the main process, with its traceback as a text.
WorkerError: Any = ExceptionWrapper
#: The iterator of a DataLoader, with workers or without.
LoaderIterator: Any = _BaseDataLoaderIter
#: What makes a batch of its indices, in a worker or in the main process.
FETCHERS: tuple[Any, ...] = (MapFetcher, _IterableFetcher)

#: The module of ``StatefulDataLoader``, which calls neither the constructor of PyTorch's DataLoader
#: nor what makes its iterators.
TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"

GET_ITERATOR = place(DataLoader, "_get_iterator")
NEXT_INDEX = place(LoaderIterator, "_next_index")
RESET = place(LoaderIterator, "_reset")
PIN_MEMORY = place(pin_memory, "pin_memory")
place(worker, "_worker_info")

#: Of a DataLoader or its iterator: is there a batch sampler, and can the data set be indexed?
makes_batches: Callable[[Any], bool] = attribute(DataLoader, "_auto_collation")
dataset_kind: Callable[[Any], Any] = attribute(DataLoader, "_dataset_kind")
attribute(LoaderIterator, "_auto_collation")
attribute(LoaderIterator, "_dataset_kind")
dataset_of: Callable[[Any], Any] = attribute(LoaderIterator, "_dataset")
index_sampler_of: Callable[[Any], Any] = attribute(LoaderIterator, "_index_sampler")
indices_of: Callable[[Any], Any] = attribute(LoaderIterator, "_sampler_iter")
attribute(LoaderIterator, "_next_data")
#: In the main process.
fetcher_of: Callable[[Any], Any] = attribute(_SingleProcessDataLoaderIter, "_dataset_fetcher")
#: Batches that workers were asked for, by number: (worker,), and the batch where it has come.
tasks_of: Callable[[Any], Any] = attribute(_MultiProcessingDataLoaderIter, "_task_info")
#: The number of the next batch.
next_task: Callable[[Any], int] = attribute(_MultiProcessingDataLoaderIter, "_rcvd_idx")
_pinned_queue = attribute(_MultiProcessingDataLoaderIter, "_data_queue")
_result_queue = attribute(_MultiProcessingDataLoaderIter, "_worker_result_queue")
attribute(_MultiProcessingDataLoaderIter, "_workers")
attribute(_MultiProcessingDataLoaderIter, "_shutdown_workers")
attribute(DataLoader, "_iterator")


def settings_of(loader: Any) -> LoaderSettings:
    """The settings of a DataLoader; one of the user's own class may lack some."""
    context = getattr(loader, "multiprocessing_context", None)
    return LoaderSettings(
        num_workers=int(loader.num_workers),
        prefetch_factor=getattr(loader, "prefetch_factor", None) or 2,
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        in_order=bool(getattr(loader, "in_order", True)),
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        start_method=context.get_start_method() if context is not None else default_start(),
    )


def defined_in(module: ModuleType) -> list[type]:
    """The classes that a module itself defines."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__
    ]


def default_start() -> StartMethod:
    """The start method of workers where the script does not name one."""
    # Asking for it without allow_none would fix it for the process.
    multiprocessing = torch.multiprocessing
    chosen = multiprocessing.get_start_method(allow_none=True)
    return cast(StartMethod, chosen or multiprocessing.get_all_start_methods()[0])


def queues_of(batches: Any) -> set[Any]:
    """The queues of batches that workers have made and that are not used yet."""
    return {_pinned_queue(batches), _result_queue(batches)}


def has_workers(batches: Any) -> bool:
    """Does an iterator have workers?"""
    return getattr(batches, "_task_info", None) is not None


def workers_of(batches: Any) -> tuple[Any, ...]:
    """An iterator's worker processes; none where it makes the batches itself."""
    return tuple(getattr(batches, "_workers", ()))


def shutdown_of(batches: Any) -> Callable[[], None] | None:
    """What ends an iterator's workers; ``None`` without any."""
    return getattr(batches, "_shutdown_workers", None)


def is_iterator(batches: Any) -> bool:
    """Is it PyTorch's own iterator, or one derived from it?"""
    return hasattr(batches, "_next_data")


def forget_iterator(loader: Any) -> None:
    """Let a DataLoader restart its persistent workers."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def has_worker_init() -> bool:
    """In a worker, in a fetch: was its loader given a ``worker_init_fn``? Unless that is not told
    (`torch/utils/data/_utils/worker.py`: ``_worker_loop(…, init_fn, …)`` fetches)."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":
            return frame.f_locals.get("init_fn", frame) is not None
        frame = frame.f_back  # type: ignore[assignment]
    return True


def worker_info() -> Any:
    """``get_worker_info()``, whatever stands for it; ``None`` in the main process."""
    return worker._worker_info
