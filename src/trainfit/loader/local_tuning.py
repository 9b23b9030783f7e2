"""Tunes a loader on this machine, from its consumer to settings that real runs confirm, and gives
the reason of each setting and thread variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.hardware.machine.limits import misread, misread_lines
from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System
from trainfit.loader import threads
from trainfit.loader.confirmation import nothing_ran
from trainfit.loader.measure.fitting import Fitted, share_of
from trainfit.loader.measure.machine_limits import loader_machine, unknowns
from trainfit.loader.measure.probe_runs import KINDS, OF_WORKERS
from trainfit.loader.measure.processes import MeasurementProgress, NullProgress, PartialProgress
from trainfit.loader.measure.running import PAGEABLE_BYTES_PER_S
from trainfit.loader.measure.workload import Workload
from trainfit.loader.probe import Measured, probe_workload
from trainfit.loader.threads import GOVERNS, SEVERAL, cores, starts_threads, why_none
from trainfit.loader.tuner import HELD, PROBE_SHARE, Tuner
from trainfit.results.dataloader import Candidate, LoaderMachine, LoaderSettings, Probe, steady
from trainfit.results.loader import (
    BUSY,
    Basis,
    LoaderResult,
    SetBy,
    SettingReason,
    VariableAdvice,
)
from trainfit.results.runs.measurement import AS_FAST, Consumer
from trainfit.results.runs.spec import TuningSpec
from trainfit.results.text import byte_rate, count, duration, percent, rate

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


# ---
# The reason of each thread variable's value, with its effect in real runs.


#: Variables of which something is always said; of others where their library is loaded.
_ALWAYS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: What other libraries follow where their own variable is not set.
_COMMON: Final = "OMP_NUM_THREADS"
#: Rates that differ by less than this are the same.
_SAME_RATE: Final = 1.01


@dataclass(frozen=True)
class VariableValue:
    """The value of a variable in the environment of the job, and who set it."""

    value: str
    set_by: SetBy


def with_present(
    result: LoaderResult, present: Mapping[str, VariableValue]
) -> tuple[VariableAdvice, ...]:
    """The result's variables with their values now, and what the advice gained in real runs."""
    rates = _both(result)
    gain = rates[1] / rates[0] if rates is not None and rates[2] == "measured" else None
    held = _held_names(result) if result.recommended.library_threads is not None else set()
    return tuple(
        dataclasses.replace(
            variable,
            present=present[variable.name].value if variable.name in present else None,
            set_by=present[variable.name].set_by if variable.name in present else "",
            gain=gain if variable.name in held else None,
        )
        for variable in result.variables
    )


def thread_reasons(
    result: LoaderResult, present: Mapping[str, VariableValue]
) -> list[SettingReason]:
    """One for each variable, also for those that are not to be set; ``result.variables`` are as
    :func:`with_present` gives them."""
    advised = {variable.name: variable for variable in result.variables}
    loaded = [name for name, pools in GOVERNS.items() if _has(result, pools)]
    odd = misread({name: each.value for name, each in present.items()})
    reasons = []
    for name in dict.fromkeys((*_ALWAYS, *advised, *loaded)):
        now = present.get(name)
        if name in advised:
            value: str | None = advised[name].value
            reason, evidence = _of_advice(result, advised[name])
        else:
            value = None if now is None or name in odd else now.value
            reason, evidence = _of_none(result, name)
            evidence = "assumed" if name in odd else evidence
        useless = odd.get(name, "") if name not in advised else ""
        reasons.append(
            SettingReason(
                name,
                value,
                now.value if now is not None else None,
                reason,
                evidence,
                now.set_by if now is not None else "",
                "environment",
                is_kept=now is not None and name not in advised and not useless,
                misread=useless,
            )
        )
    return reasons


def _of_advice(result: LoaderResult, advice: VariableAdvice) -> tuple[str, Basis]:
    rates = _both(result)
    if rates is None or advice.name not in _held_names(result):
        return f"{advice.reason}: {advice.evidence}", "assumed"
    free, held, how = rates
    now = f" ({advice.present} now)" if advice.present is not None else ""
    return (
        f"one thread per library of a worker{now}: {rate(free)} → {rate(held)} batches/s",
        how,
    )


