"""A rehearsal: the user's loop over the real DataLoader, epoch after epoch, against a GPU step.

What happens is noted down in a file batch by batch, so that whatever ends the rehearsal (an
exception in a worker, the OOM killer, a hang, Ctrl-C) what it saw until then is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from trainfit.loader import isolated, utilisation
from trainfit.loader.instrument import BEGAN, STACKS_SIGNAL, Notebook, Records
from trainfit.loader.model import Consumer
from trainfit.loader.pinning import emulated_pinning
from trainfit.loader.progress import current
from trainfit.loader.runs import PATIENCE_S, Failure, failure_of, shut_down, take_step
from trainfit.loader.utilisation import Observed
from trainfit.loader.workload import LoaderError, Workload
from trainfit.results.loader import Fault, LoaderSettings
from trainfit.results.loading import LoadingRequest, StepTime
from trainfit.results.rehearsal import Predicted, Rehearsal

#: Columns of the journal's row of a batch.
_ASKED, _HANDED, _CPU, _STEP, _EPOCH, _READY = range(6)
_COLUMNS: Final = 6
#: Batches that a rehearsal can note down; it ends with the last.
_MOST_BATCHES: Final = 1 << 22
#: Seconds between two lines of progress.
_TELL_S: Final = 5.0

_NEVER_BUSY: Final = (
    "a GPU whose step takes no time is never busy: give the step's time (--step-time 40ms)"
)

#: Is told what goes on, and what share of it is done.
Tell = Callable[[str, float | None], None]


@dataclasses.dataclass(frozen=True)
class Names:
    """What a result says of itself: whose loader it is, and where its figures are from."""

    command: str = ""
    loader: str = ""
    settings_source: str = ""
    step_source: str = ""


def rehearse(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    duration_s: float,
    progress: Tell | None = None,
    *,
    names: Names | None = None,
    predicted: Predicted | None = None,
    explain: Callable[[Failure, LoaderSettings], Fault] | None = None,
) -> Rehearsal:
    """Run ``for epoch: for batch in loader: step`` for ``duration_s`` seconds.

    The loader has the user's own epochs: where one ends, its iterator is made anew, as a
    user's loop does. Never raises for what the loader does, nor for Ctrl-C: the result says
    so in ``ended``, and holds what was seen until then.

    Args:
        progress: is told every few seconds, in the process that runs the loop.
        explain: a failure with its cure; by default by its kind alone.

    Raises:
        LoaderError: the consumer takes no time, or the duration is not above 0.
    """
    _check(consumer, duration_s)
    with tempfile.TemporaryDirectory(prefix="trainfit-rehearsal-") as folder:
        journal = _Journal(Path(folder), _rows(consumer, duration_s))
        notebook = Notebook(Path(folder), max(1, settings.num_workers))
        work = functools.partial(
            _loop, workload, settings, consumer, duration_s, journal, notebook, progress
        )
        end = _await(work, settings, duration_s, notebook)
        made = end.made if end.made is not None else _made(notebook, settings, 0.0)
        observed = journal.observed(settings, made, end)
    names = names or Names()
    explain = explain or fault_of
    return _result(workload, observed, consumer, duration_s, end, names, predicted, explain)


def rehearse_request(workload: Workload, request: LoadingRequest) -> Rehearsal:
    """What :mod:`trainfit.loader.child` calls for ``trainfit rehearse``.

    ``request.arguments`` has ``duration_s`` and, in ``settings``, those that differ from the
    script's own. SIGINT ends the rehearsal, not the process: what was seen is the result.
    """
    # A script may have replaced the handler, and a shell's background job has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = json.loads(request.arguments)
    step, own = request.step or StepTime(0.0), workload.present
    if step.step_s <= 0:
        raise LoaderError(
            f"{_NEVER_BUSY}; with this script and --gpu it is not known: {step.source}"
        )
    settings = dataclasses.replace(own, **arguments["settings"])
    changed = [
        name for name in arguments["settings"] if getattr(settings, name) != getattr(own, name)
    ]
    return rehearse(
        workload,
        settings,
        Consumer(step.step_s, step.work_s, step.pageable_s),
        arguments["duration_s"],
        current(),
        names=Names(
            command=request.command,
            settings_source="the script's own" + (f" but {', '.join(changed)}" if changed else ""),
            step_source=step.source,
        ),
    )


def _check(consumer: Consumer, duration_s: float) -> None:
    if consumer.step_s <= 0:
        raise LoaderError(_NEVER_BUSY)
    if not duration_s > 0:
        raise LoaderError(f"a rehearsal of {duration_s:g} s shows nothing: give --duration 30s")


def _rows(consumer: Consumer, duration_s: float) -> int:
    """As many batches as there can be: none takes less than its step (and a microsecond)."""
    return min(_MOST_BATCHES, int(duration_s / max(consumer.step_s * 0.5, 1e-6)) + 2)


@dataclasses.dataclass(frozen=True)
class _End:
    """How the loop ended; ``made`` are the workers' records, if it could still give them."""

    how: Literal["duration", "fault", "interrupted", "empty"]
    failure: Failure | None = None
    made: Records | None = None


