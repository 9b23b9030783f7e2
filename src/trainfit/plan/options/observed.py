"""Tunables of a command as observed in a simulated run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal

from trainfit.plan.runs.tracing import Trace

#: Where a batch size shows: in the DataLoader, or in what the model is called with.
BatchSource = Literal["loader", "calls"]


@dataclasses.dataclass(frozen=True)
class ObservedSettings:
    """Observed settings: the DataLoader's (``None``: there was none, or it has none), autocast's
    dtype (``None``: off), and the micro-batches of an optimizer step (``None``: not known).

    ``loader_batch`` is the DataLoader's batch size, ``call_batch`` the first dimension of what the
    model is called with.
    """

    loader_batch: int | None = None
    call_batch: int | None = None
    has_loader: bool = False
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    autocast: str | None = None
    accumulation: int | None = None

    def batch(self, source: BatchSource) -> int | None:
        """The observed batch size."""
        return self.loader_batch if source == "loader" else self.call_batch


def observed_settings(trace: Trace) -> ObservedSettings:
    """The tunables observed in a run."""
    outcome = trace.outcome
    loader = outcome.loader
    makeup = trace.recording.makeup if trace.recording is not None else None
    calls = Counter(feed.call_samples for feed in outcome.feeds if feed.call_samples)
    found = ObservedSettings(
        call_batch=calls.most_common(1)[0][0] if calls else None,
        autocast=outcome.autocast,
        accumulation=makeup.accumulation if makeup is not None else None,
    )
    if loader is None:
        return found
    return dataclasses.replace(
        found,
        has_loader=True,
        loader_batch=loader.batch_size,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
    )
