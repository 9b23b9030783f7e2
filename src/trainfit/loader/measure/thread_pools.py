"""Libraries' threads in a worker, and whether a batch starts any.

After a fork a library's threads are gone until they are used again: what a worker has more
after a batch than before works in it, unlike most pools.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfit.loader.measure.workload import Workload
from trainfit.loader.processes import isolated
from trainfit.results.loader.settings import LoaderSettings
from trainfit.scripts.library_threads import HELD, hold_down_all_but, native_threads, pools


@dataclass(frozen=True)
class WorkerThreads:
    """``pools``: threads by library, only those above one; ``started``: how many a batch started,
    ``None`` where that is not told. ``used``: the pools whose threads these are, ``None`` where
    it was not measured."""

    pools: Mapping[str, int] = field(default_factory=dict)
    started: int | None = None
    used: tuple[str, ...] | None = None


def worker_threads(workload: Workload, limit_s: float = 5.0) -> WorkerThreads:
    """Once a batch was made as in a worker.

    Empty where no batch could be made in ``limit_s`` seconds: other parts of a probe say why.
    """
    began = time.monotonic()
    ended = isolated.call(functools.partial(_after_a_batch, workload), limit_s)
    if ended.value is None:
        return WorkerThreads()
    left_s = limit_s - (time.monotonic() - began)
    return dataclasses.replace(ended.value, used=_used(workload, ended.value, left_s))


def _after_a_batch(workload: Workload, only: str = "") -> WorkerThreads:
    """Threads once a batch was made; with ``only`` that pool has several."""
    if only:
        hold_down_all_but(only)
    before = native_threads()
    next(iter(workload.loader(LoaderSettings(0))), None)
    after = native_threads()
    started = None if before is None or after is None else max(0, after - before)
    return WorkerThreads(pools(), started)


def _used(workload: Workload, seen: WorkerThreads, left_s: float) -> tuple[str, ...] | None:
    """Which pools start threads for a batch when all others have one; ``None``: no time."""
    if seen.started is None:
        return None
    if not seen.started:
        return ()
    known = [name for name in seen.pools if name in HELD]
    used = []
    for at, name in enumerate(known):
        if left_s <= 0:
            return None
        began = time.monotonic()
        make = functools.partial(_after_a_batch, workload, name)
        ended = isolated.call(make, left_s / (len(known) - at))
        left_s -= time.monotonic() - began
        if ended.value is None or ended.value.started is None:
            return None
        if ended.value.started:
            used.append(name)
    return tuple(used)
