"""The reason of each setting of a loader's launch: one line each, from the measurements.

Also of those that stay as they are, or unset: that something gains nothing is a reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Final

from trainfit.loader.advice.thread_reasons import VariableValue, thread_reasons
from trainfit.loader.measure.pinning import PAGEABLE_BYTES_PER_S
from trainfit.results.format import byte_rate, count, duration, percent, rate
from trainfit.results.loader.advice import Evidence, SettingReason
from trainfit.results.loader.candidates import Candidate
from trainfit.results.loader.result import BUSY, LoaderResult
from trainfit.results.loader.settings import steady

#: Rates that differ by less than this are the same.
_SAME: Final = 1.01


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
    found = [_workers(result), _prefetch(result), _pinning(result), _persistence(result)]
    now, then = result.present, result.recommended
    if then.in_order != now.in_order:
        why = f"batches may come in any order: {result.reason}"
        found.append(
            SettingReason("in_order", str(then.in_order), str(now.in_order), why, "predicted")
        )
    if then.start_method != now.start_method and then.num_workers:
        faults = "; ".join(fault.summary for fault in result.faults)
        name = "multiprocessing_context"
        found.append(SettingReason(name, then.start_method, now.start_method, faults, "measured"))
    return found


def _left_open(result: LoaderResult) -> list[SettingReason]:
    """The present values, as nothing tells."""
    now = result.present
    values: dict[str, str | None] = {"num_workers": str(now.num_workers)}
    values["prefetch_factor"] = str(now.prefetch_factor) if now.num_workers else None
    values |= {name: str(getattr(now, name)) for name in ("pin_memory", "persistent_workers")}
    why = f"kept, as the best value is unknown: {result.reason}"
    return [SettingReason(name, value, value, why, "") for name, value in values.items()]


# --- Each parameter ---------------------------------------------------------------------------


def _workers(result: LoaderResult) -> SettingReason:
    now, then = result.present.num_workers, result.recommended.num_workers
    reason, evidence = _why_workers(result, now, then)
    return SettingReason("num_workers", str(then), str(now), reason, evidence)


def _why_workers(result: LoaderResult, now: int, then: int) -> tuple[str, Evidence]:
    found = result.compared()
    if now != then and found is not None:
        before, after, how = found
        if after > _SAME * before:
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
        if rates[0] <= _SAME * rates[1]:
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

    def differs(each: Candidate) -> bool:
        same = dataclasses.replace(each.settings, prefetch_factor=mine)
        return steady(same) == steady(then) and each.settings.prefetch_factor != mine

    other = _best(result, differs)
    rates = result.rates(other.settings, then) if other is not None else None
    if other is None or rates is None:
        return SettingReason(
            name, value, present, "no other value was tried with these workers", ""
        )
    what = _gives(other.settings.prefetch_factor)
    more = "no more" if rates[0] <= _SAME * rates[1] else "little more, and uses memory"
    why = f"{what} {more if rates[0] > rates[1] / _SAME else 'less'} ({_against(rates)})"
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
        more = "no more" if rates[0] <= _SAME * rates[1] else "little more"
        why = f"pinned gives {more} ({_against(rates)})"
    return SettingReason(name, value, present, why, rates[2])


def _persistence(result: LoaderResult) -> SettingReason:
    then, name = result.recommended, "persistent_workers"
    value, present = str(then.persistent_workers), str(result.present.persistent_workers)
    if not then.num_workers:
        return SettingReason(name, "False", present, "there are no workers to keep", "")
    probe, start_s = result.probe, result.probe.start_s.get(then.start_method)
    found = result.candidate(then)
    if start_s is None or not probe.samples or not probe.batch_size or found is None:
        return SettingReason(name, value, present, "the length of an epoch is unknown", "")
    if not found.batches_per_s:
        return SettingReason(name, value, present, "the length of an epoch is unknown", "")
    epoch_s = math.ceil(probe.samples / probe.batch_size) / found.batches_per_s
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
    found = [
        each
        for each in result.candidates
        if wanted(each) and not each.infeasible and not each.oversubscribed
    ]
    return max(found, key=lambda each: each.batches_per_s, default=None)


def _against(rates: tuple[float, float, Evidence]) -> str:
    other, mine, how = rates
    return f"{rate(other)} against {rate(mine)} batches/s {how}"


def _gives(number: int) -> str:
    return f"{number} gives" if number == 1 else f"{number} give"
