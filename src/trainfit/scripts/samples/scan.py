"""A look at the samples of a DataLoader, and the largest batch that they can make.

Memory depends on the largest batch of an epoch, which the first few seldom are: 300 boxes in one
image of 500, the longest text, the densest point cloud.

Sizes of a data set's samples, part by part: which parts vary, which samples are the largest.

Totals hide it, where an image has 300,000 numbers and its boxes 1,200: each part of a sample counts
by itself.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, default_collate

from trainfit.hooks.ranks import length_of
from trainfit.results.runs.trace import SampleOverride, SampleScan
from trainfit.simgpu.cuda_clocks import stopwatch
from trainfit.torch_private import data_loading as private

#: Containers within one another that are looked into, parts of a sample, and items of a list that
#: are parts of their own.
DEPTH: Final = 6
_PARTS, _FIELDS = 200, 4
#: Samples that are each the largest in something.
_LARGEST: Final = 4

#: The shape of each part of a sample (or a batch), by where it is in it.
Shapes = dict[str, tuple[int, ...]]


def shapes_of(sample: Any) -> Shapes:
    """The shape of each part: of tensors, arrays and images; the length of texts and lists.

    A list's items are one part, too, of as many elements as they have together.
    """
    shapes: Shapes = {}
    for path, shape in itertools.islice(_parts(sample, "", DEPTH), _PARTS):
        before = shapes.get(path)
        shapes[path] = shape if before is None else (math.prod(before) + math.prod(shape),)
    return shapes


def _parts(value: Any, path: str, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, torch.Tensor):
        yield path, (value.numel(),) if value.is_nested else tuple(value.shape)
    elif isinstance(value, np.ndarray):
        yield path, value.shape
    elif isinstance(value, str | bytes):
        yield path, (len(value),)
    elif depth and isinstance(value, Mapping):
        for key, part in itertools.islice(value.items(), _PARTS):
            yield from _parts(part, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        yield from _of_list(value, path, depth)
    elif hasattr(value, "size") and isinstance(value.size, tuple):  # a PIL image
        yield path, value.size
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        for name, part in list(vars(value).items()):
            yield from _parts(part, f"{path}.{name}", depth - 1)


def _of_list(
    value: list[Any] | tuple[Any, ...], path: str, depth: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, list):
        yield f"{path}[]", (len(value),)
        if value and all(type(each) in (int, float, bool) for each in value):
            return
        for part in value[:_PARTS]:
            for inner, shape in _parts(part, "", depth - 1):
                yield f"{path}[*]{inner}", (math.prod(shape),)
        value = value[:_FIELDS]
    for place, part in enumerate(value[:_PARTS]):
        yield from _parts(part, f"{path}[{place}]", depth - 1)


# ---
# Which parts vary, and which samples are the largest.


@dataclasses.dataclass(frozen=True)
class SampleSizes:
    """Sizes of samples of a data set: ``keys``, of which the first ``drawn`` are in random order
    (``None``: all), and the ``elements`` of each in the parts that vary, ``parts``, a row a sample.
    ``largest`` are keys of samples that are the largest in a part or one of its dimensions, first
    that which is the largest in all."""

    keys: list[int]
    parts: tuple[str, ...]
    elements: np.ndarray
    largest: tuple[int, ...] = ()
    drawn: int | None = None

    @classmethod
    def of(cls, keys: list[int], shapes: list[Shapes]) -> SampleSizes:
        first = shapes[0]
        varying = [
            path
            for path in dict.fromkeys(itertools.chain.from_iterable(shapes))
            if any(shape.get(path) != first.get(path) for shape in shapes)
        ]
        rows = [[math.prod(shape.get(path, (0,))) for path in varying] for shape in shapes]
        found = cls(keys, tuple(varying), np.array(rows, dtype=np.int64).reshape(len(keys), -1))
        if not varying:
            return found
        return dataclasses.replace(found, largest=tuple(found._largest(shapes)))

    def _largest(self, shapes: list[Shapes]) -> Iterator[int]:
        """The keys of the largest samples, by what varies the most first."""
        columns = [self.elements[:, place] for place in range(len(self.parts))]
        columns += [
            np.array(dimension)
            for path in self.parts
            for dimension in _dimensions([shape.get(path, ()) for shape in shapes])
        ]
        columns.sort(key=lambda column: -column.max() / max(float(np.median(column)), 1.0))
        found = [int(self.relative.argmax()), *(int(column.argmax()) for column in columns)]
        # One that is the largest in something already stands for those that are as large there.
        kept: list[int] = []
        for at, column in zip(found, [self.relative, *columns], strict=True):
            if not kept or column[at] > max(column[number] for number in kept):
                kept.append(at)
        return iter([self.keys[number] for number in kept[:_LARGEST]])

    @property
    def relative(self) -> np.ndarray:
        """The size of each sample: each part as a share of the largest there is, so that a part of
        few elements counts as much as one of many."""
        shares: np.ndarray = self.elements / np.maximum(self.elements.max(axis=0), 1)
        return np.asarray(shares.sum(axis=1))

    @property
    def by_key(self) -> dict[int, float]:
        """:attr:`relative`, by the samples' keys."""
        return dict(zip(self.keys, self.relative.tolist(), strict=True))

    @property
    def typical(self) -> int:
        """The row of the median of those that were drawn by chance."""
        drawn = self.relative[: self.drawn]
        return int(np.argsort(drawn, kind="stable")[len(drawn) // 2])

    def total(self, row: int) -> int:
        """Elements in the parts that vary."""
        return int(self.elements[row].sum())


def _dimensions(shapes: list[tuple[int, ...]]) -> Iterator[list[int]]:
    """Dimensions, where several vary: one image is the widest, another the highest."""
    if len({len(shape) for shape in shapes}) == 1:
        varying = [each for each in zip(*shapes, strict=True) if len(set(each)) > 1]
        if len(varying) > 1:
            yield from map(list, varying)


#: Samples that are looked at, at most.
_MOST: Final = 100_000
#: Samples after which a data set is of one size, where its collate function stacks them.
_ENOUGH: Final = 32
#: Samples of a usual batch, where its size is not known: its largest is what it is padded to.
_USUAL: Final = 32
#: Epochs of a random sampler of which the densest batch is taken.
_EPOCHS: Final = 20
#: A sample stands for an average that it exceeds by no more; where none does, so many of the
#: largest samples are taken by themselves.
_NEAR, _FEW = 1.25, 8
#: Samples with far larger files that are looked at first, how many times those of most they have,
#: and the share of the time for a look at all files' sizes.
_SOUGHT, _FAR, _FILES = 4, 2, 0.2
#: The share of the time for samples drawn by chance, where batches have different numbers of them;
#: the rest is for whole batches.
_BY_CHANCE: Final = 0.5
#: Ways in which a sample is cut to see whether the collate function minds.
_CUTS: Final = 8

# ---
# A look at the samples of a DataLoader.


def scan_samples(loader: DataLoader[Any], seconds: float) -> SampleScan:
    """Look at the loader's samples, in random order, for about so many ``seconds``.

    They are made as a worker would make them, and again by :func:`repeated`: random transforms
    draw by a seed of each sample's own. What fails is left out: the script may never get there.
    """
    if private.dataset_kind(loader) != private.INDEXED:
        return _of_stream(loader)
    batches, is_whole = _epoch(loader)
    keys = list(dict.fromkeys(itertools.chain.from_iterable(batches)))
    count = len(keys) if is_whole else length_of(loader.dataset)
    if _is_random(loader):  # another epoch may have others
        count = length_of(loader.dataset) or 0
        keys = random.Random(0).sample(range(count), min(count, _MOST))
    if not keys or not all(isinstance(key, int | np.integer) for key in keys):
        return SampleScan(reason="its data set is not indexed by integers")
    looked_at = keys.copy()
    random.Random(0).shuffle(looked_at)
    sought = _of_largest_files(loader, looked_at, _FILES * seconds)
    looked_at = list(dict.fromkeys([*sought, *looked_at]))
    found: list[int] = []
    shapes: list[Shapes] = []
    error: Exception | None = None
    passed = stopwatch()
    is_stacked = False
    by_batches = is_whole and _batch_size(loader) is None and private.makes_batches(loader)
    until = _BY_CHANCE * seconds if by_batches else seconds
    with _own_randomness():
        for key in looked_at:
            if (found or error) and passed() > until:
                break
            try:
                shapes.append(shapes_of(_sample(loader, int(key))))
            except Exception as raised:  # the user's data set: whatever it raises
                error = raised
                continue
            found.append(int(key))
            if len(found) == _ENOUGH and all(shape == shapes[0] for shape in shapes):
                is_stacked = _stacks(loader, _sample(loader, found[0]))
                if is_stacked:
                    break
    if not found:
        if loader.collate_fn is default_collate and (loader.batch_size or 1) > 1:
            return SampleScan(is_stacked=True)
        return SampleScan(reason=cannot_look(error))
    if not is_stacked:
        with _own_randomness():
            is_stacked = _stacks(loader, _sample(loader, found[0]))
    drawn = len(found)
    if by_batches and not is_stacked and drawn < len(keys):
        with _own_randomness():
            for key in _of_largest_batches(SampleSizes.of(found, shapes), batches):
                if passed() > seconds:
                    break
                with contextlib.suppress(Exception):  # as above
                    shapes.append(shapes_of(_sample(loader, key)))
                    found.append(key)
    sizes = dataclasses.replace(SampleSizes.of(found, shapes), drawn=drawn)
    scan = SampleScan(looked_at=len(found), samples=count, is_stacked=is_stacked)
    if not sizes.parts or not _reaches_batches(loader, sizes):
        elements = sum(map(math.prod, shapes[0].values()))
        return dataclasses.replace(scan, typical_elements=elements, longest_elements=elements)
    # What was sought says nothing of how many there are.
    if scan.looked_at != scan.samples and not by_batches:
        batches = [[key for key in batch if key not in sought] for batch in batches]
    return _of_sizes(loader, scan, sizes, batches)


def _of_sizes(
    loader: DataLoader[Any], scan: SampleScan, sizes: SampleSizes, batches: list[list[int]]
) -> SampleScan:
    """The samples that stand for all, where they differ in size."""
    row = {key: index for index, key in enumerate(sizes.keys)}
    typical, longest = sizes.typical, row[sizes.largest[0]]
    scan = dataclasses.replace(
        scan,
        varying=sizes.parts,
        typical=sizes.keys[typical],
        longest=sizes.keys[longest],
        typical_elements=sizes.total(typical),
        longest_elements=sizes.total(longest),
        largest=sizes.largest,
    )
    is_mixed, pads = _mixes(loader, scan)
    if not is_mixed or not private.makes_batches(loader):
        # The samples of a batch have one size, or a sample is a batch: it is all of the longest.
        return dataclasses.replace(scan, largest=(scan.longest,))
    if _batch_size(loader) is None:
        return _of_batches(scan, sizes, batches, pads=pads)
    in_order = [row[key] for key in itertools.chain.from_iterable(batches) if key in row]
    at_once = _batch_size(loader) or _USUAL
    if pads:
        padded = _padded_to(sizes, in_order)
        return dataclasses.replace(
            scan, padded=sizes.keys[padded], padded_elements=sizes.total(padded)
        )
    return _with_dense(loader, scan, sizes, in_order, at_once)


def _padded_to(sizes: SampleSizes, in_order: list[int]) -> int:
    """The longest sample of a usual batch, the median of all batches of an epoch, in whose order a
    sampler may have put samples of like size together."""
    relative = sizes.relative
    most = [max(batch, key=lambda row: relative[row]) for batch in _whole(in_order, _USUAL)]
    return int(sorted(most, key=lambda row: relative[row])[len(most) // 2])


def _with_dense(
    loader: DataLoader[Any],
    scan: SampleScan,
    sizes: SampleSizes,
    in_order: list[int],
    at_once: int,
) -> SampleScan:
    """What an epoch's densest batch consists of where batches are not padded, as sizes add up: a
    few of the largest samples, and others of their average size. What a sampler that was not seen
    whole puts together is not known: it may be the longest alone."""
    is_random = _is_random(loader)
    if not is_random and scan.looked_at != scan.samples:
        return scan
    relative = sizes.relative
    orders = [np.array(in_order)]
    if is_random:
        draw = np.random.default_rng(0)
        orders += [draw.permutation(in_order) for _ in range(_EPOCHS)]
    batches: Iterator[Any] = itertools.chain.from_iterable(_whole(o, at_once) for o in orders)
    densest = max(batches, key=lambda batch: float(relative[np.asarray(batch)].sum()))
    left = sorted(map(int, densest), key=relative.item)
    ascending = np.argsort(relative, kind="stable")
    few: list[int] = []
    while True:
        mean = float(relative[left].mean())
        index = min(int(np.searchsorted(relative[ascending], mean - 1e-9)), len(ascending) - 1)
        fill = int(ascending[index])
        # No sample may be of the average size, where all but a few are small.
        if relative[fill] <= _NEAR * mean or len(few) == _FEW or len(left) < 2:
            break
        few.append(left.pop())
    largest = dict.fromkeys([*scan.largest, *(sizes.keys[row] for row in few)])
    return dataclasses.replace(scan, dense=sizes.keys[fill], largest=tuple(largest))


def _whole(order: Sequence[int] | np.ndarray, at_once: int) -> Iterator[Any]:
    """Batches of ``order``; the last that is not full only where there is no other."""
    for start in range(0, max(len(order) - at_once, 0) + 1, at_once):
        yield order[start : start + at_once]


def _of_batches(
    scan: SampleScan, sizes: SampleSizes, batches: list[list[int]], *, pads: bool
) -> SampleScan:
    """The largest batch of a sampler whose batches have different numbers of samples, of those
    whose samples were all looked at."""
    size = sizes.by_key
    seen = batches
    if scan.looked_at != scan.samples:
        seen = [batch for batch in batches if all(key in size for key in batch)]
    if not seen:
        why = f"its sampler's batches have different numbers of samples, of which {scan.looked_at}"
        return dataclasses.replace(scan, reason=f"{why} of {scan.samples} were looked at")
    each = [[size.get(key, 0.0) for key in batch] for batch in seen]
    total = [len(batch) * max(batch) if pads else sum(batch) for batch in each]
    largest = seen[total.index(max(total))]
    return dataclasses.replace(scan, largest=tuple(largest), whole=True)


def _of_largest_batches(sizes: SampleSizes, batches: list[list[int]]) -> Iterator[int]:
    """The samples that were not looked at yet, batch by batch, the largest batch first.

    A batch is taken to be as many samples as it has, each as large as the largest that is known
    of it; one of which none is known is like the batch next to it in the number of samples.
    """
    size = sizes.by_key
    most = [max((size.get(key, 0.0) for key in batch), default=0.0) for batch in batches]
    known = sorted((len(batch), at) for batch, at in zip(batches, most, strict=True) if at)
    counts = [count for count, _ in known]

    def total(place: int) -> float:
        count, at = len(batches[place]), most[place]
        if at or not known:
            return count * at
        near = known[max(bisect.bisect_right(counts, count) - 1, 0)]
        return count * near[1]

    looked_at = set(size)
    for place in sorted(range(len(batches)), key=total, reverse=True):
        for key in batches[place]:
            if key not in looked_at:
                looked_at.add(key)
                yield key


def _of_stream(loader: DataLoader[Any]) -> SampleScan:
    """Nobody knows what a stream of samples has yet to give, but where a batch has to be of one
    size."""
    with _own_randomness(), contextlib.suppress(Exception):
        if _stacks(loader, next(iter(loader.dataset))):
            return SampleScan(is_stacked=True)
    return SampleScan(reason="its data set is iterable: what comes later is not known")


def _of_largest_files(loader: DataLoader[Any], keys: Sequence[Any], seconds: float) -> list[Any]:
    """The few ``keys`` whose files are far larger than most, where the data set has a list of its
    samples' files: a look at some samples would miss one in thousands."""
    passed, count = stopwatch(), length_of(loader.dataset)
    for files in vars(loader.dataset).values() if hasattr(loader.dataset, "__dict__") else ():
        if not isinstance(files, list | tuple) or not files or len(files) != count:
            continue
        if _file_of(files[0]) is None:
            continue
        sizes: list[tuple[int, Any]] = []
        for key in keys:
            if passed() > seconds:
                break
            with contextlib.suppress(OSError, TypeError):
                sizes.append((os.stat(_file_of(files[key]) or "").st_size, key))
        sizes.sort(reverse=True)
        usual = sizes[len(sizes) // 2][0] if sizes else 0
        return [key for size, key in sizes[:_SOUGHT] if size > _FAR * usual]
    return []


def _file_of(sample: Any) -> str | None:
    """The file that a data set's entry names, alone or among other parts."""
    entry = list(sample.values()) if isinstance(sample, Mapping) else sample
    parts = entry if isinstance(entry, tuple | list) else [entry]
    paths = (os.fspath(part) for part in parts if isinstance(part, str | os.PathLike))
    return next((path for path in paths if isinstance(path, str) and os.path.isfile(path)), None)


# ---
# What a collate function makes of samples of different sizes.


def _reaches_batches(loader: DataLoader[Any], sizes: SampleSizes) -> bool:
    """Do batches differ by the parts that vary? A collate function may leave out or resize them."""
    typical, many = sizes.keys[sizes.typical], len(sizes.largest) + 1
    try:
        alike = _collated(loader, [typical] * many)
        mixed = _collated(loader, [*sizes.largest, typical])
    except Exception:  # the user's collate function: it may want one size
        return True
    return mixed != alike


def _mixes(loader: DataLoader[Any], scan: SampleScan) -> tuple[bool, bool]:
    """Can samples of different sizes be in a batch, and are they padded to the largest?"""
    try:
        mixed = _collated(loader, [scan.typical, scan.longest])
        alone = _collated(loader, [scan.longest, scan.longest])
    except Exception:  # the user's collate function: it may want one size
        return False, False
    elements = ({path: math.prod(shape) for path, shape in each.items()} for each in (mixed, alone))
    some, all_ = elements
    return True, all(some.get(path, 0) >= count for path, count in all_.items())


def _collated(loader: DataLoader[Any], keys: Sequence[int]) -> Shapes:
    with _own_randomness():
        if not private.makes_batches(loader):  # its samples are batches
            return shapes_of(_sample(loader, keys[0]))
        return shapes_of(loader.collate_fn([_sample(loader, key) for key in keys]))


def _stacks(loader: DataLoader[Any], sample: Any) -> bool:
    """Does the collate function refuse samples of different sizes?

    It is given ``sample`` together with one of which a part is cut to half its length; texts, which
    may be names, are left.
    """
    if not private.makes_batches(loader) or (_batch_size(loader) or 1) == 1:
        return False
    shapes = shapes_of(sample)
    lengths = [(axis, shape[axis]) for shape in shapes.values() if shape
               for axis in (0, -1) if shape[axis] > 1]  # fmt: skip
    is_cut = False
    try:
        loader.collate_fn([sample, copy.copy(sample)])
    except Exception:  # the user's collate function: it tells nothing then
        return False
    for axis, length in list(dict.fromkeys(lengths))[:_CUTS]:
        cut = _cut(sample, axis, length, DEPTH)
        if shapes_of(cut) == shapes:
            continue
        is_cut = True
        try:
            loader.collate_fn([sample, cut])
        except Exception:  # as it was hoped for
            continue
        return False
    return is_cut or not lengths


def _cut(value: Any, axis: int, length: int, depth: int) -> Any:
    """``value`` with half of all that has this ``length`` along ``axis``."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if not value.ndim or value.shape[axis] != length:
            return value
        return value[: length // 2] if axis == 0 else value[..., : length // 2]
    if depth and isinstance(value, Mapping):
        return {key: _cut(part, axis, length, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, list | tuple):
        if isinstance(value, list) and len(value) == length:
            return value[: length // 2]
        parts = [_cut(part, axis, length, depth - 1) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def repeated(loader: DataLoader[Any], sample: SampleOverride, samples: int) -> Any:
    """A batch of so many samples, made of those that ``sample`` says, as ``loader`` would collate
    it."""
    with _own_randomness():
        if not private.makes_batches(loader):
            return loader.collate_fn(_sample(loader, sample.key))
        if sample.whole:
            keys = list(sample.largest)
        else:
            keys = [*sample.largest, *[sample.key] * samples][:samples]
        made = {key: _sample(loader, key) for key in dict.fromkeys(keys)}
        batch = [copy.copy(made[key]) for key in keys]
        if sample.padded is not None and samples > max(len(sample.largest), 1):
            batch[-1] = _sample(loader, sample.padded)
        batch = loader.collate_fn(batch)
    return private.pinned(batch) if loader.pin_memory else batch


# ---
# The data set.


def _epoch(loader: DataLoader[Any]) -> tuple[list[list[int]], bool]:
    """The batches of an epoch, as the keys of their samples; are they all?"""
    if not private.makes_batches(loader):
        keys = list(itertools.islice(loader.sampler, _MOST + 1))
        return [[key] for key in keys[:_MOST]], len(keys) <= _MOST
    found: list[list[Any]] = []
    count = 0
    with _own_randomness():
        # Some go on for ever, and have no length to be asked whether they are there.
        for batch in () if loader.batch_sampler is None else loader.batch_sampler:
            found.append([int(key) if isinstance(key, np.integer) else key for key in batch])
            count += len(found[-1])
            if max(count, len(found)) > _MOST:
                return found, False
    return found, True


def _is_random(loader: DataLoader[Any]) -> bool:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return isinstance(sampler, RandomSampler | WeightedRandomSampler)


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def _sample(loader: DataLoader[Any], key: int) -> Any:
    random.seed(key)
    np.random.seed(key % (1 << 32))
    torch.default_generator.manual_seed(key)
    if not private.makes_batches(loader):
        return loader.dataset[key]
    return private.MapFetcher(loader.dataset, True, list, False).fetch([key])[0]


def cannot_look(error: Exception | None) -> str:
    """Why nothing is known of a data set's samples: what it raised."""
    what = "" if error is None else f" ({type(error).__name__}: {error})".partition("\n")[0]
    return f"its samples cannot be looked at{what}"


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
