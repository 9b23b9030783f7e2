"""Rules about what DataLoader workers copy: open files, random generators, a data set that each of
them iterates whole.

The recorder looks in the workers' first batches (:mod:`trainfit.watch.recorder.first_batches`);
`trainfit loader` finds the same by trying it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.findings import fixes
from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.results.runs.watched import GLOBAL_GENERATORS
from trainfit.watch import checks
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RunView


def _find_copies(view: RunView) -> Iterator[Finding | Unknown]:
    """Each is said whatever it costs: it spoils what is learned, or crashes one day."""
    rank = view.judged
    copies, settings = rank.header.copies, checks.loader_settings(rank.header)
    place = checks.loader_place(rank.header)
    if copies.handles and settings is not None and settings.start_method == "fork":
        path, kind = next(iter(copies.handles.items()))
        others = len(copies.handles) - 1
        more = f" and {others} more are" if others else " is"
        yield Finding(
            "shared_handle",
            "warning",
            f"{path} ({kind}){more} opened before the workers start",
            (Evidence("open files and connections", float(len(copies.handles))),),
            "Forked workers share its position and caches: one reads what another asked for",
            (Fix(fixes.OPEN_IN_WORKER),),
            "likely",
            place=place,
        )
    for paths, what in (
        (copies.by_workers, "each worker draws the same random numbers"),
        (copies.by_epochs, "each epoch draws the same random numbers again"),
    ):
        if paths:
            yield _of_generators(paths, what, copies.workers)
    if copies.same_batches:
        yield Finding(
            "iterable_not_sharded",
            "critical",
            "Each worker yields all samples: an epoch repeats them once per worker",
            (Evidence("workers", float(copies.workers)),),
            "The first batches of two workers are the same, and differ from one another",
            (Fix(fixes.SHARD_BY_WORKER),),
            "likely",
            place=place,
        )
    if 0 < copies.empty < copies.workers:
        fed = copies.workers - copies.empty
        yield Finding(
            "empty_workers",
            "warning",
            f"{fed} of {copies.workers} workers get samples: the data set has no more shards",
            (Evidence("workers that ended without a sample", float(copies.empty)),),
            "A worker without a shard makes no batch, and needs memory",
            (Fix(fixes.MORE_SHARDS, settings={"num_workers": str(fed)}),),
            "likely",
            place=place,
        )


def _of_generators(paths: Sequence[str], what: str, workers: int) -> Finding:
    is_global = paths[0] in GLOBAL_GENERATORS
    begins = "is seeded alike by worker_init_fn" if is_global else "is copied into the workers"
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Finding(
        "generator_copied",
        "warning",
        f"{paths[0]}{more} {begins}: {what}",
        (Evidence("workers", float(workers)),),
        f"{', '.join(paths)}: two workers began with one state and drew from it",
        (Fix(fixes.SEED_OF_WORKER if is_global else fixes.GENERATOR_IN_WORKER),),
        "certain",
    )


COPIES: Final = Rule(
    ("shared_handle", "generator_copied", "iterable_not_sharded", "empty_workers"),
    _find_copies,
    each_rank=True,
)
RULES: Final = (COPIES,)
