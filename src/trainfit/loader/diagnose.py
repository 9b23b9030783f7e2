"""Diagnosis of a loader that failed under measurement: the failure, and what its data set tells.

:mod:`trainfit.findings.failure` knows the causes; this adds what only a look at the data set can
say. :mod:`trainfit.loader.preflight` looks for faults before any run,
:mod:`trainfit.loader.measure.probe_runs` says which settings a fault leaves.
"""

from __future__ import annotations

import dataclasses

from trainfit.findings import fixes, tracebacks
from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.failure import clipped, of_failure, raised_words, spoken
from trainfit.hardware.machine.cgroup import OomKills
from trainfit.hooks.held_objects import open_handles
from trainfit.loader.measure.records import BEGAN, WALL, Run
from trainfit.loader.measure.workload import Workload
from trainfit.loader.pickling import guard_problem, pickled, session_problem
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.text import count, duration, exception_text, short


def context_of(
    run: Run,
    *,
    limit_s: float | None = None,
    alone_s: float | None = None,
    batch_bytes: int | None = None,
    batch_tensors: int | None = None,
    shm_free_bytes: int | None = None,
    ram_free_bytes: int | None = None,
    open_files: int | None = None,
    oom_kills: OomKills | None = None,
    output: str = "",
) -> FailureContext:
    """The context of a run, with what the caller knows in addition."""
    records = [fetch for fetch in run.fetches if len(fetch)]
    started = [at for at in run.started if at]
    silent = None
    if records and started and limit_s is not None:
        last = max(float((record[:, BEGAN] + record[:, WALL]).max()) for record in records)
        # The time limit ran from before the first worker had started.
        silent = max(0.0, min(started) + limit_s - last)
    return FailureContext(
        fetched=tuple(len(fetch) for fetch in run.fetches) or None,
        longest_s=max((float(record[:, WALL].max()) for record in records), default=None),
        silent_s=silent,
        started=len(started) if run.settings.num_workers else None,
        limit_s=limit_s,
        alone_s=alone_s,
        batch_bytes=run.batch_bytes or batch_bytes,
        batch_tensors=run.batch_tensors or batch_tensors,
        shm_free_bytes=shm_free_bytes,
        ram_free_bytes=ram_free_bytes,
        open_files=open_files,
        oom_kills=oom_kills,
        output=output,
    )


def diagnose_run(
    run: Run, workload: Workload | None = None, context: FailureContext | None = None
) -> Finding:
    """What went wrong in a run that failed, or that ended before its loader should."""
    context = context if context is not None else context_of(run)
    if run.failure is not None:
        return diagnose(run.failure, run.settings, workload, context)
    handed = count(len(run.handed), "batch", "batches")
    return failure_finding(
        "not_restartable" if len(run.handed) else "no_batches",
        f"The loader stops after {handed}" if len(run.handed) else "The loader returns no batch",
        f"{handed} returned, then the loader stopped, although it is restarted after each epoch",
        fixes.NOT_RESTARTABLE if len(run.handed) else fixes.NO_BATCHES,
        run.settings,
    )


def diagnose(
    failure: Failure,
    settings: LoaderSettings,
    workload: Workload | None = None,
    context: FailureContext | None = None,
) -> Finding:
    """Name what a failed run means.

    Args:
        settings: what the loader ran with.
        workload: what it loaded; where it is given and the failure leaves it open, the data
            set's attributes are looked at.
        seen: what else is known; evidence that is not given is said to be missing.
    """
    context = context or FailureContext()
    if workload is not None and failure.error_type:
        context = dataclasses.replace(context, handles=open_handles(workload.dataset))
    found = of_failure(failure, settings, context)
    if found is None:
        found = _unexplained(failure, settings, context)
    return _looked_closer(found, workload, context)


def _unexplained(failure: Failure, settings: LoaderSettings, context: FailureContext) -> Finding:
    """A failure of unknown cause still bounds the settings."""
    said = clipped(spoken(failure, context))
    if failure.exit_code is not None:
        summary = f"The main process ended with exit code {failure.exit_code}"
        return failure_finding("process_exited", summary, said, fixes.EXITED, settings)
    if not failure.error_type:
        summary = "The run failed without an error message"
        return failure_finding("died", summary, said, fixes.DIED, settings)
    raised = tracebacks.parse(failure.error_type, failure.message, failure.traceback)
    words = exception_text(raised.type, short(raised.message))
    evidence = clipped(raised_words(raised))
    kind, who = "exception", "The loader"
    if raised.worker is not None:
        kind, who = "worker_exception", f"Worker {raised.worker}"
    title = f"{who} raises {words}"
    return failure_finding(kind, title, evidence, fixes.EXCEPTION, settings, raised.place)


def _looked_closer(fault: Finding, workload: Workload | None, context: FailureContext) -> Finding:
    """The fault with the attribute of the data set, or the line of the script, that causes it."""
    silent_s = context.silent_s or context.limit_s
    if fault.kind in ("hung", "slow_dataset") and workload is not None and silent_s:
        limit_s = workload.timeout_s
        if 0 < limit_s < silent_s:
            title = f"A batch needs longer than the DataLoader's timeout of {duration(limit_s)}"
            cause = f"{fault.title}; {fault.cause}"
            return failure_finding(
                "timeout", title, cause, fixes.TIMEOUT, fault.loader, fault.place
            )
    if fault.kind == "not_picklable" and workload is not None:
        return pickled(workload).fault or fault
    if fault.kind == "spawn_start":
        problem = guard_problem() or (session_problem(workload) if workload else None)
        if problem is not None:
            cause = clipped(f"{fault.cause}; {problem.cause}")
            return dataclasses.replace(problem, cause=cause, loader=fault.loader)
    return fault
