"""Mixed precision as a part of the launch command."""

from __future__ import annotations

from trainfit.plan.command import Command
from trainfit.results.launch import LaunchPart, PartStatus
from trainfit.results.plan import PlanResult


def amp_part(plan: PlanResult, command: Command) -> LaunchPart:
    """What the launch command says of AMP, and why."""
    choice, now = plan.amp_choice, plan.now.amp
    if choice is None:
        why = "no other setting was simulated"
        return LaunchPart("amp", "cannot tell", "argument", why, now, now)
    status: PartStatus = "set" if choice.configuration is not None else "kept"
    reason, value = choice.reason, choice.dtype
    return LaunchPart("amp", status, "argument", reason, value, now, "predicted", plan.gpu)
