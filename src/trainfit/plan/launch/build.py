"""The launch command of a plan, made once, with the reason of each part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import loader_values
from trainfit.plan.launch.line import launch, useless_variables
from trainfit.plan.launch.parts import launch_parts
from trainfit.plan.sizing.effective_batch import accumulation_for
from trainfit.results.loader.result import LoaderResult
from trainfit.results.plan.loading import DataLoading
from trainfit.results.plan.result import PlanResult


def with_launch(plan: PlanResult, command: Command) -> PlanResult:
    """``plan`` with its launch line and the parts of that; of ``loading`` what there is."""
    found = launched_loader(plan.loading)
    values = launch_values(plan, command, found)
    variables, cores = ((), None) if found is None else (found.variables, found.cores)
    useless = useless_variables(command, found)
    line = launch(command, values, plan.variables, variables, cores, useless)
    parts = launch_parts(plan, command, values, line, found) if plan.can_start else ()
    return dataclasses.replace(plan, launch=line.line, launch_parts=parts)


def launched_loader(loading: DataLoading | None) -> LoaderResult | None:
    """What was found of the DataLoader, with the settings that are launched as recommended.

    Which cores suit is told of this machine alone.
    """
    if loading is None or loading.result is None:
        return None
    if loading.launched is None:
        return loading.result
    return dataclasses.replace(loading.result, recommended=loading.launched, cores=None)


def launch_values(
    plan: PlanResult, command: Command, found: LoaderResult | None
) -> Mapping[str, str]:
    """What the command's placeholders are filled with."""
    values: dict[str, str] = {}
    best, choice = plan.chosen.recommended_batch, plan.amp_choice
    if "batch_size" in command.present and best:
        values["batch_size"] = str(best)
    present, by_noise = plan.now.batch_size, plan.chosen.by_noise
    values |= accumulation_for(command, plan.step, present, best, by_noise).values
    if "amp" in command.present and choice is not None and choice.value is not None:
        values["amp"] = choice.value
    if found is not None:
        values |= _loader_values(command, found)
    return values


def _loader_values(command: Command, found: LoaderResult) -> dict[str, str]:
    """What is written into the DataLoader's placeholders; nothing that PyTorch refuses where the
    number of workers stays 0 because the command has no placeholder for it."""
    values = loader_values(command.present, found.recommended)
    if "num_workers" not in command.present and not found.present.num_workers:
        for name in ("prefetch_factor", "persistent_workers"):
            values.pop(name, None)
    return values