def _of_none(result: LoaderResult, name: str) -> tuple[str, Basis]:
    """Why a variable is left as it is."""
    probe = result.probe
    if result.was_busy:
        return "it cannot be measured alongside other processes", ""
    if not result.recommended.num_workers:
        return "no workers whose threads could outnumber the cores", "measured"
    if probe.started_threads is None:
        return "the threads that libraries start in a worker were not measured", ""
    text = f"{count(probe.started_threads, 'thread')} started in addition to its own"
    if probe.threads is not None:
        text += f", a batch keeps {probe.threads:.1f} threads busy"
    if not probe.started_threads and (probe.threads or 0.0) < SEVERAL:
        return f"no library of a worker starts threads ({text})", "measured"
    pools = ", ".join(f"{key} {number}" for key, number in sorted(probe.thread_pools.items()))
    own = GOVERNS.get(name, ())
    if name != _COMMON and not _has(result, own):
        return (
            f"no library of a worker reads its thread count from it (pools: {pools or 'none'})",
            "measured",
        )
    if name in GOVERNS and starts_threads(probe, name) is False:
        return f"batches start no threads of its library ({text})", "measured"
    if result.recommended.library_threads is not None:
        return "the other variables limit the libraries that have threads", "measured"
    rates = _both(result)
    if rates is None:
        return f"the threads of a worker belong to no library that it controls ({text})", "measured"
    free, held, how = rates
    gains = "no gain" if held <= free * _SAME_RATE else "the gain is too small"
    return (
        f"threads limited to 1: {rate(held)} batches/s, now {rate(free)}: {gains}",
        how,
    )


def _both(result: LoaderResult) -> tuple[float, float, Basis] | None:
    """Batches a second with the libraries' own threads and with one each, other settings as they
    are recommended; ``None`` where that was not tried."""
    if result.held is None or not result.recommended.num_workers:
        return None
    rates = result.rates(_with_threads(result, None), _with_threads(result, 1))
    return rates if rates is not None and rates[0] else None


def _with_threads(result: LoaderResult, threads: int | None) -> LoaderSettings:
    return dataclasses.replace(result.recommended, library_threads=threads)


def _held_names(result: LoaderResult) -> set[str]:
    """Variables of libraries that have threads in a worker, and use them as far as is known."""
    return {
        name
        for name, pools in GOVERNS.items()
        if _has(result, pools) and starts_threads(result.probe, name) is not False
    }


def _has(result: LoaderResult, pools: tuple[str, ...]) -> bool:
    return any(result.probe.thread_pools.get(pool, 1) > 1 for pool in pools)


# ---
# The reason of each setting of a loader's launch: one line each, from the measurements.
#
# Also of those that stay as they are, or unset: that something gains nothing is a reason.


def setting_reasons(
    result: LoaderResult, present: Mapping[str, VariableValue], why_no_cores: str
) -> tuple[SettingReason, ...]:
    """One for each parameter of the DataLoader, each variable of threads, and CPU affinity.

    ``present`` are the variables of the environment that the job runs in; ``why_no_cores`` says why
    no CPUs are chosen where ``result`` advises none.
    """
    found = (*_of_loader(result), *thread_reasons(result, present))
    if result.was_busy:
        found = tuple(map(_marked, found))
    return (*found, _affinity(result, why_no_cores))


def _marked(reason: SettingReason) -> SettingReason:
    """A reason by the model, which is from runs that other processes disturbed."""
    if reason.evidence != "predicted" or BUSY in reason.reason:
        return reason
    return dataclasses.replace(reason, reason=f"{reason.reason} ({BUSY})")


