"""Reserved memory far above what tensors hold: fragmentation, or one large moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.ledger import peak_share
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.rule import Rule

_GIB: Final = 2**30


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of the judged rank, at the peaks of both."""
    steps = run.judged.record.steps
    reserved, peak = known(steps["reserved_bytes"]), known(steps["peak_allocated_bytes"])
    if not len(reserved) or not len(peak) or not peak.max():
        return
    ratio, share = float(reserved.max() / peak.max()), peak_share(run.judged)
    if ratio < thresholds.RESERVED_RATIO or (share or 0.0) < thresholds.RESERVED_SHARE:
        return
    yield Finding(
        "reserved_above_allocated",
        "warning",
        "PyTorch reserves far more memory than tensors hold",
        (
            Evidence("reserved at the peak", float(reserved.max()) / _GIB, "GiB"),
            Evidence("allocated at the peak", float(peak.max()) / _GIB, "GiB"),
        ),
        "free blocks of the caching allocator do not fit the requested sizes: batches of "
        "changing shapes leave such blocks",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad batches to a few lengths",
        "likely",
        settings={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )


RULE: Final = Rule(("reserved_above_allocated",), look, each_rank=True)
