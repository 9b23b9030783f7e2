"""The batch size at which a command's DataLoader is measured, and its consequences for another
one."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.plan.result import PlanResult
from trainfit.results.runs.loading import Consumer

#: Seconds that loading one batch may take in measurements: with longer ones, runs of some batches
#: each take minutes, and say no more of a sample.
_LONGEST_S: Final = 0.25


def launched_batch(plan: PlanResult) -> int | None:
    """The recommended batch size, where the command has it and the data set fills one; else the
    present one, for that is what its DataLoader gives."""
    best = plan.chosen.recommended_batch
    if not best or not plan.batch_in_command or (plan.samples is not None and best > plan.samples):
        return plan.now.batch_size
    return best


def tuned_batch(plan: PlanResult) -> int | None:
    """The launched one; smaller if loading it is slow, but never below the current one."""
    batch, present, sample_s = launched_batch(plan), plan.now.batch_size, plan.sample_loading_s
    if not batch or not present or not sample_s or batch * sample_s <= _LONGEST_S:
        return batch
    return min(batch, max(present, int(_LONGEST_S / sample_s)))


def scaled(step: Consumer, plan: PlanResult) -> Consumer:
    """The step of the launched batch size for the batches that are measured: both have the same
    samples a second."""
    batch, tuned = launched_batch(plan), tuned_batch(plan)
    if not batch or not tuned or batch == tuned:
        return step
    share = tuned / batch
    return Consumer(
        share * step.step_s,
        share * step.work_s,
        share * step.pageable_s,
        f"{step.source}, scaled to {tuned} of {batch} samples",
    )


def within_memory(found: LoaderResult, batch: int | None) -> LoaderSettings:
    """The recommended settings, with fewer batches under way where those of ``batch`` samples do
    not fit the shared memory and the RAM that are free."""
    settings, probe = found.recommended, found.probe
    room = [
        each
        for each in (found.machine.shm_free_bytes, found.machine.available_bytes)
        if each is not None
    ]
    if not batch or not probe.batch_size or batch <= probe.batch_size or not room:
        return settings
    most = min(room) * probe.batch_size / (batch * max(1, probe.batch_bytes))
    while settings.tokens + 1 > most:
        if settings.prefetch_factor > 1:
            less = settings.prefetch_factor - 1
            settings = dataclasses.replace(settings, prefetch_factor=less)
        elif settings.num_workers > 1:
            settings = dataclasses.replace(settings, num_workers=settings.num_workers - 1)
        else:
            break
    return settings
