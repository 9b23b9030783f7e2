"""The first batches of a DataLoader: their sizes, and whether their shapes vary."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

#: Batches that are looked at, and parts of each.
_BATCHES: Final = 64
_PARTS: Final = 200
#: Containers within one another that are looked into.
_DEPTH: Final = 6


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
            parts = itertools.islice(_tensors_of(batch), _PARTS)
            shapes = tuple(tuple(part.shape) for part in parts)
            self.varies |= self._first is not None and shapes != self._first
            self._first = shapes


def _tensors_of(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors in a batch or a sample, through containers and plain objects."""
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = list(vars(value).values())
    if depth:
        for part in itertools.islice(parts, _PARTS):
            yield from _tensors_of(part, depth - 1)
