"""More workers than the training needs, which cost it cores or memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView, median
from trainfit.watch.rules.input.fetching import Fetching, is_measured
from trainfit.watch.rules.rule import Rule

KIND: Final = "too_many_workers"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    fetching = Fetching(rank)
    usable = checks.usable_cores(rank.header)
    workers = (fetching.workers or 0) * max(1, checks.local_ranks(rank))
    if few or not is_measured(rank) or not workers:
        return
    if usable is None:
        yield Unknown(KIND, "the usable cores are not known", "the machine's samples")
        return
    value = _value(fetching, usable)
    if value >= (fetching.workers or 0):
        return
    evidence = list(_harm(fetching, usable, workers))
    if not evidence:
        return
    yield Finding(
        KIND,
        "warning" if workers > usable else "info",
        f"{fetching.workers} workers are more than the training needs",
        (
            Evidence("workers on this machine", float(workers)),
            Evidence("workers that are needed", float(fetching.needed_workers or value)),
            Evidence("usable cores", usable, "cores"),
            *evidence,
        ),
        "Workers beyond what cores or training can use take turns on the cores, and each holds "
        "its own copies of data in RAM",
        f"set num_workers={value}",
        "likely",
        settings={"num_workers": str(value)},
    )


def _value(fetching: Fetching, usable: float) -> int:
    """As many as are needed and have cores, next to the process that trains."""
    ranks = max(1, checks.local_ranks(fetching.rank))
    most = max(1, int(usable / ranks) - 1)
    needed = fetching.needed_workers
    return most if needed is None else min(needed + 1, most)


def _harm(fetching: Fetching, usable: float, workers: int) -> Iterator[Evidence]:
    """What the surplus costs; nothing where idle workers do no harm."""
    rank, needed = fetching.rank, fetching.needed_workers
    crowded = checks.is_crowded(rank) and checks.are_workers_the_crowd(rank)
    crowded = crowded and checks.threads_of_worker(rank) <= 1
    if workers > usable and crowded and not gpu_time.is_kept_busy(rank):
        yield Evidence("threads that want to run", median(rank.machine["runnable"]) or 0.0)
        switches = checks.switches_per_s(rank)
        if switches is not None:
            yield Evidence("involuntary context switches", switches, "1/s")
    fine = checks.share_of(rank, fetching.lost) <= thresholds.INPUT_FINE
    spare = needed is not None and (fetching.workers or 0) >= thresholds.SPARE_WORKERS * needed
    if not (fine and spare):
        return
    held, total = _ram_of_workers(fetching), rank.header.ram_bytes
    free = median(rank.machine["ram_available_bytes"])
    if held and total and free is not None:
        scarce = free < thresholds.RAM_AVAILABLE * total
        if scarce and held >= thresholds.RAM_OF_WORKERS * total:
            yield Evidence("RAM of the workers", held, "bytes")
            yield Evidence("RAM that is available", free, "bytes")
    if workers > usable:
        yield Evidence("lost by waiting for batches", checks.share_of(rank, fetching.lost))


def _ram_of_workers(fetching: Fetching) -> float | None:
    rows = fetching.rank.workers
    rows = rows[rows["rss_bytes"] >= 0]
    return median(checks.by_time(rows, "rss_bytes"))


RULE: Final = Rule((KIND,), _look, each_rank=True)
