"""A rehearsal: the user's loop over the real DataLoader against a GPU step of given length."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from trainfit.findings.facts import Failure
from trainfit.hardware.machine.cgroup import between, oom_kills
from trainfit.loader import idle_time
from trainfit.loader.diagnose import context_of, diagnose_run
from trainfit.loader.idle_time import WORKER, RehearsalRecord
from trainfit.loader.measure.loop import (
    OtherProcesses,
    OtherProcessLoad,
    failure_of,
    shut_down,
    take_step,
)
from trainfit.loader.measure.processes import current
from trainfit.loader.measure.records import BEGAN, Records, Run, WorkerRecords
from trainfit.loader.measure.running import PATIENCE_S, emulated_pinning, watched
from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec
from trainfit.results.text import duration, percent

# ---
# The loop of a rehearsal, and its journal of each batch.
#
# The journal is a file that both processes map: whatever ends the loop (an exception in a worker,
# the OOM killer, a hang, Ctrl-C), what it saw until then can be read.


#: Columns of the journal's row of a batch.
_ASKED, _HANDED, _CPU, _STEP, _EPOCH, _READY = range(6)
_COLUMNS: Final = 6
#: Seconds between two lines of progress.
_TELL_S: Final = 5.0

#: Is told what goes on, and what share of it is done.
Tell = Callable[[str, float | None], None]


@dataclasses.dataclass(frozen=True)
class LoopEnd:
    """How the loop ended; ``made`` are the workers' records, if it could still give them."""

    how: Literal["duration", "fault", "interrupted", "empty"]
    failure: Failure | None = None
    made: Records | None = None


class Journal:
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
        """A batch was returned now; returns the time."""
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
        """The share of the time in which steps ran, since the beginning."""
        total = time.monotonic() - self._head[0]
        steps = self._batches[: self.count, _STEP]
        return float(np.sum(steps[np.isfinite(steps)])) / total if total > 0 else 0.0

    def observed(self, settings: LoaderSettings, made: Records, end: LoopEnd) -> RehearsalRecord:
        """What was noted down; what had not ended ends now."""
        now = time.monotonic()
        rows = np.array(self._batches[: int(np.count_nonzero(self._batches[:, _HANDED]))])
        began, ended, exhausted = (float(each) for each in self._head[:3])
        return RehearsalRecord(
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
def run_epochs(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    duration_s: float,
    journal: Journal,
    notebook: WorkerRecords,
    progress: Tell | None,
) -> LoopEnd:
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
        journal: Journal,
        notebook: WorkerRecords,
        progress: Tell | None,
    ) -> None:
        self._loader, self._settings, self._consumer = loader, settings, consumer
        self._duration_s, self._journal, self._notebook = duration_s, journal, notebook
        self._progress = progress
        self._made: list[Records] = []
        self._batches: Any = None
        self._asked = self._told = 0.0

    def run(self) -> LoopEnd:
        began = self._told = self._journal.begin()
        try:
            how = self._epochs(began + self._duration_s)
            return LoopEnd(how, made=self._all_made())
        except Exception as error:
            self._journal.end()
            return LoopEnd("fault", failure_of(error, self._batches), self._all_made())
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
                journal.step(take_step(self._consumer, self._settings.pin_memory))
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
            f"rehearsing, {duration(round(passed))} of {duration(self._duration_s)}: the GPU is "
            f"busy {percent(self._journal.busy_share())} of the time",
            passed / self._duration_s,
        )

    def _keep(self) -> None:
        """The records of an epoch, whose workers' successors write over them."""
        if not self._settings.persistent_workers:
            self._made.append(made_by(self._notebook, self._settings, self._asked))

    def _all_made(self) -> Records:
        since = 0.0 if self._settings.persistent_workers else self._asked
        last = made_by(self._notebook, self._settings, since)
        return np.concatenate([*self._made, last])


def made_by(notebook: WorkerRecords, settings: LoaderSettings, since: float) -> Records:
    """The workers' records of batches that were begun since then, each with its worker."""
    rows = [np.empty((0, WORKER + 1))]
    for worker in range(settings.num_workers):
        records = notebook.batches(worker)
        numbers = np.full(len(records), float(worker))
        rows.append(np.column_stack((records[:, :WORKER], numbers)))
    made = np.concatenate(rows)
    return made[made[:, BEGAN] >= since]


# ---
# A rehearsal: the user's loop over the real DataLoader, epoch after epoch, against a GPU step.
#
# Whatever ends it, the result holds what was seen until then (:mod:`.rehearsal_loop`).


#: Batches that a rehearsal can note down; it ends with the last.
_MOST_BATCHES: Final = 1 << 22
_NEVER_BUSY: Final = "a step time of 0 leaves the GPU idle: give the step time (--step-time 40ms)"


