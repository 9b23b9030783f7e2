"""The last batch of an epoch: a single sample that is left over, with which some scripts fail.

BatchNorm raises in training ("Expected more than 1 value per channel"), and ``squeeze()`` drops the
batch's own dimension: hours into a run, at the end of the first epoch. A simulated run with one
sample shows it.
"""

from __future__ import annotations

from typing import Final

from trainfit.plan.runs.batches import data_set_of, drops_last
from trainfit.plan.runs.failures import NotSimulated, what_happened
from trainfit.plan.runs.progress import CHANGES, MAY_CHANGE
from trainfit.plan.sizing.laws import Batches
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.runs.spec import RunSpec

#: Batch sizes next to one that are looked at for one that leaves more than a sample, or none.
_NEAR: Final = 8


def note_remainder(job: PlannedJob, batches: Batches, spec: RunSpec) -> None:
    """Say where an epoch's last batch has one sample and the script fails with one.

    Both the present batch size and the recommended one are looked at. ``spec`` is how the
    recommended configuration runs. A run is made only where a sample is left over.
    """
    present, first = job.batch, job.first
    loader = first.outcome.loader
    if present is None or job.infers or loader is None or drops_last(first):
        return
    samples = loader.samples or data_set_of(first, present)
    if not samples or samples <= present or loader.fed[:1] != (present,):
        return
    sizes = dict.fromkeys(size for size in (present, batches.recommended) if size and size > 1)
    left = [size for size in sizes if samples % size == 1]
    if not left:
        return
    ends = "; ".join(f"{samples} = {samples // size} × {size} + 1" for size in left)
    said = f"the last batch of an epoch has 1 sample ({ends})"
    try:
        trace = job.runs.attempt(1, spec)
    except NotSimulated:
        job.notes.add(f"{said}: not simulated", MAY_CHANGE)
        return
    if trace.outcome.steps or trace.outcome.status != "failed":
        return
    near = [size for size in _near(left[-1]) if samples % size != 1][:2]
    job.notes.add(
        f"set drop_last=True in the DataLoader, or a batch size of {' or '.join(map(str, near))}: "
        f"{said}, with which {what_happened(trace.outcome)}",
        CHANGES,
        "action" if batches.recommended in (None, *left) else "note",
        first=True,
    )


def _near(batch: int) -> list[int]:
    """Batch sizes around ``batch``, the nearest first."""
    return [
        size
        for distance in range(1, _NEAR + 1)
        for size in (batch - distance, batch + distance)
        if size > 1
    ]
