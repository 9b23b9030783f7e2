"""Composition of the peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.memory.stream.replay import Replay, Stream, live_at
from trainfit.results.runs.recording import KINDS, Recording

#: Components of a path at first: the model's class and its child.
_DEPTH: Final = 2
#: A row with this share of all is divided further; so many rows of the least share are enough.
_ALONE: Final = 0.95
_ROWS: Final = 3
_SHOWN: Final = 0.01


def by_kind(recording: Recording, stream: Stream, outcome: Replay) -> dict[str, int]:
    """Bytes at the peak of allocated memory, by kind of allocation; sums to the peak."""
    live = live_at(stream, outcome.peak_event)
    totals = np.bincount(
        recording.alloc_kind[live], weights=outcome.granted[live], minlength=len(KINDS)
    )
    return {kind: int(totals[code]) for code, kind in enumerate(KINDS)}


def by_module(recording: Recording, stream: Stream, outcome: Replay) -> dict[str, int]:
    """Bytes at the peak by module path, cut where the table says the most; largest first.

    What no module owns (inputs, loss, optimizer) is under ``""``. See :func:`divided`.
    """
    live = live_at(stream, outcome.peak_event)
    modules = recording.alloc_module[live]
    totals: dict[str, int] = {}
    for module, nbytes in zip(modules.tolist(), outcome.granted[live].tolist(), strict=True):
        path = recording.strings[module] if module >= 0 else ""
        totals[path] = totals.get(path, 0) + nbytes
    return divided(totals)


def divided(totals: Mapping[str, int]) -> dict[str, int]:
    """``totals`` of whole paths, summed up by their beginnings; largest first.

    Paths are cut after the model's children. A row that holds nearly everything, as a wrapper's
    only child does (``DataParallel.module``, ``PeftModel.base_model.model``), is divided into its
    own children, and so is the largest while there are too few rows to say something.
    """
    rows = _rows(totals, _DEPTH)
    named = sum(nbytes for path, nbytes in totals.items() if path)
    while True:
        sizes = {path: sum(members.values()) for path, members in rows.items()}
        large = sorted(
            (path for path in rows if path and sizes[path] >= _SHOWN * named),
            key=lambda path: -sizes[path],
        )
        if not large or (len(large) >= _ROWS and sizes[large[0]] < _ALONE * named):
            break
        parts = [(path, _rows(rows[path], _components(path) + 1)) for path in large]
        path, below = next(((p, b) for p, b in parts if set(b) != {p}), ("", {}))
        if not below:
            break
        del rows[path]
        rows |= below
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _rows(totals: Mapping[str, int], depth: int) -> dict[str, dict[str, int]]:
    """``totals`` by their paths' first components."""
    rows: dict[str, dict[str, int]] = {}
    for path, nbytes in totals.items():
        rows.setdefault(".".join(path.split(".")[:depth]), {})[path] = nbytes
    return rows


def _components(path: str) -> int:
    return path.count(".") + 1