def rehearse(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    duration_s: float,
    progress: Tell | None = None,
    *,
    command: str = "",
    settings_source: str = "",
) -> Rehearsal:
    """Run ``for epoch: for batch in loader: step`` for ``duration_s`` seconds.

    The loader has the user's own epochs: where one ends, its iterator is recreated, as a
    user's loop does. Never raises for what the loader does, nor for Ctrl-C: the result says
    so in ``ended``, and holds what was seen until then.

    Args:
        progress: called every few seconds, in the process that runs the loop.
        command: the user's command, as the result names it.
        settings_source: whose settings they are, as the result says it.

    Raises:
        LoaderError: the consumer takes no time, or the duration is not above 0.
    """
    _check(consumer, duration_s)
    kills = oom_kills()
    with tempfile.TemporaryDirectory(prefix="trainfit-rehearsal-") as folder:
        journal = Journal(Path(folder), _rows(consumer, duration_s))
        notebook = WorkerRecords(Path(folder), max(1, settings.num_workers))
        work = functools.partial(
            run_epochs, workload, settings, consumer, duration_s, journal, notebook, progress
        )
        load, processes = OtherProcessLoad(), OtherProcesses()
        end = _await(work, settings, duration_s, notebook)
        others_cores, others = load.cores(), processes.busiest()
        made = end.made if end.made is not None else made_by(notebook, settings, 0.0)
        observed = journal.observed(settings, made, end)
        run = _run_of(observed, consumer, notebook, end)
    fault = None
    if end.how in ("fault", "empty"):
        context = context_of(
            run, limit_s=duration_s + PATIENCE_S, oom_kills=between(kills, oom_kills())
        )
        fault = diagnose_run(run, workload, context)
    return dataclasses.replace(
        _result(workload, observed, consumer, duration_s, end),
        command=command,
        settings_source=settings_source,
        fault=fault,
        others_cores=others_cores,
        others=others,
    )


def _run_of(
    observed: RehearsalRecord, consumer: Consumer, notebook: WorkerRecords, end: LoopEnd
) -> Run:
    """The rehearsal as one run, of which it is known what its failures mean."""
    count = observed.settings.num_workers
    return Run(
        observed.settings,
        consumer.step_s,
        began=observed.began,
        handed=observed.handed,
        fetches=tuple(notebook.batches(worker) for worker in range(count)),
        started=tuple(notebook.started())[:count],
        failure=end.failure,
    )


def rehearse_as_asked(workload: Workload, loading: LoaderSpec, command: str) -> Rehearsal:
    """What :mod:`trainfit.loader.child` calls for ``trainfit rehearse``.

    SIGINT ends the rehearsal, not the process: what was seen is the result.
    """
    # A script may have replaced the handler, and a shell's background job has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked, step, own = loading.rehearsal, loading.tuning.step or Consumer(0.0), workload.present
    assert asked is not None
    if step.step_s <= 0:
        raise LoaderError(f"{_NEVER_BUSY}; with --gpu it could not be determined ({step.source})")
    given = {name: value for name, value in vars(asked).items() if value is not None}
    seconds = given.pop("duration_s")
    settings = dataclasses.replace(own, **given)
    changed = [name for name, value in given.items() if getattr(own, name) != value]
    current()(f"rehearsing for {duration(seconds)}", 0.0)
    return rehearse(
        workload,
        settings,
        step,
        seconds,
        current(),
        command=command,
        settings_source="the script's own" + (f" but {', '.join(changed)}" if changed else ""),
    )


def _check(consumer: Consumer, duration_s: float) -> None:
    if consumer.step_s <= 0:
        raise LoaderError(_NEVER_BUSY)
    if not duration_s > 0:
        raise LoaderError(
            f"a rehearsal of {duration(duration_s)} is too short: give --duration 30s"
        )


def _rows(consumer: Consumer, duration_s: float) -> int:
    """The most batches there can be: none is faster than half the step (and a microsecond)."""
    return min(_MOST_BATCHES, int(duration_s / max(consumer.step_s * 0.5, 1e-6)) + 2)


def _await(
    work: Callable[[], LoopEnd],
    settings: LoaderSettings,
    duration_s: float,
    notebook: WorkerRecords,
) -> LoopEnd:
    try:
        end, failure = watched(work, settings, duration_s + PATIENCE_S, notebook)
    except KeyboardInterrupt:
        return LoopEnd("interrupted")
    if end is not None:
        return end
    return LoopEnd("fault", failure)


# --- The result -----------------------------------------------------------------------------------
def _result(
    workload: Workload,
    observed: RehearsalRecord,
    consumer: Consumer,
    duration_s: float,
    end: LoopEnd,
) -> Rehearsal:
    steady = idle_time.steady_rates(observed, workload.batch_size)
    epochs = idle_time.epochs(observed)
    epoch_s, measured = idle_time.epoch_seconds(epochs, workload.epoch_batches, steady)
    idle_s, dips = idle_time.explain(observed)
    return Rehearsal(
        command="",
        loader=workload.name,
        batch_size=workload.batch_size,
        epoch_batches=workload.epoch_batches,
        settings=observed.settings,
        settings_source="",
        step_s=consumer.step_s,
        step_source=consumer.source,
        ended=end.how,
        duration_s=duration_s,
        overall=idle_time.overall_rates(observed, workload.batch_size),
        steady=steady,
        timeline=idle_time.timeline(observed),
        idle_s=idle_s,
        dips=dips,
        epochs=epochs,
        epochs_begun=int(observed.epochs[-1]) + 1 if len(observed.epochs) else 1,
        epoch_s=epoch_s,
        epoch_measured=measured,
        torch=torch.__version__,
    )
