"""What comes at the end of an epoch: an evaluation, a checkpoint, in runs of their own.

The training's DataLoader is cut short, so that the script comes there within a few steps; those of
an evaluation are, too, to two lengths. Memory that grows over it is carried on to its real length.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from trainfit.findings.out_of_memory import FullMemory, of_full_memory
from trainfit.memory.held import full_memory
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.runs.failures import NotSimulated, what_happened
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.configuration import EpochEnd
from trainfit.results.findings import Finding
from trainfit.results.runs.recording import STEP_END
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.trace import LoaderCut

#: Steps of an epoch that is cut short, and epochs in which an evaluation is waited for.
_STEPS, _EPOCHS = 2, 3
#: Batches of an evaluation: two lengths tell whether memory grows over it.
_LENGTHS: Final = (8, 16)
#: Seconds for each of the runs.
_LIMIT_S: Final = 120.0


def epoch_end(job: PlannedJob) -> tuple[EpochEnd | None, tuple[Finding, ...]]:
    """What the first evaluation and checkpoint need at the present batch size, and what fills the
    memory where that does not fit; ``None`` where the script does not train."""
    if job.infers:
        return None, ()
    loader, makeup = job.first.outcome.loader, job.recording.makeup
    if loader is None or loader.index is None:
        why = "no DataLoader tells where an epoch ends"
        return EpochEnd("not simulated", why), ()
    each = (makeup.loader_batches if makeup is not None else None) or 1
    specs = [_cut(loader.index, _STEPS * each, length) for length in _LENGTHS]
    try:
        for spec in specs:
            job.runs.start(job.batch, spec)
        traces = [job.runs.attempt(job.batch, spec) for spec in specs]
    except NotSimulated as error:
        return EpochEnd("not simulated", str(error)), ()
    failed = next((each for each in traces if not _went_on(each)), None)
    if failed is not None:
        return EpochEnd("not simulated", what_happened(failed.outcome)), ()
    coverage = traces[-1].outcome.coverage
    if coverage is None or not coverage.evaluated:
        ended = traces[-1].outcome.status == "ended"
        why = "" if ended else f"no evaluation was seen in {_EPOCHS} epochs"
        return EpochEnd("none", why, saved=coverage is not None and coverage.saved), ()
    return _measured(job, traces, coverage.evaluation_batches, saved=coverage.saved)


def _cut(index: int, batches: int, others: int) -> RunSpec:
    return dataclasses.replace(
        AS_WRITTEN,
        cut=LoaderCut(index, batches, others),
        steps=_STEPS * _EPOCHS,
        time_limit_s=_LIMIT_S,
        title=f"its evaluation ({others} batches)",
    )


def _went_on(trace: Trace) -> bool:
    return trace.outcome.status in ("finished", "ended") and trace.recording is not None


def _measured(
    job: PlannedJob, traces: list[Trace], length: int | None, *, saved: bool
) -> tuple[EpochEnd, tuple[Finding, ...]]:
    """The peak after the last step, at both lengths and at the real one."""
    ends = [_after_steps(job.memory_model.unlimited(Stream.of(recording_of(t)))) for t in traces]
    short, long = (end.peak_allocated for end in ends)
    fewer, more = _LENGTHS
    grows = max(0, long - short) / (more - fewer)
    if grows and length is None:
        return EpochEnd("not simulated", "its memory grows, and its length is not known"), ()
    left = max(0, (length or 0) - more)
    allocated = round(long + grows * left)
    unused = max(0, ends[-1].peak_reserved - max(long, *_peaks(ends[-1])))
    device = allocated + unused + job.memory_model.context_bytes
    fits = device <= job.memory_model.capacity_bytes
    found = EpochEnd("simulated", "", saved, allocated, device, fits, length, round(grows))
    if fits:
        return found, ()
    return found, of_full_memory(_at_the_end(full_memory(recording_of(traces[-1]), ends[-1]),
                                             allocated, (more + left) / more))  # fmt: skip


def _peaks(outcome: Replay) -> list[int]:
    return [allocated for allocated, _ in outcome.step_peaks]


def _after_steps(outcome: Replay) -> Replay:
    """``outcome`` with the peak of what came after its last whole step."""
    events = outcome.stream.events
    ends = np.flatnonzero(events % 4 == STEP_END)
    first = int(ends[-1]) if len(ends) else 0
    at = first + int(outcome.allocated_after[first:].argmax())
    peak = int(outcome.allocated_after[at])
    return dataclasses.replace(outcome, peak_event=at, peak_allocated=peak)


def _at_the_end(memory: FullMemory, allocated: int, times: float) -> FullMemory:
    """What is kept of each batch, by the evaluation's last."""
    held = [
        dataclasses.replace(each, nbytes=round(each.nbytes * times), kept=round(each.kept * times))
        if each.kept
        else each
        for each in memory.held
    ]
    held.sort(key=lambda each: -each.nbytes)
    return dataclasses.replace(memory, held=held, allocated_bytes=allocated)
