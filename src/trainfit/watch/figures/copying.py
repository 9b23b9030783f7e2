"""Host-to-device copies: what they cost the training, and where their bytes lie."""

from __future__ import annotations

import numpy as np

from trainfit.results.watch.result import Evidence
from trainfit.watch.figures import gpu_time
from trainfit.watch.figures.view import RankView, known


def lost(rank: RankView) -> gpu_time.Seconds | None:
    """Seconds of each steady step; ``None``: not measured.

    The GPU's stream computes nothing while it copies, and nothing while it is empty and the host
    copies. Host time alone is no loss: it may be a wait for the work before.
    """
    host, gpu = (gpu_time.column(rank, name) for name in ("copy_s", "gpu_copy_s"))
    if not np.isfinite(gpu).any():
        return host if np.isfinite(host).any() else None
    gap = gpu_time.gap(rank) - np.nan_to_num(gpu_time.column(rank, "input_s"))
    empty = np.nan_to_num(np.minimum(host, np.maximum(0.0, gap)))
    spent: gpu_time.Seconds = np.fmax(gpu, empty)
    return spent


def unpinned_share(rank: RankView) -> float | None:
    """Of the copied bytes; ``None``: not measured, or none were copied."""
    every, unpinned = rank.steps["copied_bytes"], rank.steps["unpinned_bytes"]
    measured = (every >= 0) & (unpinned >= 0)
    total = float(np.sum(every[measured], dtype=np.float64))
    return float(np.sum(unpinned[measured], dtype=np.float64)) / total if total else None


def evidence(rank: RankView, seconds: gpu_time.Seconds) -> tuple[Evidence, ...]:
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
