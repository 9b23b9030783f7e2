"""``tune``: from a loader and its consumer to settings, confirmed by real runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Final

import torch

from trainfit.loader.choosing import (
    Choice,
    Confirmation,
    Goal,
    Trial,
    beyond_knee,
    keep_workers,
    search,
)
from trainfit.loader.model import Consumer
from trainfit.loader.probing import SECONDS, Measured, Progress, probe_workload, same_order
from trainfit.loader.runs import Run, run_loader
from trainfit.loader.workload import Workload
from trainfit.results.loader import (
    Confirmed,
    LoaderMachine,
    LoaderResult,
    LoaderSettings,
)

#: Real runs that confirm, at most.
CONFIRM: Final = 4
#: Seconds of one, and of a probe's time the share that one takes at most.
_RUN_S: Final = 3.0
_RUN_SHARE: Final = 0.15
#: Batches that one should count.
_RUN_BATCHES: Final = 25
#: Workers that are tried for each core, and the most for batches that mostly wait.
_WORKERS_A_CORE: Final = 2
_WAITING_A_CORE: Final = 8
#: Of the consumer's time, what waiting for batches may take before it counts as starved.
_STARVED: Final = 0.02

Verdict = str


def tune(
    workload: Workload,
    machine: LoaderMachine,
    consumer: Consumer,
    step_source: str,
    *,
    command: str = "",
    loader: str = "",
    seconds: float = SECONDS,
    confirm: int = CONFIRM,
    max_workers: int | None = None,
    progress: Progress | None = None,
) -> LoaderResult:
    """Probe the loader, predict all settings, confirm some, and say which and why.

    Args:
        consumer: what happens between two batches; a step of 0 s: as fast as the loader can.
        step_source: where the step's time is from, in words.
        command: the user's command, ``loader`` the loader's place in it, for the result.
        seconds: of the probe, about; a confirming run takes 15% of that.
        confirm: real runs of the chosen settings and their rivals, at most 4.
        progress: gets what is being done and the share that is over.
    """
    began = time.monotonic()
    measured = probe_workload(workload, machine, seconds, progress)
    result = LoaderResult(
        command=command,
        loader=loader,
        machine=machine,
        step_s=consumer.step_s,
        step_source=step_source,
        probe=measured.probe,
        present=workload.present,
        recommended=workload.present,
        verdict="cannot_tell",
        limit="unknown",
        reason="no run of the loader came through",
        candidates=(),
        confirmed=(),
        torch=str(torch.__version__),
    )
    if measured.fitted is not None:
        goal = Goal(consumer, workload.present, _most_workers(measured, machine, max_workers))
        runner = functools.partial(_run, workload, measured, seconds, progress)
        confirmation = Confirmation(search(measured.fitted, goal), runner, min(confirm, CONFIRM))
        result = _decided(result, workload, confirmation)
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def _decided(result: LoaderResult, workload: Workload, confirmation: Confirmation) -> LoaderResult:
    chosen = confirmation.run()
    choice = confirmation.choice
    return dataclasses.replace(
        result,
        recommended=_with_persistence(workload, choice, chosen),
        verdict="keep" if chosen == choice.goal.present else "change",
        reason="",
        candidates=tuple(choice.candidates.values()),
        confirmed=tuple(map(_confirmed, confirmation.trials)),
        too_many=beyond_knee(choice, chosen),
    )


def _most_workers(measured: Measured, machine: LoaderMachine, asked: int | None) -> int:
    """How many workers are tried: two a core, and more where batches mostly wait."""
    cores, probe = machine.usable_cores, measured.probe
    each: float = _WORKERS_A_CORE
    if probe.fetch_s and probe.fetch_cpu_s is not None:
        works = max(probe.fetch_cpu_s / probe.fetch_s, 1 / _WAITING_A_CORE)
        each = max(each, 1 / works)
    most = max(2, round(each * cores))
    return most if asked is None else min(most, asked)


def _run(
    workload: Workload,
    measured: Measured,
    seconds: float,
    progress: Progress | None,
    settings: LoaderSettings,
    consumer: Consumer,
) -> Run:
    """One confirming run, long enough for some batches."""
    if progress is not None:
        count = settings.num_workers
        progress(f"confirming {count} worker{'' if count == 1 else 's'}", 1.0)
    fetch_s = measured.probe.fetch_s or 0.0
    length = min(_RUN_S, _RUN_SHARE * seconds)
    length = max(length, min(_RUN_BATCHES * max(fetch_s, consumer.step_s), seconds / 2))
    with same_order():
        return run_loader(
            workload,
            settings,
            consumer=consumer,
            seconds=length,
            limit_s=length + 2 * seconds,
        )


def _with_persistence(workload: Workload, choice: Choice, chosen: LoaderSettings) -> LoaderSettings:
    rate = choice.see(chosen).batches_per_s
    batches = workload.epoch_batches
    epoch_s = batches / rate if batches and rate > 0 else None
    persistent = keep_workers(choice.goal.present, chosen, choice.fitted.start_s, epoch_s)
    return dataclasses.replace(chosen, persistent_workers=persistent)


def _confirmed(trial: Trial) -> Confirmed:
    run = trial.run
    handed = len(run.handed)
    return Confirmed(
        settings=trial.settings,
        predicted_batches_per_s=trial.predicted,
        measured_batches_per_s=trial.measured,
        waiting_share=run.waiting_share if trial.measured is not None else None,
        batches=handed,
        seconds=run.seconds,
        context_switches_per_batch=(
            sum(run.context_switches) / handed if run.context_switches and handed else None
        ),
        private_bytes=sum(run.private_bytes) if run.private_bytes else None,
    )
