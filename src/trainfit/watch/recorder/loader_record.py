"""A DataLoader of the script, as far as the recorder knows it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from trainfit.results.watch.run import WatchedLoader
from trainfit.scripts.watch.batch_sizes import samples_in


class LoaderRecord:
    """``role`` is found out by what its batches are used for."""

    def __init__(self, loader: Any, place: str) -> None:
        self.place = place
        self.role = "unknown"
        self._told = self._facts(loader)

    def describe(self) -> WatchedLoader:
        return WatchedLoader(role=self.role, place=self.place, **self._told)  # type: ignore[arg-type]

    def is_of(self, loader: Any) -> bool:
        """Has the loader still the settings that it had?"""
        return self._told == self._facts(loader)

    @property
    def key(self) -> Hashable:
        """The same for loaders that are made at one place with the same settings."""
        return self.place, *self._told.values()

    def samples(self, batch: Any) -> int:
        """Of a batch; -1 where it does not tell."""
        likely = self._told["batch_size"]
        part = batch
        if isinstance(part, (list, tuple)):  # a union costs ten times as much
            part = part[0] if part else None
        elif isinstance(part, Mapping):
            part = next(iter(part.values()), None)
        # The first tensor of a usual batch has the batch size: nothing else is to be asked.
        if isinstance(part, torch.Tensor) and part.dim() and len(part) == likely:
            return len(part)
        found = samples_in(batch, likely)
        return -1 if found is None else found

    @staticmethod
    def _facts(loader: Any) -> dict[str, Any]:
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        context = getattr(loader, "multiprocessing_context", None)
        method = context.get_start_method() if context is not None else ""
        if loader.num_workers and not method:
            method = torch.multiprocessing.get_start_method(allow_none=True) or "fork"
        return {
            "num_workers": int(loader.num_workers),
            "prefetch_factor": loader.prefetch_factor,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "batch_size": size if isinstance(size, int) else None,
            "batches": _length(loader),
            "start_method": method,
        }


def _length(loader: Any) -> int | None:
    # A data set that streams has no length to give; asking its own ``__len__`` could take long.
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        return None
    try:
        length = operator.index(len(loader))
    except (TypeError, NotImplementedError, ValueError, OverflowError):
        return None
    return length if length < 1 << 62 else None


def queued(batches: Any) -> int:
    """Batches that are ready in an iterator of a DataLoader with workers; -1 where it has none."""
    told = getattr(batches, "_task_info", None)
    if told is None:
        return -1
    # Those that came out of their order wait in a dictionary, with a second element.
    ready = sum(len(each) == 2 for each in itertools.islice(told.values(), 256))
    queues = {id(queue): queue for queue in (batches._data_queue, batches._worker_result_queue)}
    return ready + sum(int(queue.qsize()) for queue in queues.values())
