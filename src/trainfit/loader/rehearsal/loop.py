"""The loop of a rehearsal, and its journal of each batch.

The journal is a file that both processes map: whatever ends the loop (an exception in a worker,
the OOM killer, a hang, Ctrl-C), what it saw until then can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from trainfit.loader.measure.instrument import BEGAN, Records, WorkerRecords
from trainfit.loader.measure.loop import failure_of, shut_down, take_step
from trainfit.loader.measure.pinning import emulated_pinning
from trainfit.loader.measure.run import Failure
from trainfit.loader.measure.workload import Workload
from trainfit.loader.rehearsal.utilization import WORKER, RehearsalRecord
from trainfit.results.format import duration, percent
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer

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
        """Since the beginning."""
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
