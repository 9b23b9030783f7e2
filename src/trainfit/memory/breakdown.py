"""What the memory at a peak consists of."""

from __future__ import annotations

import numpy as np

from trainfit.memory.replay import Replay, Stream, live_at
from trainfit.results.recording import KINDS, Recording


def by_kind(recording: Recording, stream: Stream, outcome: Replay) -> dict[str, int]:
    """Bytes at the peak of allocated memory, by kind of allocation; sums to the peak."""
    live = live_at(stream, outcome.peak_event)
    totals = np.bincount(
        recording.alloc_kind[live], weights=outcome.granted[live], minlength=len(KINDS)
    )
    return {kind: int(totals[code]) for code, kind in enumerate(KINDS)}


def by_module(
    recording: Recording, stream: Stream, outcome: Replay, depth: int = 2
) -> dict[str, int]:
    """Bytes at the peak by module path, cut after ``depth`` components; largest first.

    What no module owns (inputs, loss, optimizer) is under ``""``.
    """
    live = live_at(stream, outcome.peak_event)
    modules = recording.alloc_module[live]
    totals: dict[str, int] = {}
    for module, nbytes in zip(modules.tolist(), outcome.granted[live].tolist(), strict=True):
        path = _cut(recording.strings[module] if module >= 0 else "", depth)
        totals[path] = totals.get(path, 0) + nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
