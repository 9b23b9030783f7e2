"""What a worker's first batches tell of the copy of the data set that it was given.

That is looked at in the worker, once: what its data set holds open before it has made a sample,
random generators with their states, and digests of batches of a data set that is iterated. The
training process compares what the workers have left.

What a DataLoader's workers leave for the header of the run, each in a file of its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainfit.hooks.held_objects import all_generators, digest, open_handles, state_of
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.runs.watched import GrowingVariable, StackLooks, WorkerCopies

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
    handles = {path: kind for worker in workers for path, kind in worker.handles.items()}
    return WorkerCopies(
        handles,
        *_alike_generators(workers),
        _alike_batches(workers),
        len({worker.worker for worker in workers if worker.is_empty}),
        len({worker.worker for worker in workers}),
    )


def _alike_generators(
    workers: Iterable[FirstBatches],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of those that began alike in different workers, and of others that did in workers of
    one number, one after the other: in each epoch."""
    began: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for worker in workers:
        for path, state in worker.generators.items():
            began[path, state].append(worker.worker)
    by_workers = {path for (path, _), numbers in began.items() if len(set(numbers)) > 1}
    by_epochs = {path for (path, _), numbers in began.items() if len(set(numbers)) < len(numbers)}
    return tuple(sorted(by_workers)), tuple(sorted(by_epochs - by_workers))


def _alike_batches(workers: Iterable[FirstBatches]) -> bool:
    """Have two workers begun with the same batches, which differ from one another?"""
    seen: dict[str, int] = {}
    for worker in workers:
        if len(set(worker.batches)) < 2:
            continue
        both = hashlib.blake2b("".join(worker.batches[:2]).encode()).hexdigest()
        if seen.setdefault(both, worker.worker) != worker.worker:
            return True
    return False


#: Samples that are told of, those that took longest.
MOST_SLOW: Final = 20


@dataclasses.dataclass(frozen=True)
class WorkerCode:
    """What a worker leaves for the header: lines of the data set, and samples that took long."""

    looks: StackLooks
    slow_samples: Mapping[str, float]
    first: FirstBatches | None = None
    growing: tuple[GrowingVariable, ...] = ()
    threads_at: str = ""
    bad_samples: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Samples with a number that is not finite, and when they were made (seconds of the run)."""


def told_by_workers(stem: Path) -> list[WorkerCode]:
    """What the workers of a rank have left so far."""
    code = []
    for path in stem.parent.glob(f"{stem.name}.code.*"):
        with contextlib.suppress(OSError, ValueError, DecodingError):
            code.append(decode(WorkerCode, json.loads(path.read_text(encoding="utf-8"))))
    return code


def growing(parts: Iterable[WorkerCode]) -> tuple[GrowingVariable, ...]:
    """The growing variables of all workers, the largest of each name."""
    found: dict[str, GrowingVariable] = {}
    for variable in (growing_variable for part in parts for growing_variable in part.growing):
        known = found.get(variable.name)
        if known is None or variable.last_size > known.last_size:
            found[variable.name] = variable
    return tuple(found.values())


def threads_set_at(parts: Iterable[WorkerCode]) -> str:
    """The line that set PyTorch's threads in a worker."""
    return next((part.threads_at for part in parts if part.threads_at), "")


def slowest(parts: Iterable[WorkerCode]) -> dict[str, float]:
    """The slowest samples of all workers."""
    seconds: collections.Counter[str] = collections.Counter()
    for part in parts:
        seconds.update(part.slow_samples)
    return dict(seconds.most_common(MOST_SLOW))


def bad_samples(parts: Iterable[WorkerCode]) -> dict[str, float]:
    """Samples of all workers that are not finite, with when each was made first."""
    samples: dict[str, float] = {}
    for name, at in (each for part in parts for each in part.bad_samples.items()):
        samples[name] = min(at, samples.get(name, at))
    return samples
