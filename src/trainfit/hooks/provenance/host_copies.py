"""Copies of the GPU's tensors in the host's memory that outlive the step which made them."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import called_by_user

#: Bytes that a step adds, from which 1,000 steps are worth a word: 4 GiB.
_LARGE: Final = 4 << 20
#: Earlier steps whose copies live.
_STEPS: Final = 2
#: Copies of a line that are remembered, and lines.
_MOST: Final = 256
_LINES: Final = 16


class HostCopies:
    """Follows what ``.cpu()`` gives; ``place`` gives the line that is running, ``steps`` how many
    the first of the optimizers has begun."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._known: dict[str, list[tuple[int, int, weakref.ref[Any]]]] = {}
        self._is_copying = False
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Bytes that each step adds, and the line that copies them."""
        if self._found is not None:
            yield self._found

    def copying(self, source: torch.Tensor) -> None:
        """``source.cpu()`` is called."""
        is_asked = self._found is None and bool(self._steps())
        self._is_copying = is_asked and source.is_cuda and called_by_user()

    def copied(self, copy: Any) -> None:
        """``source.cpu()`` gave a copy."""
        is_copied, self._is_copying = self._is_copying, False
        if not is_copied or not isinstance(copy, torch.Tensor):
            return
        place = self._place() or ""
        if place and (place in self._known or len(self._known) < _LINES):
            mine = self._known.setdefault(place, [])
            mine.append((self._steps(), copy.nbytes, weakref.ref(copy)))
            del mine[:-_MOST]

    def looked(self) -> None:
        """A step that is looked at is about to use its gradients."""
        now = self._steps()
        for place, mine in self._known.items() if self._found is None else ():
            alive = [(step, size, it) for step, size, copy in mine if (it := copy()) is not None]
            steps = {step for step, _, _ in alive if step < now}
            per_step = sum(size for step, size, _ in alive if step < now) // max(1, len(steps))
            if len(steps) >= _STEPS and per_step >= _LARGE and not _is_bounded(alive[0][2], mine):
                self._found = Misuse.of("host_copies_kept", per_step, place=place)


def _is_bounded(tensor: Any, known: Any) -> bool:
    """Is it in a container that keeps so many and no more?"""
    level = [tensor]
    for _ in range(3):
        holders = [
            each
            for each in gc.get_referrers(*level)
            if isinstance(each, list | tuple | dict | deque) and each is not known
        ]
        if any(isinstance(each, deque) and each.maxlen is not None for each in holders):
            return True
        level = [each for each in holders if isinstance(each, tuple | dict)][:8]
        if not level:
            return False
    return False
