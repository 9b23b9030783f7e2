"""One real run with what is needed to name its fault, in the order of batches of every other."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from trainfit.hardware.host.oom_kills import between, oom_kills
from trainfit.loader.faults.diagnose import diagnose_run
from trainfit.loader.faults.failure_context import FailureContext
from trainfit.loader.measure.ranks import others
from trainfit.loader.measure.run import Run
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.loader.processes.stderr import captured_stderr
from trainfit.results.loader.candidates import LoaderMachine
from trainfit.results.loader.probe import Fault
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer

#: Batches (and steps) that a run's time limit leaves beyond its own time.
_SLOW_BATCHES: Final = 8


def run_watched(
    workload: Workload,
    settings: LoaderSettings,
    consumer: Consumer,
    seconds: float,
    *,
    patience_s: float,
    batch_s: float,
    alone_s: float | None = None,
    machine: LoaderMachine | None = None,
    saves: bool = False,
    ranks: int = 1,
) -> tuple[Run, Fault | None]:
    """One real run, with what is needed to name its fault if it fails; next to the loaders of the
    other ``ranks``.

    Each run draws the same order of batches: what differs between runs is the settings alone.
    It is taken to hang ``patience_s`` seconds after its own time, and after what some batches
    take and their steps.
    """
    limit_s = seconds + patience_s + _SLOW_BATCHES * (consumer.step_s + batch_s)
    before = oom_kills()
    with (
        same_order(workload),
        captured_stderr() as output,
        others(workload, settings, consumer, ranks - 1, limit_s) as at_work,
    ):
        run = run_loader(
            workload, settings, consumer=consumer, seconds=seconds, limit_s=limit_s, saves=saves
        )
        run = dataclasses.replace(run, ranks=1 + at_work.working())
    if run.failure is None and not run.exhausted:
        return run, None
    seen = FailureContext.of(
        run,
        limit_s=limit_s,
        alone_s=alone_s,
        shm_free_bytes=machine.shm_free_bytes if machine is not None else None,
        open_files=machine.open_files if machine is not None else None,
        oom_kills=between(before, oom_kills()),
        output=output.text,
    )
    return run, diagnose_run(run, workload, seen)


@contextlib.contextmanager
def same_order(workload: Workload) -> Iterator[None]:
    """Leave random numbers as they are: the next run draws the same order of batches.

    Runs with workers happen in a fork and change nothing here; those without do.
    """
    state, generators = torch.random.get_rng_state(), workload.generators
    states = [each.get_state() for each in generators]
    others = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])
        for generator, former in zip(generators, states, strict=True):
            generator.set_state(former)
