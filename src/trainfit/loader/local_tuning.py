"""Tunes a loader on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from trainfit.hardware.host.system import System
from trainfit.hardware.host.thread_variables import misread_lines
from trainfit.hardware.machine.survey import survey
from trainfit.loader.advice.affinity import cores, why_none
from trainfit.loader.advice.reasons import setting_reasons
from trainfit.loader.advice.thread_reasons import VariableValue, with_present
from trainfit.loader.measure.workload import Workload
from trainfit.loader.model.machine_limits import loader_machine, unknowns
from trainfit.loader.tune.tuning import tune
from trainfit.results.loader.advice import SetBy
from trainfit.results.loader.result import LoaderResult
from trainfit.results.runs.loading import Consumer


def tune_here(
    workload: Workload,
    consumer: Consumer,
    *,
    ranks: int = 1,
    command_sets: Mapping[str, str] | None = None,
    started_with: Mapping[str, str] | None = None,
    **options: Any,
) -> LoaderResult:
    """:func:`trainfit.loader.tune.tuning.tune` as one of ``ranks`` processes that share this
    machine,
    with the CPUs to run on, what of the machine is unknown, and the reason of each setting.

    ``command_sets`` are the variables that the user's command sets, ``started_with`` is the
    environment before a script could change it (by default, as it is now).
    """
    machine = survey(System())
    share = loader_machine(machine, ranks)
    if ranks > 1:
        options = {**options, "ranks": ranks, "whole": loader_machine(machine)}
    result = tune(workload, share, consumer, **options)
    now = _present(command_sets or {}, started_with or os.environ)
    result = dataclasses.replace(
        result,
        cores=cores(machine, result.recommended, ranks),
        notes=(*result.notes, *unknowns(machine), *misread_lines(os.environ)),
        variables=with_present(result, now),
    )
    why = why_none(machine, result.recommended, ranks)
    return dataclasses.replace(result, reasons=setting_reasons(result, now, why))


def _present(
    command_sets: Mapping[str, str], started_with: Mapping[str, str]
) -> dict[str, VariableValue]:
    """The environment that the job runs in, with who set each variable."""

    def setter(name: str, value: str) -> SetBy:
        if started_with.get(name) != value:
            return "script"
        return "command" if name in command_sets else "shell"

    return {name: VariableValue(value, setter(name, value)) for name, value in os.environ.items()}
