"""Rules about host-to-device copies: what they cost the training, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.findings.habits import UNPINNED
from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.code_lines import place_of_most
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, known


def unpinned_share(rank: RankView) -> float | None:
    """Of the copied bytes; ``None``: not measured, or none were copied."""
    every, unpinned = rank.steps["copied_bytes"], rank.steps["unpinned_bytes"]
    measured = (every >= 0) & (unpinned >= 0)
    total = float(np.sum(every[measured], dtype=np.float64))
    return float(np.sum(unpinned[measured], dtype=np.float64)) / total if total else None


def evidence(rank: RankView, seconds: checks.Seconds) -> tuple[Evidence, ...]:
    """Seconds and bytes of a step, and the rate."""
    spent = float(np.nanmean(seconds))
    found = [Evidence("copies to the GPU", spent, "s/step")]
    copied = known(rank.steps["copied_bytes"])
    if len(copied):
        found.append(Evidence("copied", float(np.mean(copied)), "bytes/step"))
        if spent > 0:
            found.append(Evidence("rate", float(np.mean(copied)) / spent, "bytes/s"))
    unpinned = unpinned_share(rank)
    if unpinned is not None:
        found.append(Evidence("from pageable memory", unpinned, "of the bytes"))
    return tuple(found)


# ---
# Copies to the GPU take much of the step although their memory is pinned.


_COPIES_KIND: Final = "copies"


def _find_costly_copies(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not checks.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, _COPIES_KIND)))
    if few:
        return
    lost, unpinned = checks.lost_to_copies(rank), unpinned_share(rank)
    if lost is None:
        yield Unknown(_COPIES_KIND, "copies to the GPU were not measured", "copy_s or gpu_copy_s")
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    if unpinned is not None and unpinned >= thresholds.UNPINNED:
        return  # unpinned_copies says it
    yield Finding(
        _COPIES_KIND,
        severity(share),
        f"Copies to the GPU take {checks.in_percent(share)} of the time",
        evidence(rank, lost),
        "The GPU computes nothing while its stream copies a batch",
        (
            Fix(
                "copy the next batch in a stream of its own while this one is computed, and copy "
                "less: uint8 images, normalized on the GPU; tensors made there"
            ),
        ),
        "likely" if unpinned is not None else "possible",
        share,
        place_of_most(rank.header.copy_code),
    )


COPIES: Final = Rule((_COPIES_KIND,), _find_costly_copies, each_rank=True)


# ---
# Copies to the GPU come from pageable memory: slower, and the host waits for them.


_UNPINNED_COPIES_KIND: Final = "unpinned_copies"


def _find_unpinned_copies(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _UNPINNED_COPIES_KIND)))
    lost = checks.lost_to_copies(rank)
    if few or lost is None:
        return
    share = checks.share_of(rank, lost)
    if share < thresholds.NOTICEABLE or not checks.lasts(rank, lost):
        return
    unpinned = unpinned_share(rank)
    if unpinned is None:
        yield Unknown(
            _UNPINNED_COPIES_KIND,
            "whether copies came from pinned memory was not recorded",
            "unpinned_bytes",
        )
        return
    if unpinned < thresholds.UNPINNED:
        return
    loader = checks.training_loader(rank.header)
    pins = loader is not None and loader.pin_memory
    yield Finding(
        _UNPINNED_COPIES_KIND,
        severity(share),
        f"Copies from pageable memory take {checks.in_percent(share)} of the time",
        evidence(rank, lost),
        UNPINNED.cause,
        (
            Fix(
                "pin what is copied outside the DataLoader: tensor.pin_memory(); and copy with "
                "non_blocking=True"
                if pins
                else UNPINNED.action,
                settings={} if pins else {"pin_memory": "True"},
                line=UNPINNED.line,
            ),
        ),
        "likely",
        share,
        place_of_most(rank.header.copy_code),
    )


UNPINNED_COPIES: Final = Rule((_UNPINNED_COPIES_KIND,), _find_unpinned_copies, each_rank=True)
