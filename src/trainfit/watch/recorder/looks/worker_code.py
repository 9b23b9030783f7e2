"""What a DataLoader's workers leave for the header of the run, each in a file of its own."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.runs.watched import GrowingVariable, StackLooks
from trainfit.watch.recorder.first_batches import FirstBatches

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
    found = []
    for path in stem.parent.glob(f"{stem.name}.code.*"):
        with contextlib.suppress(OSError, ValueError, DecodingError):
            found.append(decode(WorkerCode, json.loads(path.read_text(encoding="utf-8"))))
    return found


def growing(parts: Iterable[WorkerCode]) -> tuple[GrowingVariable, ...]:
    """The growing variables of all workers, the largest of each name."""
    found: dict[str, GrowingVariable] = {}
    for each in (each for part in parts for each in part.growing):
        known = found.get(each.name)
        if known is None or each.last_size > known.last_size:
            found[each.name] = each
    return tuple(found.values())


def threads_set_at(parts: Iterable[WorkerCode]) -> str:
    """The line that set PyTorch's threads in a worker."""
    return next((each.threads_at for each in parts if each.threads_at), "")


def slowest(parts: Iterable[WorkerCode]) -> dict[str, float]:
    """The slowest samples of all workers."""
    seconds: collections.Counter[str] = collections.Counter()
    for part in parts:
        seconds.update(part.slow_samples)
    return dict(seconds.most_common(MOST_SLOW))


def bad_samples(parts: Iterable[WorkerCode]) -> dict[str, float]:
    """Samples of all workers that are not finite, with when each was made first."""
    found: dict[str, float] = {}
    for name, at in (each for part in parts for each in part.bad_samples.items()):
        found[name] = min(at, found.get(name, at))
    return found