def _of_loader(result: LoaderResult) -> list[SettingReason]:
    if result.verdict == "cannot_tell":
        return _left_open(result)
    reasons = [_workers(result), _prefetch(result), _pinning(result), _persistence(result)]
    now, then = result.present, result.recommended
    if then.in_order != now.in_order:
        why = f"batches may come in any order: {result.reason}"
        reasons.append(
            SettingReason("in_order", str(then.in_order), str(now.in_order), why, "predicted")
        )
    if then.start_method != now.start_method and then.num_workers:
        faults = "; ".join(fault.title for fault in result.faults)
        name = "multiprocessing_context"
        reasons.append(SettingReason(name, then.start_method, now.start_method, faults, "measured"))
    return reasons


def _left_open(result: LoaderResult) -> list[SettingReason]:
    """The present values, as nothing tells."""
    now = result.present
    values: dict[str, str | None] = {"num_workers": str(now.num_workers)}
    values["prefetch_factor"] = str(now.prefetch_factor) if now.num_workers else None
    values |= {name: str(getattr(now, name)) for name in ("pin_memory", "persistent_workers")}
    why = f"the best value is unknown: {result.reason}"
    return [
        SettingReason(name, value, value, why, "", is_kept=True) for name, value in values.items()
    ]


# --- Each parameter ---------------------------------------------------------------------------


def _workers(result: LoaderResult) -> SettingReason:
    now, then = result.present.num_workers, result.recommended.num_workers
    reason, evidence = _why_workers(result, now, then)
    return SettingReason("num_workers", str(then), str(now), reason, evidence)


def _why_workers(result: LoaderResult, now: int, then: int) -> tuple[str, Basis]:
    found = result.compared()
    if now != then and found is not None:
        before, after, how = found
        if after > _SAME_RATE * before:
            together = _changed_besides(result)
            return f"{now} → {then}: {rate(before)} → {rate(after)} batches/s{together}", how
        if then < now:
            both = f"{then} give {rate(after)} batches/s, {now} {rate(before)}"
            return f"{both}: fewer cores, less memory", how
    real = result.measured(result.recommended)
    if now != then or result.verdict == "nothing_to_gain":
        return result.reason, "measured" if real is not None else "predicted"
    other = _best(result, lambda each: each.settings.num_workers != then)
    if other is not None and (rates := result.rates(other.settings, result.recommended)):
        number = other.settings.num_workers
        if rates[0] <= _SAME_RATE * rates[1]:
            return f"{_gives(number)} no more ({_against(rates)})", rates[2]
    return result.reason, "measured" if real is not None else "predicted"


def _changed_besides(result: LoaderResult) -> str:
    """What else changes that matters for the rate."""
    now, then = steady(result.present), steady(result.recommended)
    named = {
        "pin_memory": "pin_memory",
        "in_order": "in_order",
        "library_threads": "one thread per library",
    }
    changed = [text for name, text in named.items() if getattr(now, name) != getattr(then, name)]
    if now.num_workers and then.num_workers and now.prefetch_factor != then.prefetch_factor:
        changed.insert(0, "prefetch_factor")
    return f", together with {', '.join(changed)}" if changed else ""


def _prefetch(result: LoaderResult) -> SettingReason:
    then, name = result.recommended, "prefetch_factor"
    present = str(result.present.prefetch_factor) if result.present.num_workers else None
    if not then.num_workers:
        why = "without workers nothing is prefetched, and PyTorch rejects the option"
        return SettingReason(name, None, present, why, "")
    mine, value = then.prefetch_factor, str(then.prefetch_factor)

    def differs(candidate: Candidate) -> bool:
        same = dataclasses.replace(candidate.settings, prefetch_factor=mine)
        return steady(same) == steady(then) and candidate.settings.prefetch_factor != mine

    other = _best(result, differs)
    rates = result.rates(other.settings, then) if other is not None else None
    if other is None or rates is None:
        return SettingReason(
            name, value, present, "no other value was tried with these workers", ""
        )
    what = _gives(other.settings.prefetch_factor)
    more = "no more" if rates[0] <= _SAME_RATE * rates[1] else "little more, and uses memory"
    why = f"{what} {more if rates[0] > rates[1] / _SAME_RATE else 'less'} ({_against(rates)})"
    return SettingReason(name, value, present, why, rates[2])


