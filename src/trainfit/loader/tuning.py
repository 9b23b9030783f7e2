"""``tune``: from a loader and its consumer to settings, confirmed by real runs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Final

import torch

from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.loader import threads
from trainfit.loader.confirmation import nothing_ran
from trainfit.loader.measure.fitting import Fitted, share_of
from trainfit.loader.measure.probe_runs import KINDS, OF_WORKERS
from trainfit.loader.measure.processes import MeasurementProgress, NullProgress, PartialProgress
from trainfit.loader.measure.running import PAGEABLE_BYTES_PER_S
from trainfit.loader.measure.workload import Workload
from trainfit.loader.probe import Measured, probe_workload
from trainfit.loader.tuner import HELD, PROBE_SHARE, Tuner
from trainfit.results.dataloader import LoaderMachine, Probe
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import AS_FAST, Consumer
from trainfit.results.runs.spec import TuningSpec

#: Of a probe's time, what a second probe takes that holds libraries to one thread.
_HELD_TIME: Final = 0.6


def tune(
    workload: Workload,
    machine: LoaderMachine,
    spec: TuningSpec,
    *,
    command: str = "",
    loader: str = "",
    progress: MeasurementProgress | None = None,
    watch: CoreSpeeds | None = None,
    whole: LoaderMachine | None = None,
) -> LoaderResult:
    """Probe the loader, predict all settings, confirm some, and say which and why.

    It never raises for what the data set does: faults are in the result.

    Args:
        spec: of its ranks ``machine`` is one's share, and ``whole`` is what all of them have;
            without a step, as fast as the loader can.
        command: the user's command, ``loader`` the loader's place in it, for the result.
        progress: receives what is being done, and keeps partial results.
        watch: who watches the cores' speed, if somebody does already.
    """
    began = time.monotonic()
    ranks, seconds = spec.ranks, spec.seconds
    progress = progress or NullProgress()
    whole = whole or machine
    with contextlib.nullcontext(watch) if watch is not None else CoreSpeeds() as watch:
        part = PartialProgress(progress, 0.0, PROBE_SHARE)
        alone = probe_workload(workload, whole, seconds, part, watch)
        measured = _of_one_rank(alone, machine, ranks)
        consumer = _copying(spec.step or Consumer(0.0, source=AS_FAST), measured.probe)
        result = _blank(workload, machine, consumer, measured, command, loader)
        result = dataclasses.replace(result, ranks=ranks)
        if measured.fitted is not None:
            told = dataclasses.replace(spec, step=consumer)
            tuner = Tuner(workload, machine, told, measured, {}, progress, result, watch)
            if threads.may_be_held(measured.probe) and not measured.stays_busy:
                tuner.predicted()  # a second probe is long enough for a time limit, or for Ctrl-C
                held = _held(workload, whole, measured, spec, progress, watch)
                held = {most: _of_one_rank(each, machine, ranks) for most, each in held.items()}
                tuner = Tuner(workload, machine, told, measured, held, progress, result, watch)
            result = tuner.tuned()
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def _of_one_rank(measured: Measured, machine: LoaderMachine, ranks: int) -> Measured:
    """What was measured with the whole machine, for one of ``ranks`` on its share, ``machine``."""
    if ranks == 1 or measured.fitted is None:
        return measured
    return dataclasses.replace(measured, fitted=share_of(measured.fitted, machine, ranks))


def _held(
    workload: Workload,
    whole: LoaderMachine,
    alone: Measured,
    spec: TuningSpec,
    progress: MeasurementProgress,
    watch: CoreSpeeds,
) -> dict[int, Measured]:
    """A second measurement with libraries held to one thread in each worker, by that number of
    threads; empty where it has no model."""
    probe = alone.probe
    progress("one thread per library in a worker", PROBE_SHARE)
    part = PartialProgress(progress, PROBE_SHARE, PROBE_SHARE)
    kinds, seconds = KINDS if spec.thorough else OF_WORKERS, _HELD_TIME * spec.seconds
    measured = probe_workload(
        workload.held_to(HELD), whole, seconds, part, watch, known=probe, kinds=kinds
    )
    if not spec.thorough and measured.fitted is not None and alone.fitted is not None:
        measured = dataclasses.replace(
            measured, fitted=_with_transfer(measured.fitted, alone.fitted)
        )
    return {HELD: measured} if measured.fitted is not None else {}


def _with_transfer(fitted: Fitted, alone: Fitted) -> Fitted:
    """The same model with the transfer of batches, and their making without workers, of ``alone``:
    threads of libraries in workers do not matter for that."""
    return dataclasses.replace(
        fitted,
        alone=alone.alone,
        alone_pinned=alone.alone_pinned,
        transfer=alone.transfer,
        cold_transfer=alone.cold_transfer,
    )


def _copying(consumer: Consumer, probe: Probe) -> Consumer:
    """The same consumer with the time to copy a batch to the GPU if it is not pinned, unless that
    is known."""
    if not consumer.step_s or consumer.pageable_s:
        return consumer
    copy_s = probe.batch_bytes / PAGEABLE_BYTES_PER_S
    return dataclasses.replace(consumer, pageable_s=copy_s)


def _blank(
    workload: Workload,
    machine: LoaderMachine,
    consumer: Consumer,
    measured: Measured,
    command: str,
    loader: str,
) -> LoaderResult:
    """What is known before anything was chosen."""
    present = workload.present
    return LoaderResult(
        command=command,
        loader=loader,
        machine=machine,
        step_s=consumer.step_s,
        step_source=consumer.source,
        probe=measured.probe,
        present=present,
        recommended=present,
        verdict="cannot_tell",
        limit="unknown",
        reason=nothing_ran(measured.probe.faults),
        candidates=(),
        confirmed=(),
        faults=measured.probe.faults,
        torch=str(torch.__version__),
    )
