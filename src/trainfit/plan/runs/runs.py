"""The simulated runs that a plan needs: each made once, two at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from trainfit.plan.command.parsing import Command
from trainfit.plan.command.wrappers import ACCELERATE
from trainfit.plan.runs.failures import NotSimulated, require_step
from trainfit.plan.runs.processes import GaveWay, RamGate, RamShort
from trainfit.plan.runs.progress import Progress, as_progress
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import Counted, LoaderOverride, TraceOutcome

#: Simulated runs at a time; each is a process that computes on one core.
PARALLEL = 2
#: Seconds between looks whether a run is over.
_TICK_S = 0.02


class Runs:
    """Starts runs ahead and hands out their traces; a context manager.

    ``loader_index`` says which DataLoader another batch size is for, where the command has
    no placeholder for it, or ``batch_constant`` which constant of the script; ``counted`` what its
    steps are. The run as the command is written ends with a look at the data set's samples, of
    ``look_at_samples_s`` seconds. ``early`` gets what the first run has recorded by its second
    step, where that run goes on for seconds, in a thread of ours. Leaving the context ends what
    still runs.
    """

    def __init__(self, command: Command, tracer: Tracer, progress: Callable[[str], None]) -> None:
        self._command = command
        self._tracer = tracer
        self._progress: Progress = as_progress(progress)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="trainfit-run")
        self._futures: dict[tuple[int | None, RunSpec], Future[Trace]] = {}
        self._numbers = itertools.count(1)
        self._gate = RamGate(self._progress.warn)
        self._asked = 0
        self._only_finished = False
        self.early: Callable[[Recording], None] | None = None
        self.loader_index: int | None = None
        self.batch_constant: str | None = None
        self.counted: Counted = "steps"
        self.look_at_samples_s = 0.0

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracer.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, batch: int | None, spec: RunSpec) -> None:
        """Begin a run as soon as a core is free, to be asked for later.

        ``batch`` is ``None`` for whatever batch size the command has.
        """
        key = (batch, spec)
        if key not in self._futures and not self._only_finished:
            self._asked += 1
            self._progress.expect(self._asked)
            self._futures[key] = self._pool.submit(self._run, batch, spec)

    def trace(self, batch: int | None, spec: RunSpec) -> Trace:
        """A run's trace; raises :class:`ScriptError` where it made no step on the GPU."""
        trace = self.attempt(batch, spec)
        require_step(trace, self._command, self.counted)
        return trace

    def attempt(self, batch: int | None, spec: RunSpec) -> Trace:
        """A run's trace, whatever became of it; raises :class:`NotSimulated` where the plan was
        interrupted before."""
        if self._only_finished:
            return self._finished(batch, spec)
        self.start(batch, spec)
        return result_of(self._futures[batch, spec])

    @property
    def is_over(self) -> bool:
        """Was the plan interrupted?"""
        return self._only_finished

    def only_finished(self) -> None:
        """Hand out from now on only what is there already, and end the runs that go on; the first
        one tells what it has, where it told something before."""
        self._only_finished = True
        self._tracer.stop()
        for future in self._futures.values():
            future.cancel()
        while not all(future.done() for future in self._futures.values()):
            time.sleep(_TICK_S)

    def _finished(self, batch: int | None, spec: RunSpec) -> Trace:
        future = self._futures.get((batch, spec))
        if future is None or not future.done() or future.cancelled() or future.exception():
            raise NotSimulated
        return future.result()

    def with_evidence(self, batch: int | None, makeup: StepMakeup | None) -> StepMakeup | None:
        """What runs at other sizes than ``batch`` that are over say of the ``makeup`` of a step."""
        if makeup is None or not batch or not makeup.effective_batch or not makeup.accumulation:
            return makeup
        whole, kept = batch * makeup.accumulation, set[bool]()
        for (size, spec), future in list(self._futures.items()):
            if not size or size == batch or whole % size or spec.values.keys() & {"grad_accum"}:
                continue
            if not future.done() or future.cancelled() or future.exception():
                continue
            recording = future.result().recording
            other = recording.makeup if recording is not None else None
            if other is not None and other.effective_batch:
                same = other.effective_batch == makeup.effective_batch
                kept.add(same and other.accumulation == whole // size)
        return dataclasses.replace(makeup, is_kept=kept == {True})

    def side_by_side(self, ranks: tuple[int, ...]) -> None:
        """Each run is of these ranks of the job from now on, and what was run before is not."""
        self._tracer.company = ranks
        self.forget()

    def forget(self) -> None:
        """Drop the results, so that runs are repeated."""
        self._futures = {}

    def use(self, command: Command) -> None:
        """Make runs of ``command`` from now on, which says the same in other words: what its
        tunables have not been varied for stays."""
        self._command = command
        self._tracer.use(command)

    def drop(self, batch: int | None, spec: RunSpec) -> None:
        """Forget a run that is over."""
        self._futures.pop((batch, spec), None)

    def same(self, batch: int | None, as_batch: int | None, spec: RunSpec) -> None:
        """The run at ``batch`` is that at ``as_batch`` too."""
        self._futures.setdefault((as_batch, spec), self._futures[batch, spec])

    def _run(self, batch: int | None, spec: RunSpec) -> Trace:
        """One run, a second time and alone if RAM was too short for two at a time."""
        number = next(self._numbers)
        while True:
            started = time.monotonic()
            with (
                self._gate.turn(number, lambda: self._tracer.is_stopped),
                contextlib.suppress(GaveWay),
            ):
                try:
                    trace = self._simulate(number, batch, spec)
                except RamShort as error:
                    seconds = time.monotonic() - started
                    return Trace(TraceOutcome("died", 0, seconds, str(error)), None, "")
                self._gate.learn(trace.outcome.peak_ram_bytes)
                return trace

    def _simulate(self, number: int, batch: int | None, spec: RunSpec) -> Trace:
        self._progress.begin(number, self._title(batch, spec))
        present = self._command.present.get("batch_size")
        looks = spec == AS_WRITTEN and (batch is None or str(batch) == present)
        spec, constants = dataclasses.replace(spec, count=self.counted), {}
        if looks:
            spec = dataclasses.replace(spec, look_at_samples_s=self.look_at_samples_s)
        if batch is not None and "batch_size" in self._command.present:
            spec = dataclasses.replace(spec, values={**spec.values, "batch_size": str(batch)})
        elif batch is not None and self.loader_index is not None:
            spec = dataclasses.replace(spec, loader=LoaderOverride(self.loader_index, batch))
        elif batch is not None and self.batch_constant is not None:
            constants[self.batch_constant] = batch
        try:
            return self._tracer.trace(
                spec,
                constants=constants,
                heard=functools.partial(self._progress.status, number),
                look=functools.partial(self._gate.look, number),
                early=self.early if number == 1 else None,
            )
        finally:
            self._progress.end(number)

    def _title(self, batch: int | None, spec: RunSpec) -> str:
        text = "" if batch is None else f" at batch size {batch}"
        if spec.sample is not None:
            text += " with the largest batch" if spec.sample.largest else " with usual batches"
        if spec.title:
            return f"simulating {self._command.name}{text}, {spec.title}"
        if "amp" in spec.values:
            return f"simulating {self._command.name}{text}, amp {spec.values['amp']}"
        if ACCELERATE in spec.variables:
            precision = spec.variables[ACCELERATE]
            return f"simulating {self._command.name}{text}, {ACCELERATE}={precision}"
        if spec.force is not None:
            return f"simulating {self._command.name}{text}, AMP {spec.force}"
        return f"simulating {self._command.name}{text}"


def result_of(future: Future[Trace]) -> Trace:
    """A run's trace when it is over.

    By looks, not by a lock: a signal that comes just before a thread sleeps on one does not wake
    it, and Ctrl-C while ``threading`` takes its lock again is the RuntimeError of a lock not held.
    """
    while not future.done():
        time.sleep(_TICK_S)
    return future.result()
