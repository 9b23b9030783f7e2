"""Which DataLoader feeds the training step, and what if its batch size were another?"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loader_module

from trainfit.results.trace import LoaderInfo, LoaderOverride
from trainfit.simgpu.location import user_frame
from trainfit.simgpu.patching import PatchSet


class _Made:
    """One constructed DataLoader, and how many batches it gave so far."""

    def __init__(self, loader: Any, index: int, where: str | None) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self.loader = weakref.ref(loader)
        self.batch_sampler = _reference(sampler)
        self.index = index
        self.where = where
        self.batches = 0


class LoaderTracker:
    """Numbers the DataLoaders in the order of their construction.

    With ``override`` one of them gets another batch size.
    """

    def __init__(self, override: LoaderOverride | None = None) -> None:
        self._override = override
        self._made: list[_Made] = []
        self._of_iterator: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()
        self._latest: _Made | None = None
        self._fed_by: LoaderInfo | None = None
        self._feeding: _Made | None = None

    @property
    def count(self) -> int:
        """DataLoaders constructed so far."""
        return len(self._made)

    def install(self, patches: PatchSet) -> None:
        """Watch every DataLoader that is made from now on, until ``patches`` is restored."""
        construct, iterate = DataLoader.__init__, DataLoader.__iter__
        iterator = loader_module._BaseDataLoaderIter
        advance = iterator.__next__
        signature = inspect.signature(construct)
        tracker = self

        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            where = user_frame()
            if tracker._override is not None and tracker._override.index == tracker.count:
                bound = signature.bind(loader, *args, **kwargs)
                _override(bound.arguments, tracker._override.batch_size)
                args, kwargs = bound.args[1:], bound.kwargs
            construct(loader, *args, **kwargs)
            tracker._made.append(_Made(loader, tracker.count, where))

        def __iter__(loader: Any) -> Any:
            batches = iterate(loader)
            made = tracker._find(loader)
            if made is not None and isinstance(batches, iterator):
                tracker._of_iterator[batches] = made
            return batches

        def __next__(batches: Any) -> Any:
            batch = advance(batches)
            made = tracker._of_iterator.get(batches)
            if made is not None:
                made.batches += 1
                tracker._latest = made
            return batch

        patches.set(DataLoader, "__init__", __init__)
        patches.set(DataLoader, "__iter__", __iter__)
        patches.set(iterator, "__next__", __next__)

    def note_step(self) -> None:
        """An optimizer step is over: the first time, this tells which loader fed it."""
        if self._feeding is None and self._latest is not None:
            self._feeding = self._latest
            self._fed_by = self._describe(self._feeding)

    def feeding(self) -> LoaderInfo | None:
        """The loader that gave the first step its batch, else the one that gave the last."""
        if self._feeding is not None and self._fed_by is not None:
            return _with_batches(self._fed_by, self._feeding.batches)
        return self._describe(self._latest) if self._latest is not None else None

    def _find(self, loader: Any) -> _Made | None:
        return next((made for made in self._made if made.loader() is loader), None)

    def _describe(self, made: _Made) -> LoaderInfo | None:
        """``made`` as it is now.

        A loader that was rebuilt from another (Accelerate's ``prepare``) shares its batch
        sampler; the original's place is given, for its batch size is the one the user gave.
        """
        loader = made.loader()
        if loader is None:
            return None
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = loader.batch_size
        if batch_size is None:
            batch_size = getattr(sampler, "batch_size", None)
        original = made
        if sampler is not None:
            original = next((m for m in self._made if m.batch_sampler() is sampler), made)
        return LoaderInfo(
            index=original.index,
            batch_size=batch_size if type(batch_size) is int else None,
            samples=_samples(loader, sampler),
            batches=made.batches,
            num_workers=int(loader.num_workers),
            dataset=type(getattr(loader, "dataset", None)).__name__,
            where=original.where,
        )


def _override(arguments: dict[str, Any], batch_size: int) -> None:
    """Give another batch size to the arguments that a DataLoader is constructed with."""
    sampler = arguments.get("batch_sampler")
    if sampler is None:
        arguments["batch_size"] = batch_size
    elif hasattr(sampler, "batch_size"):
        sampler.batch_size = batch_size


def _with_batches(info: LoaderInfo, batches: int) -> LoaderInfo:
    return dataclasses.replace(info, batches=batches)


def _samples(loader: Any, batch_sampler: Any) -> int | None:
    """Samples of an epoch: as many as the sampler gives, which may be part of the data set."""
    for source in (getattr(batch_sampler, "sampler", None), getattr(loader, "dataset", None)):
        try:
            return len(source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            continue
    return None


def _reference(value: Any) -> Any:
    """A weak reference, or a call that gives nothing where there can be none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None
