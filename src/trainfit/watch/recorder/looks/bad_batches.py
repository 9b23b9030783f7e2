"""Batches that have a number which is not finite, and the sample that it is of.

Workers look at their batches themselves, as many as cost next to nothing, and all of them once the
loss is not finite. Where the training process makes small batches itself, the last few are kept:
of short steps the loss is looked at some milliseconds late.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trainfit.results.runs.learning import Misuse

#: Of the time that batches need, what a worker's looks may cost (CPU).
_SHARE: Final = 0.005
#: Samples that are told of, levels and entries of a batch that are looked at.
_MOST: Final = 8
_DEPTH: Final = 3
_ENTRIES: Final = 16
#: Batches that the training process keeps, and bytes of each at most: 2 MiB in all.
_KEPT: Final = 16
_SMALL: Final = 1 << 17
#: Batches that tell how the data usually are.
_FIRST: Final = 32
#: Of the batches that are kept, those that are so from which that is how the data are.
_USUAL: Final = 0.5


def bad_in(batch: Any) -> tuple[str, int] | None:
    """The part of a batch that has a NaN or an infinity ("[0]", "['x']"), and its first row which
    has one; ``None``: none has, of floating-point tensors on the CPU."""
    with torch.no_grad():
        for path, tensor in _tensors(batch):
            # One pass over it: what is not finite stays so in the sum.
            if bool(torch.isfinite(tensor.sum())):
                continue
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                return path, int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
    return None


def _tensors(value: Any, path: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    kind = type(value)
    if kind is torch.Tensor:
        of_cpu = value.device.type == "cpu" and value.layout is torch.strided and value.dim()
        if of_cpu and value.dtype in (torch.float32, torch.float64):
            yield path, value
    elif depth and issubclass(kind, Mapping | list | tuple):
        is_map = issubclass(kind, Mapping)
        parts = value.items() if is_map else enumerate(value[:_ENTRIES])
        for (key, part), _ in zip(parts, range(_ENTRIES), strict=False):
            yield from _tensors(part, f"{path}[{key!r}]", depth - 1)


def _named(index: Any, bad: tuple[str, int]) -> str:
    """ "sample 20017, batch[0]"; of a data set that is iterated "row 3 of a batch, batch[0]"."""
    path, row = bad
    numbers = index if isinstance(index, list | tuple) else ()
    known = row < len(numbers) and numbers[row] is not None
    which = f"sample {numbers[row]}" if known else f"row {row} of a batch"
    return f"{which}, batch{path}"


class WorkerBatches:
    """Batches of a worker that are looked at: :attr:`found` has the samples, and when each was
    made.

    ``asked`` is a file that the training process makes when its loss is not finite.
    """

    def __init__(self, asked: Path) -> None:
        self.found: dict[str, float] = {}
        self._asked, self._every = asked, False
        self._spent_s = self._made_s = 0.0

    def look_for_question(self) -> None:
        """Shall all batches be looked at?"""
        self._every = self._every or self._asked.exists()

    def made(self, batch: Any, index: Any, seconds: float, at: float) -> None:
        """A batch was made, in so long, at a time of the run."""
        self._made_s += seconds
        is_due = self._every or self._spent_s <= _SHARE * self._made_s
        if not is_due or len(self.found) >= _MOST:
            return
        began = time.thread_time()
        with contextlib.suppress(Exception):  # a batch may be of anything
            if (bad := bad_in(batch)) is not None:
                self.found.setdefault(_named(index, bad), at)
        self._spent_s += time.thread_time() - began


class KeptBatches:
    """The last batches that the training process has made itself, of light steps."""

    def __init__(self) -> None:
        self._last: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=_KEPT)
        self.add: Callable[[tuple[Any, Any]], None] = self._last.append
        """One of a light step, after its index."""
        self._usual, self._looks = False, 0
        self.keeps = False
        """Are batches small enough?"""

    def looked_at(self, batch: Any, nbytes: int) -> None:
        """One of a step in detail: are batches small, and usually finite?"""
        is_small = 0 < nbytes <= _SMALL
        if is_small and not self._usual and self._looks < _FIRST:
            self._looks += 1
            with contextlib.suppress(Exception):
                self._usual = bad_in(batch) is not None
        self.keeps = is_small and not self._usual
        if self._last:
            self._last.clear()

    def first_bad(self) -> Misuse | None:
        """The loss is not finite: the sample in them that may have made it so."""
        kept = list(self._last)
        found = []
        with contextlib.suppress(Exception):
            found = [(index, bad) for index, each in kept if (bad := bad_in(each)) is not None]
        if not found or len(found) > _USUAL * len(kept):
            return None
        return Misuse("sample_not_finite", (_named(*found[0]),))


def question(stem: Path) -> Path:
    """The file that asks workers of a rank, whose files begin with ``stem``, to look at all."""
    return stem.with_name(f"{stem.name}.asked.batches")
