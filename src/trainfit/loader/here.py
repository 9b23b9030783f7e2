"""Tunes a loader on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Final

from trainfit.hardware.survey import survey
from trainfit.hardware.system import System
from trainfit.loader.affinity import cores
from trainfit.loader.machine import loader_machine, unknowns
from trainfit.loader.model import Consumer
from trainfit.loader.tuning import tune
from trainfit.loader.workload import Workload
from trainfit.results.loader import LoaderResult

_THREADS: Final = "OMP_NUM_THREADS"


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
        notes=(*result.notes, *unknowns(machine), *ignored(os.environ)),
    )


def ignored(environment: Mapping[str, str]) -> tuple[str, ...]:
    """That OpenMP does not take the number of threads that is set, in words; nothing where it does.

    It takes positive integers, one for each level of nested parallelism ("4,2").
    """
    value = environment.get(_THREADS)
    if value is None or all(map(_is_count, value.split(","))):
        return ()
    return (
        f"{_THREADS}={value[:40]!r} is ignored (OpenMP expects a positive integer): there are as "
        f"many threads as without it; write {_THREADS}=1, or unset it",
    )


def _is_count(text: str) -> bool:
    word = text.strip()
    return word.isascii() and word.isdigit() and bool(word.strip("0"))
