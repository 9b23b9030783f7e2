"""The number of samples in a batch, and what a sample needs to be loaded."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import mmap
import random
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from trainfit.results.runs.trace import SampleOverride, SampleScan
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
            began = time.perf_counter()
            batch = original(fetcher, index)
            took = time.perf_counter() - began
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
    """By the look of a batch: the first dimension of its tensors, the length of its lists.

    ``likely`` is the batch size asked for; it is taken where any part of the batch has it.
    ``None`` where nothing in it has a length.
    """
    graphs = getattr(batch, "num_graphs", None)  # graphs of a batch share their tensors
    if type(graphs) is int:
        return graphs
    found = list(itertools.islice(_lengths(batch, 0), _PARTS))
    if not found:
        return None
    return likely if likely in found else collections.Counter(found).most_common(1)[0][0]


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
    if all(isinstance(each, Mapping) for each in parts):
        return True
    shapes = [tuple(getattr(each, "shape", ())) for each in parts]
    if not all(shapes) or len(shapes) < 2:
        return False
    if len({shape[0] for shape in shapes}) > 1:
        return True
    return len(shapes) >= _MANY and len(set(shapes)) == 1 and len(shapes[0]) > 1


# ---
# Sizes of a data set's samples where batches differ in shape: the median, the longest.


#: Seconds for looking at samples, and samples at most.
_BUDGET_S: Final = 5.0
_MOST: Final = 100_000
#: Samples of a usual batch: its longest is what the others are padded to.
_USUAL: Final = 32
#: Two batches whose elements differ by less than this share are of one size.
_ALIKE: Final = 0.02
#: Containers within one another that are looked into.
_SAMPLE_DEPTH: Final = 6


def scan_samples(loader: DataLoader[Any]) -> SampleScan:
    """Look at the loader's samples, in random order, as many as a few seconds allow.

    They are made as a worker would make them, and again by :func:`repeated`: random transforms
    draw by a seed of each sample's own.
    """
    if private.dataset_kind(loader) != private.INDEXED or not private.makes_batches(loader):
        return SampleScan(reason="its data set cannot be indexed")
    keys = _keys(loader)
    if not keys or not all(isinstance(key, int | np.integer) for key in keys):
        return SampleScan(reason="its data set is not indexed by integers")
    order = {int(key): place for place, key in enumerate(keys)}
    random.Random(0).shuffle(keys)
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + _BUDGET_S
    with _own_randomness():
        for key in keys:
            if found and time.monotonic() > deadline:
                break
            try:
                found.append((elements(_sample(loader, int(key))), int(key)))
            except Exception as error:  # the user's data set: whatever it raises
                return SampleScan(reason=f"sample {key} failed ({type(error).__name__}: {error})")
    in_order = sorted(found, key=lambda each: order[each[1]])
    found.sort()
    (median, typical), (most, longest) = found[len(found) // 2], found[-1]
    fill, padded = _longest_of_a_batch(in_order)
    pads = _pads(loader, typical, longest)
    return SampleScan(
        looked_at=len(found),
        samples=len(keys),
        typical=typical,
        longest=longest,
        typical_elements=median,
        longest_elements=most,
        padded=padded if pads else None,
        padded_elements=fill if pads else 0,
    )


def _longest_of_a_batch(found: list[tuple[int, int]]) -> tuple[int, int]:
    """The longest sample of a usual batch, the median of all: of ``found``, elements and keys in
    an epoch's order, in which a sampler may have put samples of like size together."""
    batches = [found[at : at + _USUAL] for at in range(0, len(found), _USUAL)]
    full = [each for each in batches if len(each) == _USUAL] or batches
    return statistics.median_high(max(batch) for batch in full)


def _pads(loader: DataLoader[Any], short: int, long: int) -> bool:
    """Is a batch of both samples as large as one of the longer alone?"""
    with _own_randomness():
        try:
            mixed = elements(loader.collate_fn([_sample(loader, key) for key in (short, long)]))
            alone = elements(loader.collate_fn([_sample(loader, key) for key in (long, long)]))
        except Exception:  # the user's collate function: it may want more than two, or one size
            return False
    return abs(mixed - alone) <= _ALIKE * alone


def repeated(loader: DataLoader[Any], sample: SampleOverride, samples: int) -> Any:
    """A batch of so many samples, made of those that ``sample`` says, as ``loader`` would collate
    it."""
    with _own_randomness():
        first = _sample(loader, sample.key)
        batch = [first, *(copy.copy(first) for _ in range(samples - 1))]
        if sample.padded is not None and samples > 1:
            batch[-1] = _sample(loader, sample.padded)
        batch = loader.collate_fn(batch)
    return private.pinned(batch) if loader.pin_memory else batch


def elements(sample: Any, depth: int = _SAMPLE_DEPTH) -> int:
    """Numbers in a sample: elements of tensors and arrays, letters of texts, numbers of lists."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return int(sample.size)
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        parts: Any = sample.values()
    elif isinstance(sample, list | tuple):
        if sample and all(type(each) in (int, float, bool) for each in sample):
            return len(sample)
        parts = sample
    elif hasattr(sample, "size") and isinstance(sample.size, tuple):  # a PIL image
        return int(np.prod(sample.size))
    elif hasattr(sample, "__dict__") and not isinstance(sample, type):
        parts = list(vars(sample).values())
    else:
        return 1
    return sum(elements(part, depth - 1) for part in parts) if depth else 1


def _keys(loader: DataLoader[Any]) -> list[Any]:
    """What the data set is indexed with in an epoch."""
    batches = itertools.chain.from_iterable(loader.batch_sampler or ())
    return list(dict.fromkeys(itertools.islice(batches, _MOST)))  # some go on for ever


def _sample(loader: DataLoader[Any], key: int) -> Any:
    random.seed(key)
    np.random.seed(key % (1 << 32))
    torch.default_generator.manual_seed(key)
    return private.MapFetcher(loader.dataset, True, list, False).fetch([key])[0]


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """What is drawn meanwhile leaves the script's own random numbers as they were."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)
