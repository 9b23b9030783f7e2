"""Copies to the GPU take much of the step although their memory is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Finding, Unknown
from trainfit.watch.figures import checks, copying, gpu_time, thresholds
from trainfit.watch.figures.view import RunView
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "copies"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not gpu_time.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    lost, unpinned = copying.lost(rank), copying.unpinned_share(rank)
    if lost is None:
        yield Unknown(KIND, "copies to the GPU were not measured", "copy_s or gpu_copy_s")
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    if unpinned is not None and unpinned >= thresholds.UNPINNED:
        return  # unpinned_copies says it
    yield Finding(
        KIND,
        severity(share),
        f"Copies to the GPU take {checks.in_percent(share)} of the time",
        copying.evidence(rank, lost),
        "The GPU computes nothing while its stream copies a batch",
        "copy the next batch in a stream of its own while this one is computed, and copy less: "
        "uint8 images, normalized on the GPU; tensors made there",
        "likely" if unpinned is not None else "possible",
        share,
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
