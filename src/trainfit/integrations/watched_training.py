"""What the adapters have in common: a training that is watched from its begin to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainfit.results.watch import WatchResult
    from trainfit.watch.in_script import Watching

#: Takes a flat dict of numbers: a logger's or tracker's method.
Log = Callable[[dict[str, float]], Any]


class WatchedTraining:
    """Watches a process's training; nothing that fails here reaches the training.

    It pickles and copies as one that has not begun: a trainer is sent to other processes with its
    callbacks, and what records is of this process alone.

    Args:
        folder: as of :func:`trainfit.watch`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = folder
        self.result: WatchResult | None = None
        """What limits the training, once it has ended; ``None``: nothing was recorded, or a lower
        rank of the job has it."""
        self._watching: Watching | None = None

    def begin(self) -> None:
        """Record from now on; what was recorded before, by a training that raised, is over."""
        try:
            from trainfit.watch.in_script import watch

            self.end()
            self.result = None
            self._watching = watch(self.folder)
        except Exception as error:
            _say(f"not watched: {type(error).__name__}: {error}")

    def end(self, logs: Iterable[Log] = ()) -> None:
        """Record no more, say what limits the training, and log its numbers; safe to call twice."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        try:
            from trainfit.report.watch import answer

            watching.stop()
            if not watching.is_lowest_rank:
                return
            self.result = watching.result()
            if self.result is None:
                return
            _say(answer(self.result))
            # Without a step nothing is known of it, and nothing is logged.
            metrics = self.result.metrics() if self.result.steps else {}
            for log in logs if metrics else ():
                log(dict(metrics))
        except Exception as error:
            _say(f"not judged or not logged: {type(error).__name__}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watching": None}


def _say(text: str) -> None:
    print(f"trainfit watch: {text}", file=sys.stderr)
