"""The first runs of a plan: the command as it is written."""

from __future__ import annotations

from trainfit.plan.command import Command
from trainfit.plan.failures import is_inference
from trainfit.plan.full_batches import pairs_of
from trainfit.plan.runs import AS_WRITTEN, Runs
from trainfit.plan.tracing import Trace


class FirstRun:
    """Makes the first run; ``whole`` is that of a script that turned out not to train, which is
    run once more then, with its calls of the model as steps."""

    def __init__(self, command: Command, runs: Runs) -> None:
        self._command = command
        self._runs = runs
        self.whole: Trace | None = None

    def make(self) -> tuple[Trace, int | None]:
        """The run and its batch size: the placeholder's, else the loader's (``None``: unknown)."""
        first, batch = self._once()
        if not is_inference(first):
            return first, batch
        if self.whole is None:
            self.whole = first
            self._runs.counts_calls = True
            self._runs.forget()
        return self._once()

    def _once(self) -> tuple[Trace, int | None]:
        text = self._command.present.get("batch_size")
        if text is not None:
            batch = int(text)
            self._runs.start(batch, AS_WRITTEN)
            # Most plans need it: it runs meanwhile on the second core.
            self._runs.start(next(pairs_of(batch, None))[1], AS_WRITTEN)
            return self._runs.trace(batch, AS_WRITTEN), batch
        first = self._runs.trace(None, AS_WRITTEN)
        loader = first.outcome.loader
        if loader is None or loader.index is None or loader.batch_size is None:
            return first, None
        self._runs.loader_index = loader.index
        self._runs.same(None, loader.batch_size, AS_WRITTEN)
        return first, loader.batch_size
