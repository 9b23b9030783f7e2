"""One real run of a DataLoader with a consumer that waits a step's time per batch.

A run with workers happens in a forked process of its own, which may crash, be killed or hang;
one without workers happens here, with all threads that PyTorch has.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from trainfit.loader.measure.instrument import (
    COLUMNS,
    STACKS_SIGNAL,
    WALL,
    TransferTimes,
    WorkerRecords,
    time_fetches,
)
from trainfit.loader.measure.loop import Loop
from trainfit.loader.measure.pinning import pinning
from trainfit.loader.measure.run import Failure, Run
from trainfit.loader.measure.workload import Workload
from trainfit.loader.processes import isolated
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer

_T = TypeVar("_T")
#: Seconds beyond a run's own after which it is taken to hang.
PATIENCE_S: Final = 20.0


def run_loader(
    workload: Workload,
    settings: LoaderSettings,
    *,
    consumer: Consumer | None = None,
    seconds: float = 2.0,
    limit_s: float | None = None,
    most_batches: int | None = None,
    saves: bool = False,
) -> Run:
    """Run the workload's loader with these settings for so many seconds of counted batches.

    The run ends sooner after ``most_batches`` batches. It never raises for what the loader
    does: that is the result's ``failure``.

    Args:
        consumer: what happens between two batches; by default nothing does.
        limit_s: until it is taken to hang; by default 20 s more than ``seconds``.
        saves: save a checkpoint at the end, while the workers go on.
    """
    consumer = consumer or Consumer(0.0)
    limit_s = seconds + PATIENCE_S if limit_s is None else limit_s
    with tempfile.TemporaryDirectory(prefix="trainfit-loader-") as folder:
        notebook = WorkerRecords(Path(folder), max(1, settings.num_workers))
        # Other ranks' loaders and who watches the cores are this process', not others'.
        function = functools.partial(
            _run, workload, settings, consumer, seconds, most_batches, saves, notebook, os.getpid()
        )
        value, failure = watched(function, settings, limit_s, notebook)
        if value is not None:
            return value
        fetches = tuple(notebook.batches(worker) for worker in range(settings.num_workers))
        started = tuple(notebook.started())
        return Run(settings, consumer.step_s, fetches=fetches, started=started, failure=failure)


def watched(
    function: Callable[[], _T], settings: LoaderSettings, limit_s: float, notebook: WorkerRecords
) -> tuple[_T | None, Failure]:
    """Call what iterates a loader of these settings: in a forked process with workers, here
    without. Its value, or why there is none."""
    if settings.num_workers:
        ended = isolated.call(function, limit_s, STACKS_SIGNAL)
    else:
        ended = isolated.call_here(function, limit_s)
    return ended.value, Failure(
        ended.error_type,
        ended.message,
        ended.traceback,
        ended.exit_code,
        hung=ended.hung,
        stacks=notebook.stacks() if ended.failed else "",
    )


def _run(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    seconds: float,
    most_batches: int | None,
    saves: bool,
    notebook: WorkerRecords,
    root: int,
) -> Run:
    if settings.num_workers:
        notebook.watch_stacks()
    records = np.zeros((1 << 14, COLUMNS))
    restore = None if settings.num_workers else time_fetches(records)
    try:
        with pinning(settings), TransferTimes() as receipts:
            loader = workload.loader(settings, notebook.init)
            loop = Loop(loader, settings, consumer, seconds, most_batches, saves, root)
            failure = loop.run()
        alone = records[records[:, WALL] > 0]
        count = settings.num_workers
        return Run(
            settings,
            consumer.step_s,
            began=loop.began,
            handed=np.array(loop.handed),
            waited=np.array(loop.waited),
            next_cpu=np.array(loop.next_cpu),
            steps=np.array(loop.steps),
            fetches=tuple(notebook.batches(w) for w in range(count)) if count else (alone,),
            received=receipts.taken,
            pinned=receipts.pinned,
            started=tuple(notebook.started())[:count],
            batch_bytes=loop.batch_bytes,
            batch_tensors=loop.batch_tensors,
            float_bytes=loop.float_bytes,
            private_bytes=loop.private_bytes,
            context_switches=loop.context_switches,
            core_waits_s=loop.core_waits_s,
            save_s=loop.save_s,
            others_cores=loop.others_cores,
            exhausted=loop.exhausted,
            failure=failure,
        )
    finally:
        if restore is not None:
            restore()
