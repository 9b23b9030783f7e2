"""The first runs of a plan: the command as it is written, and what its options mean."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command
from trainfit.plan.options.constants import batch_constant
from trainfit.plan.options.detected import CommandOptions, read_options
from trainfit.plan.options.observed import observed_settings
from trainfit.plan.options.proof import proven
from trainfit.plan.runs.failures import NotSimulated, is_inference, updates_by_itself
from trainfit.plan.runs.full_batches import pairs_of
from trainfit.plan.runs.runs import AS_WRITTEN, Runs
from trainfit.plan.runs.tracing import Trace


class FirstRun:
    """Makes the first run; ``whole`` is that of a script that turned out not to train, which is
    run once more then, with its calls of the model as steps; one that trains without an optimizer
    is, too, with its backward passes. ``options`` are the command's, with
    the tunables that the user has not marked. ``tell`` is called with the run and its batch size as
    soon as they are known, before other runs show what options mean.
    """

    def __init__(
        self,
        command: Command,
        runs: Runs,
        gpu: GpuSpec,
        tell: Callable[[Trace, int | None], None] = lambda first, batch: None,
    ) -> None:
        self._tell = tell
        self._command = command
        self._runs = runs
        self._gpu = gpu
        self.whole: Trace | None = None
        self.options = CommandOptions(command, command)

    def make(self) -> tuple[Trace, int | None]:
        """The run and its batch size: the command's, else the loader's (``None``: unknown)."""
        first = self._once()
        if is_inference(first):
            if self.whole is None:
                self.whole = first
                self._runs.counted = "calls"
                self._runs.forget()
            first = self._once()
        elif first.outcome.steps == 0 and updates_by_itself(first):
            self._runs.counted = "backwards"
            self._runs.forget()
            first = self._once()
        return first, self._batch(first)

    def _once(self) -> Trace:
        text = self._command.present.get("batch_size")
        if text is None:
            return self._runs.trace(None, AS_WRITTEN)
        batch = int(text)
        self._runs.start(batch, AS_WRITTEN)
        # Most plans need it: it runs meanwhile on the second core.
        self._runs.start(next(pairs_of(batch, None))[1], AS_WRITTEN)
        return self._runs.trace(batch, AS_WRITTEN)

    def _batch(self, first: Trace) -> int | None:
        """The batch size, and what varies it: an option that is proven to, or the DataLoader."""
        options = read_options(self._command, first.outcome.options, observed_settings(first))
        marked = self._command.present.get("batch_size")
        found = options.option("batch_size")
        batch = None if found is None else int(found.present)
        loader = first.outcome.loader
        if marked is not None:
            batch = int(marked)
        elif batch is None and loader is not None and loader.index is not None:
            batch = loader.batch_size
        self._tell(first, batch)
        if marked is None and batch is not None:
            self._runs.same(None, batch, AS_WRITTEN)
        if options.found:
            options = proven(options, self._runs, first, batch, self._gpu)
        self.options = options
        if "batch_size" in options.command.present:
            return batch
        if loader is None or loader.index is None or loader.batch_size is None:
            return self._constant(first)
        self._runs.loader_index = loader.index
        self._runs.same(None, loader.batch_size, AS_WRITTEN)
        return loader.batch_size

    def _constant(self, first: Trace) -> int | None:
        """The batch size that a constant of the script is, as a run with another value shows."""
        found = batch_constant(self._command, observed_settings(first).call_batch)
        if found is None:
            return None
        self._runs.batch_constant = found.name
        other = next(pairs_of(found.value, None))[1]
        try:
            seen = observed_settings(self._runs.attempt(other, AS_WRITTEN)).call_batch
        except NotSimulated:
            seen = None
        if seen != other:
            self._runs.drop(other, AS_WRITTEN)
            self._runs.batch_constant = None
            return None
        self._runs.same(None, found.value, AS_WRITTEN)
        return found.value
