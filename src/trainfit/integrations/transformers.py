"""A callback for the Trainer of Transformers."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from trainfit.integrations.watched_training import WatchedTraining


class TransformersCallback(TrainerCallback):
    """Watches each ``train`` and logs its numbers (:meth:`WatchResult.metrics`).

    ``trainer.add_callback(TransformersCallback(trainer))``. With the ``trainer`` they go the way of
    its losses, to whatever it reports to; without, to ``state.log_history`` alone. Of several
    processes each is recorded, and the first one's numbers are logged. A ``train`` that raises is
    recorded until the next one begins, or the process ends: the Trainer does not say that it ended.

    Args:
        folder: as of :func:`trainfit.watch`.
    """

    def __init__(self, trainer: Any = None, folder: str | os.PathLike[str] | None = None) -> None:
        self.training = WatchedTraining(folder)
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin: the DataLoader is there, and no batch was loaded."""
        self.training.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """End at the last message of ``train``: when ``on_train_end`` comes, those that the Trainer
        reports to have closed their runs."""
        if "train_runtime" in (logs or {}):
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End, where no such message came."""
        self._end(state)

    def _end(self, state: Any) -> None:
        log = state.log_history.append if self._trainer is None else self._trainer.log
        self.training.end([log] if state.is_world_process_zero else [])
