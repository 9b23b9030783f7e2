"""Memory that steps leave behind and an epoch's end lets go: outputs that are kept for a metric."""

from __future__ import annotations

import dataclasses

from trainfit.memory.growth import is_freed_by_epochs
from trainfit.plan.epoch_end import several_epochs
from trainfit.plan.runs.failures import NotSimulated
from trainfit.plan.runs.tracing import recording_of
from trainfit.plan.sizing.memory_model import Growth
from trainfit.plan.sizing.planned_job import PlannedJob


def within_epochs(job: PlannedJob) -> PlannedJob:
    """``job`` with room for what an epoch's steps keep, where several epochs that are cut short let
    it go at the end of each; as it is where they do not, or memory does not grow."""
    pattern, coverage = job.pattern, job.first.outcome.coverage
    epoch = coverage.steps_per_epoch if coverage is not None else None
    growth, full = pattern.growth_bytes_per_step, pattern.steps_until_full
    if not (epoch and growth and full) or not Growth.of(pattern, job.memory_model).unfit:
        return job
    if pattern.unit != "optimizer step" or job.infers or epoch >= full:
        return job
    more = growth * max(0, epoch - pattern.steps)
    spec, steps = several_epochs(job)
    try:
        trace = job.runs.attempt(job.batch, spec)
    except NotSimulated:
        return job
    if trace.recording is None or not is_freed_by_epochs(recording_of(trace), steps):
        return job
    model = job.memory_model
    held = model.other_processes_bytes + more
    return dataclasses.replace(
        job,
        pattern=dataclasses.replace(
            pattern, grows_by_bytes=more, freed_every=epoch, steps_until_full=None
        ),
        memory_model=dataclasses.replace(model, other_processes_bytes=held),
    )
