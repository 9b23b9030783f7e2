"""Rules about what DataLoader workers copy: open files, random generators, a data set that each of
them iterates whole.

The recorder looks in the workers' first batches (:mod:`trainfit.watch.recorder.first_batches`);
`trainfit loader` finds the same by trying it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from trainfit.findings import worker_copies
from trainfit.results.findings import Finding, Unknown
from trainfit.watch import checks
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RunView


def _find_copies(view: RunView) -> Iterator[Finding | Unknown]:
    """Each is said whatever it costs: it spoils what is learned, or crashes one day."""
    rank = view.judged
    copies, settings = rank.header.copies, checks.loader_settings(rank.header)
    place = checks.loader_place(rank.header)
    found: list[Finding] = []
    if copies.handles and settings is not None and settings.start_method == "fork":
        found.append(worker_copies.shared_handle(copies.handles, "warning", "likely"))
    if copies.same_batches:
        same = "The first batches of two workers are the same, and differ from one another"
        found.append(worker_copies.not_sharded(same, "critical", "likely"))
    if 0 < copies.empty < copies.workers:
        fed = copies.workers - copies.empty
        found.append(
            worker_copies.too_few_shards("empty_workers", fed, copies.workers, "warning", "likely")
        )
    yield from (dataclasses.replace(each, place=place) for each in found)
    for paths, by_workers in ((copies.by_workers, True), (copies.by_epochs, False)):
        if paths:
            yield worker_copies.generator_copied(paths, "warning", by_workers=by_workers)


COPIES: Final = Rule(
    ("shared_handle", "generator_copied", "iterable_not_sharded", "empty_workers"),
    _find_copies,
    each_rank=True,
)
RULES: Final = (COPIES,)
