"""A larger batch gains nothing where the DataLoader gives fewer samples/s than the GPU uses
at the current one."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.results.format import rate
from trainfit.results.loader.result import BUSY
from trainfit.results.plan.configuration import BatchLimits, Configuration
from trainfit.results.plan.result import PlanResult

#: By how much the GPU must be faster: a loader's rate is good to some percent.
_CLEARLY: Final = 1.1
#: The same where the loader's rate is predicted, from runs that other processes disturbed.
_PREDICTED: Final = 2.0


def kept_batch(plan: PlanResult) -> PlanResult:
    """``plan`` with the current batch size instead of a larger one, where the DataLoader with the
    recommended settings is clearly the limit at both; as it is where that cannot be told."""
    present, best = plan.now.batch_size, plan.chosen.recommended_batch
    given, wanted = _given(plan), _taken(plan)
    if not present or not best or best <= present or not plan.now.fits:
        return plan
    evidence = plan.loading.evidence if plan.loading is not None else ""
    least = _PREDICTED if evidence == "busy" else _CLEARLY
    if given is None or wanted is None or wanted < least * given:
        return plan
    marked = f" ({BUSY})" if evidence == "busy" else ""
    reason = (
        f"the DataLoader gives {rate(given)} samples/s{marked}, the GPU at least "
        f"{rate(wanted)} at batch size {present}: a larger batch gains nothing"
    )
    kept = _kept(plan.chosen, present, reason)
    changed = dataclasses.replace(plan, recommended=plan.now.memory, batch_check=None)
    choice = plan.amp_choice
    if choice is None or choice.configuration is None:
        return dataclasses.replace(changed, now=kept)
    memory = plan.chosen.memory
    choice = dataclasses.replace(choice, configuration=kept)
    return dataclasses.replace(changed, amp_choice=choice, recommended=memory)


def _kept(configuration: Configuration, present: int, reason: str) -> Configuration:
    limits = configuration.limits or BatchLimits(None, None)
    limits = dataclasses.replace(limits, reason=reason, epoch_steps=None)
    return dataclasses.replace(configuration, recommended_batch=present, limits=limits)


def _given(plan: PlanResult) -> float | None:
    """Samples a second of the DataLoader with the recommended settings."""
    found = plan.loading.result if plan.loading is not None else None
    if found is None or not found.probe.batch_size:
        return None
    batches = found.rate(found.recommended)
    return batches * found.probe.batch_size if batches else None


def _taken(plan: PlanResult) -> float | None:
    """Samples a second of the GPU at the current batch size: the slow end of what is predicted."""
    step = plan.speed.now if plan.speed is not None else None
    if not plan.batch_in_command or step is None or not step.samples_per_s:
        return None
    return step.samples_per_s * step.seconds / step.range_s[1]
