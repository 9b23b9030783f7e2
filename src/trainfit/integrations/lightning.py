"""A callback for Lightning's Trainer, of ``lightning.pytorch`` and of ``pytorch_lightning``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from trainfit.integrations.watched_training import WatchedTraining

#: The same library under two names, whose classes know nothing of each other.
_NAMES: Final = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> Iterator[type]:
    """The Callback of each that the process has imported; where it has none, of those there are."""
    loaded = [name for name in _NAMES if name in sys.modules]
    names = [name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])]
    for name in loaded or names:
        yield importlib.import_module(name).Callback
    if not names:
        raise ImportError("LightningCallback needs lightning or pytorch_lightning; install one")


class LightningCallback(*_bases()):  # type: ignore[misc]
    """Watches each ``fit`` and logs its numbers (:meth:`WatchResult.metrics`) to its loggers.

    ``Trainer(callbacks=[LightningCallback()])``. Each rank is recorded; the loggers get the numbers
    of rank 0.

    Args:
        folder: as of :func:`trainfit.watch`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.training = WatchedTraining(folder)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin: no batch was loaded before."""
        self.training.begin()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End, and log: loggers are open until the hook ``teardown``."""
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self.training.end(
            functools.partial(logger.log_metrics, step=trainer.global_step) for logger in loggers
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End: Lightning leaves ``on_fit_end`` out."""
        self.training.end()
