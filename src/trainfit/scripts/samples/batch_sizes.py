"""The number of samples in a batch, and what a sample needs to be loaded."""

from __future__ import annotations

import collections
import itertools
import mmap
import statistics
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch.utils.data import get_worker_info

from trainfit.hooks.held_objects import tensors_in
from trainfit.simgpu.cuda_clocks import stopwatch
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import data_loading as private

#: Parts of a batch that are looked at, and how deep they may lie.
_PARTS: Final = 200
_DEPTH: Final = 4
#: So many tensors of one shape are samples, not fields.
_MANY: Final = 3
#: Workers whose fetches are timed, and fetches of each.
_WORKERS: Final = 64
_FETCHES: Final = 32


class FetchedSizes:
    """Counts the samples that a DataLoader asks its data set for, batch by batch.

    That is exact whatever ``collate_fn`` makes of them. Workers are asked ahead: sizes wait until
    their batch is handed out, in its order.
    """

    def __init__(self) -> None:
        self._asked: weakref.WeakKeyDictionary[Any, collections.deque[int | None]]
        self._asked = weakref.WeakKeyDictionary()

    def install(self, patches: PatchSet) -> None:
        """Count from now on, until ``patches`` is restored."""
        ask, reset = private.NEXT_INDEX.now, private.RESET.now
        asked = self._asked

        def _next_index(batches: Any) -> Any:
            index = ask(batches)
            counted = private.makes_batches(batches) and hasattr(index, "__len__")
            asked.setdefault(batches, collections.deque()).append(len(index) if counted else None)
            return index

        def _reset(batches: Any, *args: Any, **kwargs: Any) -> None:
            asked.pop(batches, None)  # what a persistent worker had been asked for
            reset(batches, *args, **kwargs)

        patches.set(*private.NEXT_INDEX, _next_index)
        patches.set(*private.RESET, _reset)

    def of(self, batches: Any, batch: Any) -> int | None:
        """The samples of ``batch``, which the iterator ``batches`` has just given."""
        waiting = self._asked.get(batches)
        asked = waiting.popleft() if waiting else None
        if asked is not None and private.dataset_kind(batches) == private.INDEXED:
            return asked
        # What an iterable data set gives can be less than it was asked for.
        return samples_in(batch, asked)


class FetchTimes:
    """Times how long fetching a batch takes whoever fetches it: a worker, or the main process.

    How long the script waits for a batch says less: it waits for its workers' start, too.
    """

    def __init__(self) -> None:
        # Forked workers write to it; a row each, and the last is the main process'.
        shared = memoryview(mmap.mmap(-1, 8 * (_WORKERS + 1) * _FETCHES)).cast("d")
        self._rows = [shared[n * _FETCHES : (n + 1) * _FETCHES] for n in range(_WORKERS + 1)]
        self._count = 0

    def install(self, patches: PatchSet) -> None:
        """Time from now on, until ``patches`` is restored."""
        for kind in private.FETCHERS:
            patches.set(kind, "fetch", self._timed(kind.fetch))

    def _timed(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
            passed = stopwatch()
            batch = original(fetcher, index)
            took = passed()
            worker = get_worker_info()
            number = _WORKERS if worker is None else worker.id
            samples = len(index) if hasattr(index, "__len__") else 1
            if self._count < _FETCHES and number <= _WORKERS:
                self._rows[number][self._count] = max(took, 1e-9) / max(samples, 1)
                self._count += 1
            return batch

        return fetch

    def sample_s(self) -> float | None:
        """Seconds for a sample, the median of the fetches; of a worker that made several, its
        first, with cold caches, is left out. ``None``: none is known (workers that import the
        script again tell nothing)."""
        rows = [[took for took in row if took] for row in self._rows]
        known = [took for row in rows for took in (row[1:] or row)]
        return statistics.median(known) if known else None


def samples_in(batch: Any, likely: int | None = None) -> int | None:
    """The number of samples by the look of a batch: the first dimension of its tensors, the length
    of its lists.

    ``likely`` is the batch size asked for; it is taken where any part of the batch has it.
    ``None`` where nothing in it has a length.
    """
    graphs = getattr(batch, "num_graphs", None)  # graphs of a batch share their tensors
    if type(graphs) is int:
        return graphs
    lengths = list(itertools.islice(_lengths(batch, 0), _PARTS))
    if not lengths:
        return None
    return likely if likely in lengths else collections.Counter(lengths).most_common(1)[0][0]


def _lengths(part: Any, depth: int) -> Iterator[int]:
    """What could be the number of samples, of each part of a batch."""
    shape = getattr(part, "shape", None)
    if shape is not None:
        if len(shape) and type(shape[0]) is int:
            yield shape[0]
    elif depth < _DEPTH and isinstance(part, Mapping):
        for value in itertools.islice(part.values(), _PARTS):
            yield from _lengths(value, depth + 1)
    elif depth < _DEPTH and isinstance(part, list | tuple) and part:
        yield from _of_sequence(part, depth)
    elif depth < _DEPTH and hasattr(part, "__dataclass_fields__"):
        for name in part.__dataclass_fields__:
            yield from _lengths(getattr(part, name, None), depth + 1)


def _of_sequence(part: list[Any] | tuple[Any, ...], depth: int) -> Iterator[int]:
    """A list of samples has their number; fields each have it."""
    parts = part[:_PARTS]
    if not _are_samples(parts):
        for each in parts:
            yield from itertools.islice(_lengths(each, depth + 1), 1)
    yield len(part)


def _are_samples(parts: list[Any] | tuple[Any, ...]) -> bool:
    """Is each of these a sample, not a field of all samples?

    Fields of one batch have the same first dimension; of several images of one size nothing but
    their being many, and of several dimensions, tells that they are no fields.
    """
    if all(isinstance(part, Mapping) for part in parts):
        return True
    shapes = [tuple(getattr(part, "shape", ())) for part in parts]
    if not all(shapes) or len(shapes) < 2:
        return False
    if len({shape[0] for shape in shapes}) > 1:
        return True
    return len(shapes) >= _MANY and len(set(shapes)) == 1 and len(shapes[0]) > 1


# ---
# The first batches of a DataLoader: their sizes, and whether their shapes vary.


#: Batches that are looked at, and parts of each.
_BATCHES: Final = 64
#: Containers within one another that are looked into.
_FED_DEPTH: Final = 6


class FedBatches:
    """``samples`` are those of each of the first batches (as far as known), ``varies``
    says whether those as large as the first differ in other dimensions."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.varies = False
        self._first: tuple[tuple[int, ...], ...] | None = None

    def note(self, batch: Any, samples: int | None) -> None:
        """Look at one more batch, of so many samples (``None``: not known)."""
        if samples is None or len(self.samples) >= _BATCHES:
            return
        self.samples.append(samples)
        if samples == self.samples[0]:
            parts = tensors_in(batch, depth=_FED_DEPTH, most=_PARTS, attributes=_PARTS)
            shapes = tuple(tuple(part.shape) for part in itertools.islice(parts, _PARTS))
            self.varies |= self._first is not None and shapes != self._first
            self._first = shapes