def _await(
    work: Callable[[], _End], settings: LoaderSettings, duration_s: float, notebook: Notebook
) -> _End:
    limit_s = duration_s + PATIENCE_S
    try:
        ended: isolated.Ended[_End]
        if settings.num_workers:
            ended = isolated.call(work, limit_s, STACKS_SIGNAL)
        else:
            ended = isolated.call_here(work, limit_s)
    except KeyboardInterrupt:
        return _End("interrupted")
    if ended.value is not None:
        return ended.value
    if ended.error_type == "KeyboardInterrupt":
        return _End("interrupted")
    failure = Failure(
        ended.error_type,
        ended.message,
        ended.traceback,
        ended.exit_code,
        hung=ended.hung,
        stacks=notebook.stacks(),
    )
    return _End("fault", failure)


class _Journal:
    """What the loop notes down, in a file that another process reads whatever becomes of it."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._path, self._shape = str(folder / "journal"), (rows + 1, _COLUMNS)
        self._rows: Any = np.memmap(self._path, np.float64, "w+", shape=self._shape)
        self._head, self._batches = self._rows[0], self._rows[1:]
        self.count = 0

    def begin(self) -> float:
        """Note the time at which it begins."""
        self._head[0] = time.monotonic()
        return float(self._head[0])

    def end(self, exhausted: bool = False) -> None:
        """Note the time at which it ends, and whether an epoch had just ended."""
        self._head[1], self._head[2] = time.monotonic(), float(exhausted)

    @property
    def full(self) -> bool:
        return self.count >= len(self._batches)

    def hand_over(self, asked: float, cpu: float, epoch: int, ready: float) -> float:
        """A batch was handed over now; returns the time."""
        now = time.monotonic()
        row = self._batches[self.count]
        row[_ASKED], row[_CPU], row[_EPOCH], row[_READY] = asked, cpu, epoch, ready
        row[_STEP] = np.inf  # until it is over
        row[_HANDED] = now  # the last: a row with one is whole
        self.count += 1
        return now

    def step(self, seconds: float) -> None:
        """The step with the last batch took so long."""
        self._batches[self.count - 1, _STEP] = seconds

    def busy_share(self) -> float:
        """Since the beginning."""
        total = time.monotonic() - self._head[0]
        steps = self._batches[: self.count, _STEP]
        return float(np.sum(steps[np.isfinite(steps)])) / total if total > 0 else 0.0

    def observed(self, settings: LoaderSettings, made: Records, end: _End) -> Observed:
        """What was noted down; what had not ended ends now."""
        now = time.monotonic()
        rows = np.array(self._batches[: int(np.count_nonzero(self._batches[:, _HANDED]))])
        began, ended, exhausted = (float(each) for each in self._head[:3])
        return Observed(
            settings,
            began=began or now,
            ended=ended or now,
            asked=rows[:, _ASKED],
            handed=rows[:, _HANDED],
            next_cpu=rows[:, _CPU],
            steps=rows[:, _STEP],
            epochs=rows[:, _EPOCH].astype(np.int64),
            ready=rows[:, _READY],
            made=made,
            failed=end.how in ("fault", "empty"),
            exhausted=bool(exhausted),
        )


# --- The loop, in a process of its own where there are workers ----------------------------------
def _loop(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    duration_s: float,
    journal: _Journal,
    notebook: Notebook,
    progress: Tell | None,
) -> _End:
    if settings.num_workers:
        notebook.watch_stacks()
    with emulated_pinning() if settings.pin_memory else contextlib.nullcontext():
        loader = workload.loader(settings, notebook.init, endless=False)
        loop = _Loop(loader, settings, consumer, duration_s, journal, notebook, progress)
        return loop.run()


class _Loop:
    """The user's loops: over epochs, and over the batches of each."""

    def __init__(
        self,
        loader: Any,
        settings: LoaderSettings,
        consumer: Consumer,
        duration_s: float,
        journal: _Journal,
        notebook: Notebook,
        progress: Tell | None,
    ) -> None:
        self._loader, self._settings, self._consumer = loader, settings, consumer
        self._duration_s, self._journal, self._notebook = duration_s, journal, notebook
        self._progress = progress
        self._made: list[Records] = []
        self._batches: Any = None
        self._asked = self._told = 0.0

    def run(self) -> _End:
        began = self._told = self._journal.begin()
        try:
            how = self._epochs(began + self._duration_s)
            return _End(how, made=self._all_made())
        except Exception as error:
            self._journal.end()
            return _End("fault", failure_of(error, self._batches), self._all_made())
        finally:
            shut_down(self._batches)

    def _epochs(self, until: float) -> Literal["duration", "empty"]:
        epoch = 0
        while True:
            self._batches = None  # ends its workers, as when a user's loop ends
            asked, before = time.monotonic(), self._journal.count
            self._asked = asked
            self._batches = iter(self._loader)
            if self._epoch(epoch, asked, until):
                return "duration"
            if self._journal.count == before:
                self._journal.end()
                return "empty"
            if time.monotonic() >= until:
                self._journal.end(exhausted=True)
                return "duration"
            self._keep()
            epoch += 1

    def _epoch(self, epoch: int, asked: float, until: float) -> bool:
        """All batches of an epoch; whether the rehearsal's time is over."""
        iterator, journal, batch, ready = self._batches, self._journal, None, 0.0
        first, cpu = True, time.thread_time()
        while True:
            try:
                # The former batch is freed here, as in a user's loop.
                batch = next(iterator)  # noqa: F841
            except StopIteration:
                return False
            spent = time.thread_time() - cpu
            if first:
                ready, first = self._ready(asked), False
            now = journal.hand_over(asked, spent, epoch, ready)
            if now < until:
                journal.step(take_step(self._consumer))
                self._tell(until)
            else:
                journal.step(0.0)
            if time.monotonic() >= until or journal.full:
                journal.end()
                return True
            asked, cpu = time.monotonic(), time.thread_time()

    def _ready(self, asked: float) -> float:
        """When the first worker was ready, if they began in this epoch."""
        started = self._notebook.started()[: self._settings.num_workers]
        return min((at for at in started if at > asked), default=0.0)

    def _tell(self, until: float) -> None:
        now = time.monotonic()
        if self._progress is None or now - self._told < _TELL_S:
            return
        self._told = now
        passed = min(self._duration_s, now - (until - self._duration_s))
        self._progress(
            f"rehearsing, {passed:.0f} of {self._duration_s:.0f} s: the GPU is busy "
            f"{100 * self._journal.busy_share():.0f}% of the time",
            passed / self._duration_s,
        )

    def _keep(self) -> None:
        """The records of an epoch, whose workers' successors write over them."""
        if not self._settings.persistent_workers:
            self._made.append(_made(self._notebook, self._settings, self._asked))

    def _all_made(self) -> Records:
        since = 0.0 if self._settings.persistent_workers else self._asked
        last = _made(self._notebook, self._settings, since)
        return np.concatenate([*self._made, last])


