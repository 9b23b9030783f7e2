"""Each epoch begins with a wait: workers are started, and import and read, from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.run import WatchedLoader
from trainfit.results.watch.tables import EPOCH_START
from trainfit.watch import gpu_time
from trainfit.watch.rules import checks, thresholds
from trainfit.watch.rules.input.fetching import is_measured
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RunView

KIND: Final = "epoch_start"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.first
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few or not is_measured(rank):
        return
    loader = checks.training_loader(rank.header)
    if loader is None or not loader.num_workers:
        return
    lost = gpu_time.epoch_start_lost(rank)
    share = checks.share_of(rank, lost)
    starts = (rank.steps["flags"] & EPOCH_START) != 0
    if share < thresholds.NOTICEABLE:
        return
    count = int(starts.sum())
    if count < thresholds.LEAST_EVENTS:
        yield Unknown(KIND, "only one epoch began while it was watched", "watch two epochs")
        return
    wait = float(np.median(lost[starts]))
    yield Finding(
        KIND,
        checks.severity(share),
        f"The start of an epoch takes {wait:.2g} s, {checks.in_percent(share)} of the time",
        (
            Evidence("wait at the start of an epoch", wait, "s"),
            Evidence("epochs that began", float(count)),
            Evidence("steps between them", len(rank.steps) / count),
        ),
        *_remedy(loader),
        "certain" if not loader.persistent_workers else "likely",
        share,
        {} if loader.persistent_workers else {"persistent_workers": "True"},
    )


def _remedy(loader: WatchedLoader) -> tuple[str, str]:
    if loader.persistent_workers:
        return (
            "With each epoch the queue of ready batches begins empty",
            "make epochs longer: a sampler that goes through the data several times",
        )
    return (
        f"Each epoch starts {loader.num_workers} worker processes again",
        "set persistent_workers=True",
    )


RULE: Final = Rule((KIND,), _look)
