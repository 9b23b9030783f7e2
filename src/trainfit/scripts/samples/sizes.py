"""Sizes of a data set's samples, part by part: which parts vary, which samples are the largest.

Totals hide it, where an image has 300,000 numbers and its boxes 1,200: each part of a sample counts
by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

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
    found: Shapes = {}
    for path, shape in itertools.islice(_parts(sample, "", DEPTH), _PARTS):
        before = found.get(path)
        found[path] = shape if before is None else (math.prod(before) + math.prod(shape),)
    return found


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
            if any(each.get(path) != first.get(path) for each in shapes)
        ]
        rows = [[math.prod(each.get(path, (0,))) for path in varying] for each in shapes]
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
            for dimension in _dimensions([each.get(path, ()) for each in shapes])
        ]
        columns.sort(key=lambda column: -column.max() / max(float(np.median(column)), 1.0))
        found = [int(self.relative.argmax()), *(int(column.argmax()) for column in columns)]
        # One that is the largest in something already stands for those that are as large there.
        kept: list[int] = []
        for at, column in zip(found, [self.relative, *columns], strict=True):
            if not kept or column[at] > max(column[each] for each in kept):
                kept.append(at)
        return iter([self.keys[at] for at in kept[:_LARGEST]])

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
