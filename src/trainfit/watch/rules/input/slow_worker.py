"""One worker is slower than the others, which all wait for their turn behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.input.fetching import Fetching, is_measured
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "slow_worker"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few or not is_measured(rank):
        return
    fetching = Fetching(rank)
    if checks.share_of(rank, fetching.lost) < thresholds.NOTICEABLE:
        return
    if (fetching.workers or 0) >= 2 and not len(rank.fetches):
        yield Unknown(KIND, "the workers' batches were not recorded", "rows of fetches")
    slow, lost = fetching.slow_worker, fetching.lost_in_turns
    share = checks.share_of(rank, lost)
    if slow is None or share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    ratio = slow.fetch_s / slow.others_s if slow.others_s else float(slow.fetch_s > 0)
    yield Finding(
        KIND,
        severity(share),
        f"Worker {slow.worker} needs {ratio:.1f} times as long for a batch as the others",
        (
            Evidence(f"a batch in worker {slow.worker}", slow.fetch_s, "s"),
            Evidence("a batch in the others", slow.others_s, "s"),
            Evidence("time lost", share * rank.seconds / len(rank.steps), "s/step"),
        ),
        "A DataLoader gives batches in the order of its workers: all wait for the slowest one",
        "look at what this worker reads: an uneven shard of an IterableDataset, a slow disk, or "
        "a core that it shares; DataLoader(in_order=False) lets the others go ahead",
        "likely",
        share,
        {"in_order": "False"},
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