def _pinning(result: LoaderResult) -> SettingReason:
    then, name = result.recommended, "pin_memory"
    value, present = str(then.pin_memory), str(result.present.pin_memory)
    if not result.step_s:
        why = "the step time is unknown, so the copy to the GPU is not considered"
        return SettingReason(name, value, present, why, "")
    other = dataclasses.replace(then, pin_memory=not then.pin_memory)
    rates = result.rates(other, then)
    copied = (
        "the copy to the GPU is asynchronous only from pinned memory (other copies are assumed "
        f"to block the main thread, at {byte_rate(PAGEABLE_BYTES_PER_S)})"
    )
    if rates is None:
        return SettingReason(name, value, present, copied, "assumed")
    if then.pin_memory:
        why = f"{copied}; not pinned: {_against(rates)}"
    else:
        more = "no more" if rates[0] <= _SAME_RATE * rates[1] else "little more"
        why = f"pinned gives {more} ({_against(rates)})"
    return SettingReason(name, value, present, why, rates[2])


def _persistence(result: LoaderResult) -> SettingReason:
    then, name = result.recommended, "persistent_workers"
    value, present = str(then.persistent_workers), str(result.present.persistent_workers)
    if not then.num_workers:
        return SettingReason(name, "False", present, "there are no workers to keep", "")
    probe, start_s = result.probe, result.probe.start_s.get(then.start_method)
    candidate = result.candidate(then)
    if start_s is None or not probe.samples or not probe.batch_size or candidate is None:
        return SettingReason(name, value, present, "the length of an epoch is unknown", "")
    if not candidate.batches_per_s:
        return SettingReason(name, value, present, "the length of an epoch is unknown", "")
    epoch_s = math.ceil(probe.samples / probe.batch_size) / candidate.batches_per_s
    starts_s = then.num_workers * start_s
    why = (
        f"starting {count(then.num_workers, 'worker')} needs {duration(starts_s)}, an epoch "
        f"{duration(epoch_s)} ({percent(starts_s / epoch_s, decimals=1)})"
    )
    return SettingReason(name, value, present, why, "predicted")


def _affinity(result: LoaderResult, why_none: str) -> SettingReason:
    name, cores = "CPU affinity", result.cores
    if cores is None:
        return SettingReason(name, None, None, why_none, "", where="wrapper")
    why = f"{cores.reason}: {cores.evidence}"
    return SettingReason(name, cores.prefix, None, why, "assumed", where="wrapper")


# --- Rates ------------------------------------------------------------------------------------


def _best(result: LoaderResult, wanted: Callable[[Candidate], bool]) -> Candidate | None:
    """The fastest of the candidates that can be, among those that are wanted."""
    candidates = [
        candidate
        for candidate in result.candidates
        if wanted(candidate) and not candidate.infeasible and not candidate.oversubscribed
    ]
    return max(candidates, key=lambda each: each.batches_per_s, default=None)


def _against(rates: tuple[float, float, Basis]) -> str:
    other, mine, how = rates
    return f"{rate(other)} against {rate(mine)} batches/s {how}"


def _gives(number: int) -> str:
    return f"{number} gives" if number == 1 else f"{number} give"


def tune_here(
    workload: Workload,
    spec: TuningSpec,
    *,
    command: str = "",
    loader: str,
    progress: MeasurementProgress | None,
    command_sets: Mapping[str, str] | None = None,
    started_with: Mapping[str, str] | None = None,
) -> LoaderResult:
    """:func:`trainfit.loader.local_tuning.tune` as one of the ranks that share this machine, with
    the CPUs to run on, what of the machine is unknown, and the reason of each setting.

    ``command_sets`` are the variables that the user's command sets, ``started_with`` is the
    environment before a script could change it (by default, as it is now).
    """
    machine = survey(System(), imports_torch=False)
    ranks = spec.ranks
    result = tune(
        workload,
        loader_machine(machine, ranks),
        spec,
        command=command,
        loader=loader,
        progress=progress,
        whole=loader_machine(machine) if ranks > 1 else None,
    )
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
