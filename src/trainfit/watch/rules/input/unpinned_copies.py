"""Copies to the GPU come from pageable memory: slower, and the host waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Finding, Unknown
from trainfit.watch.figures import checks, copying, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "unpinned_copies"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    lost = copying.lost(rank)
    if few or lost is None:
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    unpinned = copying.unpinned_share(rank)
    if unpinned is None:
        yield Unknown(
            KIND, "whether copies came from pinned memory was not recorded", "unpinned_bytes"
        )
        return
    if unpinned < thresholds.UNPINNED:
        return
    loader = checks.training_loader(rank.header)
    pins = loader is not None and loader.pin_memory
    yield Finding(
        KIND,
        severity(share),
        f"Copies from pageable memory take {checks.in_percent(share)} of the time",
        copying.evidence(rank, lost),
        "The GPU cannot read pageable memory itself: the driver copies it into a buffer first, "
        "and the host waits",
        "pin what is copied outside the DataLoader: tensor.pin_memory(); and copy with "
        "non_blocking=True"
        if pins
        else "set pin_memory=True in the DataLoader and copy with non_blocking=True",
        "likely",
        share,
        {} if pins else {"pin_memory": "True"},
        "batch = batch.to(device, non_blocking=True)",
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
