"""Identifies the DataLoader that feeds the training step, and overrides its batch size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader

from trainfit.hooks.held_objects import open_handles
from trainfit.hooks.ranks import length_of
from trainfit.results.runs.trace import (
    CallSite,
    LoaderCut,
    LoaderInfo,
    LoaderOverride,
    SampleOverride,
    SampleScan,
    Status,
)
from trainfit.scripts.call_sites import users_calls, written_at
from trainfit.scripts.phases.leaving import leave_loop
from trainfit.scripts.phases.loops import ends_epoch
from trainfit.scripts.samples.batch_sizes import FetchedSizes, FetchTimes
from trainfit.scripts.samples.epoch_cut import EpochCut, MadeLoader
from trainfit.scripts.samples.scan import cannot_look, repeated, scan_samples
from trainfit.simgpu.device.tensor import DeviceTensor
from trainfit.simgpu.device.user_location import caller_of, is_library, user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import data_loading as private


@dataclasses.dataclass(frozen=True)
class GivenBatch:
    """A batch that a DataLoader gave: its samples (``None``: not known), whether gradients were
    enabled then, and which loader it was, the same for one that is made again for each epoch.
    ``is_again``: its text and numbers are those of the batch before, and it has nothing else."""

    loader: object
    samples: int | None
    with_grad: bool
    is_again: bool = False


class LoaderTracker:
    """Numbers the DataLoaders in the order of their construction.

    With ``override`` one of them gets another batch size; with ``keep`` all of them stay
    alive, for :meth:`loader`. With ``sample`` the batches of one of them are made of that alone.
    """

    def __init__(
        self,
        override: LoaderOverride | None = None,
        *,
        sample: SampleOverride | None = None,
        cut: LoaderCut | None = None,
        keep: bool = False,
    ) -> None:
        self._override = override
        self._sample = sample
        self._epochs = EpochCut(cut)
        self._is_by_hand = False
        self._keep = keep
        self._made: list[MadeLoader] = []
        self._of_iterator: weakref.WeakKeyDictionary[Any, MadeLoader] = weakref.WeakKeyDictionary()
        self._latest: MadeLoader | None = None
        self._fed_by: LoaderInfo | None = None
        self._feeding: MadeLoader | None = None
        #: By loader, the batches it had given by the end of the first step, until the second.
        self._by_first_step: dict[int, int] = {}
        self.least_share: tuple[str | None, int] | None = None
        """Of loaders that feed a step in unequal shares, the one with the least, as
        :attr:`GivenBatch.loader` names it."""
        self._sizes = FetchedSizes()
        self._times = FetchTimes()
        self._scans: dict[int, SampleScan] = {}
        #: The last batch's loader, and its text and numbers.
        self._before: tuple[MadeLoader | None, Any] = (None, None)
        self.on_batch: Callable[[GivenBatch], None] = lambda batch: None
        """Called with each batch, before :attr:`after_batch`."""
        self.waited_s = 0.0
        """Seconds that the script waited for batches so far."""
        self.after_batch: Callable[[], None] = lambda: None
        """Called after each batch, in the script's own call of ``next``."""
        self.combined: Callable[[], Any] = lambda: None
        """A trainer's loader that is made of several."""

    def _given(self, made: MadeLoader, batches: Any, batch: Any, samples: int | None) -> GivenBatch:
        """What is to be known of a ``batch`` that the iterator ``batches`` gave."""
        plain = _plain(batch)
        before, self._before = self._before, (made, plain)
        is_again = plain is not None and before[0] is made and plain == before[1]
        loader = made.where, id(private.dataset_of(batches))
        return GivenBatch(loader, samples, torch.is_grad_enabled(), is_again)

    @property
    def count(self) -> int:
        """DataLoaders constructed so far."""
        return len(self._made)

    @property
    def epochs(self) -> EpochCut:
        """What ends epochs early, if anything does."""
        return self._epochs

    def override(
        self,
        override: LoaderOverride | None,
        sample: SampleOverride | None = None,
        cut: LoaderCut | None = None,
    ) -> None:
        """Give a loader that is yet to be made another batch size, one sample alone, or an early
        end."""
        self._override, self._sample, self._epochs.cut = override, sample, cut

    def install(self, patches: PatchSet) -> None:
        """Watch every DataLoader that is made from now on, until ``patches`` is restored."""
        iterator = private.LoaderIterator
        advance = iterator.__next__
        tracker = self
        self._sizes.install(patches)
        self._times.install(patches)
        self._epochs.install(patches, self._find, self._made, self._original)

        def __next__(batches: Any) -> Any:
            began = time.perf_counter()
            batch = advance(batches)
            tracker.waited_s += time.perf_counter() - began
            made = tracker._of_iterator.get(batches)
            if made is not None and tracker._epochs.given(batches, made):
                if not leave_loop(caller_of(sys._getframe(1))):
                    raise StopIteration
            elif made is not None:
                if tracker._keep and not made.batches:
                    made.on_gpu = is_simulated(batch)
                made.batches += 1
                made.trains |= tracker._feeding is None and torch.is_grad_enabled()
                samples = tracker._sizes.of(batches, batch)
                if samples is not None:
                    batch = tracker._replaced(batch, made, samples)
                if tracker._epochs.is_last(batches, made) and samples is not None:
                    batch = tracker._largest(batch, made, samples)
                made.fed.note(batch, samples)
                tracker._latest = made
                tracker.on_batch(tracker._given(made, batches, batch, samples))
                tracker.after_batch()
            return batch

        self._watch(patches, DataLoader)
        patches.set(iterator, "__next__", __next__)

        def torchdata(module: types.ModuleType) -> None:
            for kind in private.defined_in(module):
                if issubclass(kind, DataLoader):
                    tracker._watch(patches, kind)

        patches.when_imported(private.TORCHDATA, torchdata)

    def _watch(self, patches: PatchSet, kind: type) -> None:
        """A class of DataLoaders: PyTorch's, or one that is made without it (torchdata's)."""
        iterate = kind.__iter__  # type: ignore[attr-defined]
        make = getattr(kind, private.GET_ITERATOR.name)
        tracker = self

        def constructing(construct: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(construct)

            @functools.wraps(construct)
            def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
                where, sites = user_frame(), users_calls(sys._getframe())
                if tracker._override is not None:
                    bound = signature.bind(loader, *args, **kwargs)
                    if tracker._is_overridden(where, sites, bound.arguments.get("dataset")):
                        _override(bound.arguments, tracker._override.batch_size)
                        args, kwargs = bound.args[1:], bound.kwargs
                before, keep = tracker.count, tracker._keep
                construct(loader, *args, **kwargs)
                if tracker.count == before:  # else by PyTorch's, which it called
                    tracker._made.append(MadeLoader(loader, before, where, keep, sites))

            return __init__

        def __iter__(loader: Any) -> Any:
            by_hand = _is_by_hand(caller_of(sys._getframe(1)))
            tracker._is_by_hand, before = by_hand, tracker._is_by_hand
            try:
                batches = iterate(loader)
            finally:
                tracker._is_by_hand = before
            made = tracker._find(loader)
            if made is not None and isinstance(batches, private.LoaderIterator):
                made.known = tracker._describe(made)
            return batches

        def _get_iterator(loader: Any) -> Any:
            """What ``__iter__`` calls, and endless loaders (Ultralytics') themselves."""
            made = tracker._find(loader)
            if made is not None and tracker._keep and not made.batches:
                with contextlib.suppress(Exception):  # a library's object may raise anything
                    made.handles = open_handles(loader.dataset)
            maximum = math.inf if tracker._keep else len(os.sched_getaffinity(0))
            by_hand = tracker._is_by_hand
            with tracker._epochs.making(made, by_hand=by_hand), _workers_at_most(maximum, loader):
                batches = make(loader)
            if made is not None:
                tracker._epochs.begun(batches, made, by_hand=by_hand)
                tracker._of_iterator[batches] = made
                made.known = tracker._describe(made)
                _keep_loader(batches, loader)
            return batches

        patches.hook(kind, "__init__", constructing)
        patches.set(kind, "__iter__", __iter__)
        patches.set(kind, private.GET_ITERATOR.name, _get_iterator)

    def _is_overridden(
        self, where: str | None, sites: tuple[CallSite, ...], data_set: object
    ) -> bool:
        """Is a loader that is being made the one that gets another batch size, or that one again,
        as a script makes one for each epoch?"""
        index = self._override.index if self._override is not None else self.count
        if index >= self.count:
            return self._override is not None and index == self.count
        first = self._made[index]
        return (first.where, first.sites) == (where, sites) and first.has_like(data_set)

    def note_step(self) -> None:
        """An optimizer step is over: the first time, this tells which loader fed it, of several the
        one whose end is that of the epoch. Where no loop tells, the second step does: of loaders
        that gave as many batches for it, in unequal shares, it is the one with the least share."""
        if self._feeding is None and self._latest is not None:
            with contextlib.suppress(Exception):  # the user's loops and loaders
                self._feeding = self._find(ends_epoch(sys._getframe(1), self.combined()))
            if self._feeding is None or not self._feeding.batches:
                self._feeding = self._latest
                self._by_first_step = {made.index: made.batches for made in self._made}
            self._fed_by = self._describe(self._feeding)
        elif self._by_first_step and self._feeding is not None:
            least = self._least_share(self._feeding, self._by_first_step)
            if least is not self._feeding:
                self._feeding, self._fed_by = least, self._describe(least)
                self.least_share = least.where, least.data_set
            self._by_first_step = {}

    def _least_share(self, latest: MadeLoader, before: Mapping[int, int]) -> MadeLoader:
        """The smallest batch of a step: of the loaders that gave as many batches as ``latest``
        since ``before``, the one whose batch size those of all the others are multiples of
        (labelled images next to seven times as many others); ``latest`` where there is none."""
        given = latest.batches - before.get(latest.index, 0)
        sizes = {
            made: made.known.batch_size or 0
            for made in self._made
            if made.known is not None
            and (made.known.batch_size or 0) > 1
            and made.batches - before.get(made.index, made.batches) == given
        }
        least = min(sizes, key=lambda made: (sizes[made], made is not latest), default=latest)
        if latest not in sizes or any(size % sizes[least] for size in sizes.values()):
            return latest
        return least

    def feeding(self) -> LoaderInfo | None:
        """The loader that gave the first step its batch, else the one that gave the last."""
        if self._feeding is not None and self._fed_by is not None:
            return _with_batches(self._fed_by, self._feeding)
        return self._describe(self._latest) if self._latest is not None else None

    def other_batch(self) -> tuple[int, int] | None:
        """Where a loader gave the latest batch that gave the first step none, and is none of those
        that did once more: its number, and the batches it gave; ``None``: another did."""
        latest = self._latest
        if latest is None or self._feeding is None or latest.trains:
            return None
        if any(made.trains and latest.is_again(made) for made in self._made):
            return None
        return latest.index, latest.batches

    def of_run(self, status: Status, steps: int, optimizes: bool) -> LoaderInfo | None:
        """The loader of a run that ended so after so many steps: without any, the one whose data
        set is too small for a batch where the script ``optimizes``, or that is waited for."""
        loader_info = self.feeding()
        if steps:
            return loader_info
        if optimizes:
            loader_info = self.without_batches() or loader_info
        if status == "failed":
            return loader_info or self.without_batches(iterated=False)
        return loader_info or (self.waiting() if status == "timeout" else None)

    def sample_s(self) -> float | None:
        """Seconds that fetching a sample took, by a worker or the script itself; where workers that
        import the script again do not tell, how long the script waited for one; ``None``: not
        known."""
        fetched, fed_by = self._times.sample_s(), self.feeding()
        samples = sum(fed_by.fed) if fed_by is not None else 0
        return fetched if fetched is not None or not samples else self.waited_s / samples

    def without_batches(self, *, iterated: bool = True) -> LoaderInfo | None:
        """The last that was iterated but gave nothing, having fewer samples than one batch; or the
        first that was not ``iterated`` and has none to give."""
        for made in reversed(self._made) if iterated else self._made:
            known = made.known if iterated else self._describe(made)
            if known is None or made.batches or not known.samples or not known.batch_size:
                continue
            if known.samples < known.batch_size and (iterated or known.drops_last):
                return known
        return None

    def waiting(self) -> LoaderInfo | None:
        """The last that was iterated, if it has given nothing yet."""
        latest = next((made for made in reversed(self._made) if made.known is not None), None)
        return latest.known if latest is not None and not latest.batches else None

    def scan(self, seconds: float) -> SampleScan | None:
        """Sizes of the samples of :meth:`feeding`, after a look of about so many ``seconds``;
        ``None`` where the loader is gone."""
        made = self._feeding or self._latest
        loader = made.loader() if made is not None else None
        if loader is None:
            return None
        try:
            return scan_samples(loader, seconds)
        except Exception as error:  # the user's sampler or data set: whatever it raises
            return SampleScan(reason=cannot_look(error))

    def _replaced(self, batch: Any, made: MadeLoader, samples: int) -> Any:
        """The batch, or one of the sample that was asked for."""
        sample, loader = self._sample, made.loader()
        if sample is None or loader is None or self._original(made).index != sample.index:
            return batch
        return repeated(loader, sample, samples)

    def _largest(self, batch: Any, made: MadeLoader, samples: int) -> Any:
        """The largest batch that the data set of ``made`` has; ``batch`` where its batches are all
        of one size, or that cannot be told."""
        loader, cut = made.loader(), self._epochs.cut
        if loader is None or cut is None:
            return batch
        with contextlib.suppress(Exception):  # the user's data set: whatever it raises
            if made.data_set not in self._scans:
                self._scans[made.data_set] = scan_samples(loader, cut.look_s)
            scan = self._scans[made.data_set]
            if scan.varying and not scan.reason:
                return repeated(loader, scan.largest_batch(made.index), samples)
        return batch

    def loader(self) -> DataLoader[Any] | None:
        """The DataLoader that :meth:`feeding` tells of, with ``keep``.

        Where it was rebuilt from another around the same batch sampler, the original.
        """
        made = self._feeding or self._latest
        return self._original(made).held if made is not None else None

    def handles(self) -> Mapping[str, str]:
        """What its data set held open before its first batch: path → type. With ``keep``."""
        made = self._feeding or self._latest
        return made.handles if made is not None else {}

    def gives_gpu_tensors(self) -> bool:
        """Are tensors of its batches on the GPU already, as it gives them? With ``keep``."""
        made = self._feeding or self._latest
        return made is not None and made.on_gpu

    def shut_down(self) -> None:
        """End the workers and pinning threads of all iterators that are still alive.

        What a persistent loader keeps is dropped, so that it can be iterated again.
        """
        for iterator in list(self._of_iterator):
            end = private.shutdown_of(iterator)
            if end is not None:
                with contextlib.suppress(Exception):
                    end()
        for made in self._made:
            loader = made.loader()
            if loader is not None:
                private.forget_iterator(loader)

    def _original(self, made: MadeLoader) -> MadeLoader:
        """The first loader made of the same batch sampler, or of a shard of it."""
        loader = made.loader()
        sampler = getattr(loader, "batch_sampler", None) if loader is not None else None
        if sampler is None:
            return made
        those = (sampler, getattr(sampler, "batch_sampler", sampler))  # or Accelerate's shard of it
        return next((m for m in self._made if any(m.batch_sampler() is s for s in those)), made)

    def _find(self, loader: Any) -> MadeLoader | None:
        if loader is None:  # as one is that the script has thrown away
            return None
        return next((made for made in self._made if made.loader() is loader), None)

    def _describe(self, made: MadeLoader) -> LoaderInfo | None:
        """``made`` as it is now.

        A loader that was rebuilt from another (Accelerate's ``prepare``) shares its batch
        sampler; the original's place is given, for its batch size is the one the user gave.
        """
        loader = made.loader()
        if loader is None:
            return None if made.known is None else _with_batches(made.known, made)
        sampler = getattr(loader, "batch_sampler", None)
        batch_size = loader.batch_size
        if batch_size is None:
            batch_size = getattr(sampler, "batch_size", None)
        original = self._original(made)
        return LoaderInfo(
            index=original.index,
            batch_size=batch_size if type(batch_size) is int else None,
            samples=_samples(loader, sampler),
            batches=made.batches,
            settings=private.settings_of(loader),
            dataset=type(getattr(loader, "dataset", None)).__name__,
            where=original.where,
            sites=original.sites,
            fed=tuple(made.fed.samples),
            varies=made.fed.varies,
            drops_last=bool(getattr(sampler, "drop_last", False)),
            data_set=length_of(getattr(loader, "dataset", None)),
            group=_group(sampler),
        )


def _is_by_hand(frame: types.FrameType | None) -> bool:
    """Does the script itself call ``iter()`` there?"""
    if frame is None or is_library(frame.f_code.co_filename):
        return False
    return written_at(frame.f_code, frame.f_lasti).rpartition(".")[2] in ("iter", "__iter__")


def _keep_loader(batches: Any, loader: Any) -> None:
    """Let a loader live as long as its iterator: ``for batch in DataLoader(...)`` keeps only the
    latter, which holds the data set. Persistent workers' iterator belongs to the loader, and is
    to end with it."""
    if not loader.persistent_workers:
        batches._trainfit_loader = loader


@contextlib.contextmanager
def _workers_at_most(limit: float, loader: Any) -> Iterator[None]:
    """Iterators that are made meanwhile have no more workers.

    All fetch ahead at once: 12 workers 24 batches, for three simulated steps on two cores. The
    batches stay the same; of a data set without indices each worker may give a part, or all of it.
    """
    given = vars(loader).get("num_workers", 0)
    if given <= limit or private.dataset_kind(loader) != private.INDEXED:
        yield
        return
    loader.num_workers = int(limit)
    try:
        yield
    finally:
        loader.num_workers = given


#: Things in a batch that are compared at most, and what of it is compared.
_COMPARED: Final = 100_000
_PLAIN: Final = (str, int, float, bool, type(None))


def _plain(batch: Any) -> Any:
    """A batch of text and numbers, which can be compared; ``None``: it has others, or many."""
    stack, seen = [batch], 0
    while stack:
        item = stack.pop()
        seen += 1
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif not isinstance(item, _PLAIN):
            return None
        if seen + len(stack) > _COMPARED:
            return None
    return batch


def is_simulated(value: Any, most: int = 10_000) -> bool:
    """Is a tensor of the simulated GPU in ``value`` (a batch, a data set's attributes)?

    ``most`` is how many things are looked at.
    """
    stack, seen = [value], 0
    known: set[int] = set()
    while stack and seen < most:
        item = stack.pop()
        seen += 1
        if isinstance(item, DeviceTensor):
            return True
        if isinstance(item, str | bytes | int | float | torch.Tensor) or id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(itertools.islice(item.values(), most))
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(itertools.islice(item, most))
        elif hasattr(item, "__dict__") and not isinstance(item, type | types.ModuleType):
            stack.extend(vars(item).values())
    return False


def _override(arguments: dict[str, Any], batch_size: int) -> None:
    """Give another batch size to the arguments that a DataLoader is constructed with."""
    sampler = arguments.get("batch_sampler")
    if sampler is None:
        arguments["batch_size"] = batch_size
    elif hasattr(sampler, "batch_size"):
        sampler.batch_size = batch_size


def _with_batches(info: LoaderInfo, made: MadeLoader) -> LoaderInfo:
    """What is known of it by now."""
    return dataclasses.replace(
        info, batches=made.batches, fed=tuple(made.fed.samples), varies=made.fed.varies
    )


def _samples(loader: Any, batch_sampler: Any) -> int | None:
    """Samples of an epoch of this process: as many as the sampler gives, which may be part of the
    data set, or its share of them."""
    processes, batch_sampler = _unsharded(batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, BatchSampler):  # repeated for ever by what is around it
        sampler = sampler.sampler
    length, batches = length_of(sampler), length_of(batch_sampler)
    # Fewer than batches: it gives batches itself, which are split or joined (Opacus).
    if length is None or (batches is not None and length < batches):
        length = length_of(getattr(loader, "dataset", None))
    return None if length is None else -(-length // processes)


def _unsharded(batch_sampler: Any) -> tuple[int, Any]:
    """Processes that Accelerate's shard of a batch sampler is for, and what it is a shard of."""
    around = getattr(batch_sampler, "batch_sampler", None)
    if around is None:
        return 1, batch_sampler
    return getattr(batch_sampler, "num_processes", 1), around


def _group(batch_sampler: Any) -> int:
    """How often in a row the sampler gives each sample: TRL's, for as many completions of each
    prompt, of which a batch has all or none."""
    sampler = getattr(_unsharded(batch_sampler)[1], "sampler", None)
    times = getattr(sampler, "mini_repeat_count", None)
    return times if type(times) is int and times > 0 else 1
