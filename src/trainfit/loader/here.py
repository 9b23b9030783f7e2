"""Tunes a loader on this machine."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from trainfit.hardware.survey import survey
from trainfit.hardware.system import System
from trainfit.hardware.thread_variables import misread_lines
from trainfit.loader.affinity import cores
from trainfit.loader.machine import loader_machine, unknowns
from trainfit.loader.model import Consumer
from trainfit.loader.tuning import tune
from trainfit.loader.workload import Workload
from trainfit.results.loader import LoaderResult


def tune_here(
    workload: Workload, consumer: Consumer, step_source: str, *, ranks: int = 1, **options: Any
) -> LoaderResult:
    """:func:`trainfit.loader.tuning.tune` as one of ``ranks`` processes that share this machine,
    with the CPUs to run on and what of the machine cannot be told."""
    machine = survey(System())
    share = loader_machine(machine, ranks)
    if ranks > 1:
        options = {**options, "ranks": ranks, "whole": loader_machine(machine)}
    result = tune(workload, share, consumer, step_source, **options)
    return dataclasses.replace(
        result,
        cores=cores(machine, result.recommended, ranks),
        notes=(*result.notes, *unknowns(machine), *misread_lines(os.environ)),
    )
