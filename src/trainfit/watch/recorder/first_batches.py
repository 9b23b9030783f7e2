"""What a worker's first batches tell of the copy of the data set that it was given.

That is looked at in the worker, once: what its data set holds open before it has made a sample,
random generators with their states, and digests of batches of a data set that is iterated. The
training process compares what the workers have left.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from trainfit.hooks.digests import digest
from trainfit.hooks.held_objects import all_generators, open_handles, state_of
from trainfit.results.runs.watched import WorkerCopies

#: Batches whose digests are left, and the bytes of each at most: a worker hashes 1 GB/s.
_BATCHES: Final = 3
_MOST_BYTES: Final = 4 << 20


@dataclasses.dataclass(frozen=True)
class FirstBatches:
    """The first batches of a worker: ``handles`` were open when it began (path → type);
    ``generators`` were drawn from by its first batch, with digests of the states that they began
    in; ``batches`` are digests of its first ones, where it iterates the data set; ``is_empty``: it
    came to its end without."""

    worker: int
    handles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    generators: Mapping[str, str] = dataclasses.field(default_factory=dict)
    batches: tuple[str, ...] = ()
    is_empty: bool = False


class FirstLook:
    """A look at one worker, before and after each of its first batches.

    ``inherited``: what is open before the first one was before the worker began.
    """

    def __init__(
        self, worker: int, dataset: Any, *, iterates: bool, inherited: bool = True
    ) -> None:
        self._dataset, self._iterates = dataset, iterates
        self._states = {path: state_of(each) for path, each in all_generators(dataset).items()}
        self._made = 0
        self.found = FirstBatches(worker, handles=open_handles(dataset) if inherited else {})

    @property
    def is_over(self) -> bool:
        """Is there nothing more to look at?"""
        return self._made >= (_BATCHES if self._iterates else 1)

    def made(self, batch: Any, nbytes: int) -> None:
        """A batch is there. (A thread may write what was found as soon as it is all there.)"""
        if not self._made:
            now = all_generators(self._dataset)
            drawn = {
                path: state
                for path, state in self._states.items()
                if path in now and state_of(now[path]) != state
            }
            self.found = dataclasses.replace(self.found, generators=drawn)
        if self._iterates and nbytes <= _MOST_BYTES and (told := digest(batch)) is not None:
            batches = (*self.found.batches, told)
            self.found = dataclasses.replace(self.found, batches=batches)
        self._made += 1

    def ended(self) -> None:
        """The data set has no more samples for it."""
        if not self._made:
            self.found = dataclasses.replace(self.found, is_empty=True)


def compared(workers: Sequence[FirstBatches]) -> WorkerCopies:
    """What the workers have in common that each should have for itself."""
    handles = {path: kind for each in workers for path, kind in each.handles.items()}
    return WorkerCopies(
        handles,
        *_alike_generators(workers),
        _alike_batches(workers),
        len({each.worker for each in workers if each.is_empty}),
        len({each.worker for each in workers}),
    )


def _alike_generators(
    workers: Iterable[FirstBatches],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of those that began alike in different workers, and of others that did in workers of
    one number, one after the other: in each epoch."""
    began: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for each in workers:
        for path, state in each.generators.items():
            began[path, state].append(each.worker)
    by_workers = {path for (path, _), numbers in began.items() if len(set(numbers)) > 1}
    by_epochs = {path for (path, _), numbers in began.items() if len(set(numbers)) < len(numbers)}
    return tuple(sorted(by_workers)), tuple(sorted(by_epochs - by_workers))


def _alike_batches(workers: Iterable[FirstBatches]) -> bool:
    """Have two workers begun with the same batches, which differ from one another?"""
    seen: dict[str, int] = {}
    for each in workers:
        if len(set(each.batches)) < 2:
            continue
        both = hashlib.blake2b("".join(each.batches[:2]).encode()).hexdigest()
        if seen.setdefault(both, each.worker) != each.worker:
            return True
    return False
