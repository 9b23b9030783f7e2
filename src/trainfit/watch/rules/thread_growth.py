"""Threads that a script starts, and that do not end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RunView

KIND: Final = "thread_growth"
#: Threads that must have come, more than one pool has by default (32 of ThreadPoolExecutor's, and
#: those of libraries), and parts of the run in each of which there must be more of them.
_MORE_THREADS: Final = 48
_PARTS: Final = 4


def _find_threads(run: RunView) -> Iterator[Finding | Unknown]:
    rows = run.judged.main_process
    counts = rows["threads"][rows["threads"] > 0]
    if len(counts) < 2 * _PARTS:
        return
    parts = [float(np.median(part)) for part in np.array_split(counts, _PARTS)]
    first, last = int(counts[0]), int(counts[-1])
    grows = all(later > before for before, later in itertools.pairwise(parts))
    if not grows or last - first < _MORE_THREADS:
        return
    seconds = float(rows["time_s"][-1] - rows["time_s"][0])
    yield Finding(
        KIND,
        "warning",
        f"Threads that the script starts do not end: {first} at first, {last} in the end",
        (Evidence("more of them", 60 * (last - first) / seconds, "1/min"),),
        "Each keeps its stack until it ends, and the system allows only so many: then starting one "
        "more is an error",
        (
            Fix(
                "make a pool once, before the loop, or end it where it is made (with "
                "ThreadPoolExecutor(…) as pool: …, pool.shutdown()); let a thread's function "
                "return, and join() it"
            ),
        ),
        "likely",
    )


THREADS: Final = Rule((KIND,), _find_threads, each_rank=True)
