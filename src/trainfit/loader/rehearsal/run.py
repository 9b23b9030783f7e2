"""A rehearsal: the user's loop over the real DataLoader, epoch after epoch, against a GPU step.

Whatever ends it, the result holds what was seen until then (:mod:`.rehearsal_loop`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from trainfit.hardware.host.oom_kills import between, oom_kills
from trainfit.loader.faults.diagnose import diagnose_run
from trainfit.loader.faults.failure_context import FailureContext
from trainfit.loader.measure.instrument import WorkerRecords
from trainfit.loader.measure.run import Run
from trainfit.loader.measure.running import PATIENCE_S, watched
from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.loader.processes.other_processes import OtherProcesses, OtherProcessLoad
from trainfit.loader.processes.progress import current
from trainfit.loader.rehearsal import idle_causes as idle
from trainfit.loader.rehearsal import utilization as utilisation
from trainfit.loader.rehearsal.loop import Journal, LoopEnd, Tell, made_by, run_epochs
from trainfit.loader.rehearsal.utilization import RehearsalRecord
from trainfit.results.format import duration
from trainfit.results.loader.rehearsal import Rehearsal
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer, LoadingRequest

#: Batches that a rehearsal can note down; it ends with the last.
_MOST_BATCHES: Final = 1 << 22
_NEVER_BUSY: Final = "a step time of 0 leaves the GPU idle: give the step time (--step-time 40ms)"


@dataclasses.dataclass(frozen=True)
class ResultLabels:
    """What a result says of itself: whose loader it is, and where its figures are from."""

    command: str = ""
    loader: str = ""
    settings_source: str = ""


def rehearse(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    duration_s: float,
    progress: Tell | None = None,
    *,
    names: ResultLabels | None = None,
) -> Rehearsal:
    """Run ``for epoch: for batch in loader: step`` for ``duration_s`` seconds.

    The loader has the user's own epochs: where one ends, its iterator is recreated, as a
    user's loop does. Never raises for what the loader does, nor for Ctrl-C: the result says
    so in ``ended``, and holds what was seen until then.

    Args:
        progress: called every few seconds, in the process that runs the loop.

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
        seen = FailureContext.of(
            run, limit_s=duration_s + PATIENCE_S, oom_kills=between(kills, oom_kills())
        )
        fault = diagnose_run(run, workload, seen)
    result = _result(workload, observed, consumer, duration_s, end, names or ResultLabels())
    return dataclasses.replace(result, fault=fault, others_cores=others_cores, others=others)


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


def rehearse_request(workload: Workload, request: LoadingRequest) -> Rehearsal:
    """What :mod:`trainfit.loader.child` calls for ``trainfit rehearse``.

    ``request.arguments`` has ``duration_s`` and, in ``settings``, those that differ from the
    script's own. SIGINT ends the rehearsal, not the process: what was seen is the result.
    """
    # A script may have replaced the handler, and a shell's background job has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = json.loads(request.arguments)
    step, own = request.step or Consumer(0.0), workload.present
    if step.step_s <= 0:
        raise LoaderError(f"{_NEVER_BUSY}; with --gpu it could not be determined ({step.source})")
    given = arguments["settings"]
    settings = dataclasses.replace(own, **given)
    changed = [name for name, value in given.items() if getattr(own, name) != value]
    current()(f"rehearsing for {duration(arguments['duration_s'])}", 0.0)
    return rehearse(
        workload,
        settings,
        step,
        arguments["duration_s"],
        current(),
        names=ResultLabels(
            command=request.command,
            settings_source="the script's own" + (f" but {', '.join(changed)}" if changed else ""),
        ),
    )


def _check(consumer: Consumer, duration_s: float) -> None:
    if consumer.step_s <= 0:
        raise LoaderError(_NEVER_BUSY)
    if not duration_s > 0:
        raise LoaderError(
            f"a rehearsal of {duration(duration_s)} is too short: give --duration 30s"
        )


def _rows(consumer: Consumer, duration_s: float) -> int:
    """As many batches as there can be: none takes less than its step (and a microsecond)."""
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
    names: ResultLabels,
) -> Rehearsal:
    steady = utilisation.steady_rates(observed, workload.batch_size)
    epochs = utilisation.epochs(observed)
    epoch_s, measured = utilisation.epoch_seconds(epochs, workload.epoch_batches, steady)
    idle_s, dips = idle.explain(observed)
    return Rehearsal(
        command=names.command,
        loader=names.loader or workload.name,
        batch_size=workload.batch_size,
        epoch_batches=workload.epoch_batches,
        settings=observed.settings,
        settings_source=names.settings_source,
        step_s=consumer.step_s,
        step_source=consumer.source,
        ended=end.how,
        duration_s=duration_s,
        overall=utilisation.overall_rates(observed, workload.batch_size),
        steady=steady,
        timeline=utilisation.timeline(observed),
        idle_s=idle_s,
        dips=dips,
        epochs=epochs,
        epochs_begun=int(observed.epochs[-1]) + 1 if len(observed.epochs) else 1,
        epoch_s=epoch_s,
        epoch_measured=measured,
        torch=torch.__version__,
    )
