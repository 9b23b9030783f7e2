"""Measures what a sample needs to be loaded where the simulated run made it look slow.

On the simulated device a data set's own tensors are slow: each operator of PyTorch passes through
the simulation. A loader is measured at a smaller batch size only where its samples really are slow.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from trainfit.plan.command.parsing import Command
from trainfit.plan.dataloader.measure import LoadingOptions, call_on_loader
from trainfit.plan.dataloader.tuned_batch import launched_batch, tuned_batch
from trainfit.results.plan.result import PlanResult

#: Seconds that a sample of a command's DataLoader needs; ``None``: could not be measured.
TimeSamples = Callable[[Command], float | None]

_FUNCTION = "trainfit.loader.measure.sample_cost:time_samples"


def with_sample_cost(
    plan: PlanResult, command: Callable[[int | None], Command], time_samples: TimeSamples
) -> PlanResult:
    """``plan`` with a measured time to load a sample, where its DataLoader would be measured at a
    smaller batch size than is launched otherwise. ``command`` gives the one of a batch size."""
    if not plan.can_start or tuned_batch(plan) == launched_batch(plan):
        return plan
    try:
        sample_s = time_samples(command(tuned_batch(plan)))
    except Exception:  # what is wrong with it, tuning says; what has been planned must not be lost
        return plan
    return plan if sample_s is None else dataclasses.replace(plan, sample_loading_s=sample_s)


def timed_samples(
    command: Command, options: LoadingOptions, progress: Callable[[str], None]
) -> float | None:
    """:data:`TimeSamples` in a child process."""
    loaded = call_on_loader(command, options, progress, _FUNCTION)
    if loaded.interrupt is not None:
        raise loaded.interrupt
    found = json.loads(loaded.result) if loaded.result else {}
    sample_s: float | None = found.get("sample_s")
    return sample_s
