"""Libraries' threads in a worker, and whether a batch starts any.

After a fork a library's threads are gone until they are used again: what a worker has more
after a batch than before works in it, unlike most pools.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfit.loader.measure import isolated
from trainfit.loader.measure.library_threads import native_threads, pools
from trainfit.loader.measure.workload import Workload
from trainfit.results.loader import LoaderSettings


@dataclass(frozen=True)
class WorkerThreads:
    """``pools``: threads by library, only those above one; ``started``: how many a batch started,
    ``None`` where that is not told."""

    pools: Mapping[str, int] = field(default_factory=dict)
    started: int | None = None


def worker_threads(workload: Workload, limit_s: float = 5.0) -> WorkerThreads:
    """Once a batch was made as in a worker.

    Empty where no batch could be made in ``limit_s`` seconds: other parts of a probe say why.
    """
    ended = isolated.call(functools.partial(_after_a_batch, workload), limit_s)
    return ended.value or WorkerThreads()


def _after_a_batch(workload: Workload) -> WorkerThreads:
    before = native_threads()
    next(iter(workload.loader(LoaderSettings(0))), None)
    after = native_threads()
    started = None if before is None or after is None else max(0, after - before)
    return WorkerThreads(pools(), started)
