"""Hooks of the DataLoader in the process that trains: who waits for batches, and how long."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, Final

from torch.utils.data import DataLoader

from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import data_loading as private
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.guard import Host, careful, in_place_of, watched
from trainfit.watch.recorder.job import LoaderRecord, ReadyBatches, script_place

#: What PyTorch says of a worker that was killed (torch/utils/data/dataloader.py).
_DIED: Final = re.compile(r"DataLoader worker \(pid(\(s\))? [0-9, ]+\) (exited|is killed)")
#: Where an iterator keeps what is known of its loader.
_OWN: Final = "_trainfit_watch"
_clock = time.perf_counter
_this_thread = threading.get_ident


class _Iteration:
    """What is known of one iteration of a loader: since when, and whether it gave a batch."""

    __slots__ = ("began", "loader", "started")

    def __init__(self, loader: LoaderRecord, began: float) -> None:
        self.loader, self.began, self.started = loader, began, False

    @property
    def goes_on(self) -> bool:
        """Is its next batch one of the training, as those before it?"""
        return self.started and self.loader.role != "evaluation"


class LoaderHooks:
    """Follows every DataLoader that is iterated, those made before, too."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._made: dict[Hashable, LoaderRecord] = {}
        self._known: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()

    def install(self, patches: PatchSet) -> None:
        """Patch the DataLoader, until ``patches`` is restored."""
        patches.hook(DataLoader, "__init__", self._constructing)
        patches.hook(DataLoader, "__iter__", self._iterating)
        patches.hook(*private.GET_ITERATOR, self._making)
        self.watch_iterator(patches, private.LoaderIterator)

    def watch_iterator(self, patches: PatchSet, kind: type) -> None:
        """Time the calls of ``next`` of a class of iterators, which has its own."""
        patches.hook(kind, "__next__", self._next)

    def watch_torchdata(self, patches: PatchSet, module: ModuleType) -> None:
        """``StatefulDataLoader`` has iterators of its own."""
        for kind in private.defined_in(module):
            if "__next__" in vars(kind):
                self.watch_iterator(patches, kind)
            if private.GET_ITERATOR.name in vars(kind):
                patches.hook(kind, private.GET_ITERATOR.name, self._making)

    def _constructing(self, construct: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(construct)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            with careful(self._host, "DataLoader"):
                if self._host.live:
                    self._places[loader] = script_place()
            construct(loader, *args, **kwargs)

        return __init__

    def _iterating(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(iterate)
        def __iter__(loader: Any) -> Any:
            return self._iterated(loader, iterate)

        return __iter__

    def _making(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @in_place_of(make)
        def _get_iterator(loader: Any) -> Any:
            with careful(self._host, "DataLoader"):
                self._record(loader)  # before there are workers, which have to know the run
            batches = make(loader)
            with careful(self._host, "DataLoader"):
                self._begin(loader, batches, self._host.steps.now)
            return batches

        return _get_iterator

    def _iterated(self, loader: Any, iterate: Callable[[Any], Any]) -> Any:
        """An epoch begins: workers are started, or told to begin again."""
        token, began = -1, 0.0
        with careful(self._host, "DataLoader"):
            if watched(self._host):
                began = self._host.steps.now
                token = self._host.steps.enter_input()
        try:
            batches = iterate(loader)
        finally:
            with careful(self._host, "DataLoader"):
                self._host.steps.leave(token)
        with careful(self._host, "DataLoader"):
            if token >= 0:
                self._begin(loader, batches, began)
        return batches

    def _begin(self, loader: Any, batches: Any, began: float) -> None:
        if self._host.live and private.is_iterator(batches):
            setattr(batches, _OWN, _Iteration(self._record(loader), began))

    def _record(self, loader: Any) -> LoaderRecord:
        record = self._known.get(loader)
        if record is None or not record.is_of(loader):
            # A script that makes the same loader for each epoch has one.
            made = LoaderRecord(loader, self._places.get(loader, ""))
            record = self._made.setdefault(made.key, made)
            record.made += 1
            self._known[loader] = record
            record.note_dataset(loader)
            if self._host.live:
                self._host.note_loader(record)
        return record

    def _next(self, advance: Callable[[Any], Any]) -> Callable[[Any], Any]:
        host = self._host

        @in_place_of(advance)
        def __next__(batches: Any) -> Any:
            token = ph.NOT_ENTERED
            iteration = began = ready = None
            steps = host.steps
            try:
                if host.live and _this_thread() == steps.thread:
                    began = _clock()
                    iteration = getattr(batches, _OWN, None)
                    if not (steps.light and iteration is not None and iteration.goes_on):
                        ready = ReadyBatches(batches) if private.has_workers(batches) else None
                        token = steps.enter_input(None if ready is None else ready.count)
                        steps.cost_s += _clock() - began
            except Exception as error:
                host.failed("DataLoader", error)
            try:
                batch = advance(batches)
            except BaseException as error:
                with careful(host, "DataLoader"):
                    if steps.light and isinstance(error, StopIteration) and began is not None:
                        token = steps.late_input(_clock() - began)
                    self._ended(token, iteration, error)
                raise
            try:
                if token != ph.NOT_ENTERED:
                    began = _clock()
                    self._given(token, iteration, batch, ready)
                    steps.cost_s += _clock() - began
                elif steps.light and iteration is not None and began is not None:
                    given = _clock()
                    steps.light_batch(given - began, iteration.loader, batch)
                    steps.cost_s += _clock() - given
            except Exception as error:
                host.failed("DataLoader", error)
            return batch

        return __next__

    def _given(
        self, token: int, iteration: _Iteration | None, batch: Any, ready: ReadyBatches | None
    ) -> None:
        steps = self._host.steps
        if iteration is None:
            steps.leave(token)
            return
        first = None
        if not iteration.started:
            iteration.started = True
            first = steps.now - iteration.began
        was_ready = None if ready is None else ready.had_next
        steps.leave_input(token, iteration.loader, batch, first, was_ready)

    def _ended(self, token: int, iteration: _Iteration | None, error: BaseException) -> None:
        if not isinstance(error, StopIteration):
            self._host.saw(error)
            if _DIED.search(str(error)):
                self._host.event("worker_died", text=str(error)[:2000])
        elif iteration is not None:
            iteration.loader.passes += 1
        if token < 0:
            return
        if isinstance(error, StopIteration) and iteration is not None:
            self._host.steps.end_input(token, iteration.loader)
        else:
            self._host.steps.leave(token)
