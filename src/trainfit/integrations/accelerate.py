"""A tracker for Accelerate."""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking import GeneralTracker

from trainfit.integrations.watched_training import WatchedTraining


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]
    """Watches from ``init_trackers`` to ``end_training``, and logs the numbers
    (:meth:`WatchResult.metrics`) to the trackers that come after it.

    ``tracker = AccelerateTracker()``, ``accelerator = Accelerator(log_with=[tracker, "wandb"])``,
    ``tracker.accelerator = accelerator``: without that line no other tracker is known, and the
    numbers are in ``tracker.training.result.metrics()`` alone. Of several processes the first is
    recorded, as it alone has trackers.

    Args:
        folder: as of :func:`trainfit.watch`.
    """

    name = "trainfit"
    requires_logging_directory = False

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.training = WatchedTraining(folder)
        self.accelerator: Any = None
        if not hasattr(GeneralTracker, "start"):  # an Accelerate that does not call it
            self.training.begin()

    @property
    def tracker(self) -> WatchedTraining:
        """What ``accelerator.get_tracker("trainfit", unwrap=True)`` gives."""
        return self.training

    def start(self) -> None:
        """Begin, when ``init_trackers`` is called."""
        self.training.begin()

    def finish(self) -> None:
        """End, when ``end_training`` is called, and log to those that are finished after this."""
        trackers = list(self.accelerator.trackers) if self.accelerator is not None else []
        behind = trackers[trackers.index(self) + 1 :] if self in trackers else []
        self.training.end(each.log for each in behind)
