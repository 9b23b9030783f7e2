"""Do a script's own options set its DataLoader as the launch command wants it? One run shows."""

from __future__ import annotations

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import LOADER_TUNABLES
from trainfit.plan.launch.build import launch_values, launched_loader
from trainfit.plan.options.detected import CommandOptions
from trainfit.plan.options.proof import check
from trainfit.plan.runs.tracing import Tracer
from trainfit.results.plan.result import PlanResult


def with_loader_options(
    plan: PlanResult, options: CommandOptions, gpu: GpuSpec, time_limit_s: float
) -> Command:
    """The command with its proven tunables and those options of the DataLoader that have their
    effect at the recommended values; the others are left to the user.

    A simulated run of one step is made where there is something to prove.
    """
    command, found = options.command, launched_loader(plan.loading)
    values = launch_values(plan, command, found) if found is not None else {}
    supposed = {name: command.present[name] for name in command.supposed & set(LOADER_TUNABLES)}
    wanted = {
        name: values[name]
        for name, present in supposed.items()
        if values.get(name, present) != present
    }
    if not wanted:
        return options.proven_command
    with Tracer(command, gpu, steps=1, time_limit_s=time_limit_s) as tracer:
        effects = check(command, wanted, tracer)
    return options.proven([each.name for each in effects if each.had]).proven_command
