"""Rules about where batches come from: the DataLoader, its workers, and copies to the GPU."""

from __future__ import annotations

from typing import Final

from trainfit.watch.rules.input import (
    epoch_start,
    input_bound,
    no_workers,
    slow_worker,
    too_many_workers,
    unpinned_copies,
)
from trainfit.watch.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    input_bound.RULE,
    slow_worker.RULE,
    epoch_start.RULE,
    no_workers.RULE,
    too_many_workers.RULE,
    unpinned_copies.RULE,
)
