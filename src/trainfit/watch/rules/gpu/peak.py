"""Of a GPU's memory, what a run reserves at its peak."""

from __future__ import annotations

from trainfit.watch.view import RankView, known


def peak_share(view: RankView) -> float | None:
    """Of the GPU's memory, what the process reserves at its peak."""
    gpu, reserved = view.header.gpu, known(view.record.steps["reserved_bytes"])
    if gpu is None or gpu >= len(view.header.gpus) or not len(reserved):
        return None
    total = view.header.gpus[gpu].memory_bytes
    return float(reserved.max()) / total if total else None
