"""Each epoch begins with a wait: workers are started, and import and read, from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Confidence, Evidence, Finding, Unknown
from trainfit.results.watch.run import WatchedLoader
from trainfit.results.watch.tables import EPOCH_START
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.input.fetching import is_measured
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "epoch_start"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few or not is_measured(rank):
        return
    loader = checks.training_loader(rank.header)
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
        severity(share),
        f"The start of an epoch costs {wait:.2g} s, {checks.in_percent(share)} of the time",
        (
            Evidence("wait at the start of an epoch", wait, "s"),
            Evidence("epochs that began", float(count)),
            Evidence("steps between them", len(rank.steps) / count),
        ),
        *_remedy(loader),
        _confidence(loader),
        share,
        {"persistent_workers": "True"} if _starts_workers(loader) else {},
    )


def _starts_workers(loader: WatchedLoader | None) -> bool:
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def _confidence(loader: WatchedLoader | None) -> Confidence:
    if loader is None:
        return "possible"
    return "certain" if _starts_workers(loader) else "likely"


def _remedy(loader: WatchedLoader | None) -> tuple[str, str]:
    if loader is not None and _starts_workers(loader):
        return (
            f"Each epoch restarts {loader.num_workers} worker processes",
            "set persistent_workers=True",
        )
    if loader is not None and loader.num_workers:
        return (
            "Each epoch starts with an empty queue of batches",
            "make epochs longer: a sampler that goes through the data several times",
        )
    return (
        "In each epoch the DataLoader's iterator, its order of samples and its first batch are "
        "created while the training waits",
        "make epochs longer, or keep the workers: num_workers=1 or more with "
        "persistent_workers=True",
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
