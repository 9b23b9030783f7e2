"""The simulated runs that a plan needs: each made once, two at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from trainfit.plan.command import Command
from trainfit.plan.failures import require_step
from trainfit.plan.tracing import Trace, Tracer
from trainfit.results.trace import ForcedAmp, InterventionRequest, LoaderOverride

#: Simulated runs at a time; each is a process that computes on one core.
_PARALLEL = 2

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a run differs from the command, but for its batch size.

    ``amp`` is another value for the placeholder, ``force`` autocast switched from outside.
    ``interventions`` change the script, ``survey`` asks which of them would.
    ``title`` is for the progress line.
    """

    amp: str | None = None
    force: ForcedAmp | None = None
    interventions: tuple[InterventionRequest, ...] = ()
    survey: bool = False
    title: str = dataclasses.field(default="", compare=False)


AS_WRITTEN = Variant()


class Runs:
    """Starts runs ahead and hands out their traces; a context manager.

    ``loader_index`` says which DataLoader another batch size is for, where the command has
    no placeholder for it; ``counts_calls`` that calls of the model are its steps, because the
    script does not train. Leaving the context ends what still runs.
    """

    def __init__(self, command: Command, tracer: Tracer, progress: Progress) -> None:
        self._command = command
        self._tracer = tracer
        self._progress = progress
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="trainfit-run")
        self._futures: dict[tuple[int | None, Variant], Future[Trace]] = {}
        self._lock = threading.Lock()
        self.loader_index: int | None = None
        self.counts_calls = False

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tracer.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, batch: int | None, variant: Variant) -> None:
        """Begin a run as soon as a core is free, to be asked for later.

        ``batch`` is ``None`` for whatever batch size the command has.
        """
        key = (batch, variant)
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._run, batch, variant)

    def trace(self, batch: int | None, variant: Variant) -> Trace:
        """A run's trace; raises :class:`ScriptError` where it made no step on the GPU."""
        trace = self.attempt(batch, variant)
        require_step(trace, self._command)
        return trace

    def attempt(self, batch: int | None, variant: Variant) -> Trace:
        """A run's trace, whatever became of it."""
        self.start(batch, variant)
        return self._futures[batch, variant].result()

    def forget(self) -> None:
        """Make all runs anew that are asked for from now on."""
        self._futures = {}

    def same(self, batch: int | None, as_batch: int | None, variant: Variant) -> None:
        """The run at ``batch`` is that at ``as_batch`` too."""
        self._futures.setdefault((as_batch, variant), self._futures[batch, variant])

    def _run(self, batch: int | None, variant: Variant) -> Trace:
        values, loader = {}, None
        if variant.amp is not None:
            values["amp"] = variant.amp
        if batch is not None and "batch_size" in self._command.present:
            values["batch_size"] = str(batch)
        elif batch is not None and self.loader_index is not None:
            loader = LoaderOverride(self.loader_index, batch)
        with self._lock:
            self._progress(self._title(batch, variant))
        return self._tracer.trace(
            values,
            loader=loader,
            amp=variant.force,
            interventions=variant.interventions,
            survey=variant.survey,
            count="calls" if self.counts_calls else "steps",
        )

    def _title(self, batch: int | None, variant: Variant) -> str:
        at = "" if batch is None else f" at batch size {batch}"
        if variant.title:
            return f"simulating {self._command.name}{at}, {variant.title}"
        if variant.amp is not None:
            return f"simulating {self._command.name}{at}, amp {variant.amp}"
        if variant.force is not None:
            return f"simulating {self._command.name}{at}, AMP {variant.force}"
        return f"simulating {self._command.name}{at}"