def _made(notebook: Notebook, settings: LoaderSettings, since: float) -> Records:
    """The workers' records of batches that were begun since then."""
    rows = [notebook.batches(worker) for worker in range(settings.num_workers)]
    made = np.concatenate(rows) if rows else np.empty((0, 4))
    return made[made[:, BEGAN] >= since]


# --- The result -----------------------------------------------------------------------------------
def _result(
    workload: Workload,
    observed: Observed,
    consumer: Consumer,
    duration_s: float,
    end: _End,
    names: Names,
    predicted: Predicted | None,
    explain: Callable[[Failure, LoaderSettings], Fault],
) -> Rehearsal:
    steady = utilisation.steady_rates(observed, workload.batch_size)
    epochs = utilisation.epochs(observed)
    epoch_s, measured = utilisation.epoch_seconds(epochs, workload.epoch_batches, steady)
    idle, dips = utilisation.explain(observed)
    return Rehearsal(
        command=names.command,
        loader=names.loader or workload.name,
        batch_size=workload.batch_size,
        epoch_batches=workload.epoch_batches,
        settings=observed.settings,
        settings_source=names.settings_source,
        step_s=consumer.step_s,
        step_source=names.step_source,
        ended=end.how,
        duration_s=duration_s,
        overall=utilisation.overall_rates(observed, workload.batch_size),
        steady=steady,
        timeline=utilisation.timeline(observed),
        idle_s=idle,
        dips=dips,
        epochs=epochs,
        epochs_begun=int(observed.epochs[-1]) + 1 if len(observed.epochs) else 1,
        epoch_s=epoch_s,
        epoch_measured=measured,
        predicted=predicted,
        fault=explain(end.failure, observed.settings) if end.failure is not None else None,
        torch=torch.__version__,
    )


def fault_of(failure: Failure, settings: LoaderSettings) -> Fault:
    """A failure by its kind alone."""
    if failure.hung:
        return Fault(
            "deadlock",
            f"no batch came for {PATIENCE_S:g} s",
            failure.stacks,
            "read in the stacks what the workers wait for",
            settings,
        )
    if failure.error_type:
        lines = failure.message.strip().splitlines() or [""]
        return Fault(
            "worker_exception" if settings.num_workers else "loader_exception",
            f"the loader raised {failure.error_type}: {lines[-1]}",
            failure.traceback,
            "correct the data set, or what it reads",
            settings,
        )
    return Fault(
        "died",
        f"the process that iterated over the loader ended with exit code {failure.exit_code}",
        "",
        "run the script by itself and read its last lines",
        settings,
    )
