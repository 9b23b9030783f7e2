"""The reason of each thread variable's value, with its effect in real runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainfit.hardware.host.thread_variables import misread
from trainfit.loader.advice.threads import GOVERNS, SEVERAL, starts_threads
from trainfit.results.format import count, rate
from trainfit.results.loader.advice import Evidence, SetBy, SettingReason, VariableAdvice
from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings

#: Variables of which something is always said; of others where their library is loaded.
_ALWAYS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: What other libraries follow where their own variable is not set.
_COMMON: Final = "OMP_NUM_THREADS"
#: Rates that differ by less than this are the same.
_SAME: Final = 1.01


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
            each,
            present=present[each.name].value if each.name in present else None,
            set_by=present[each.name].set_by if each.name in present else "",
            gain=gain if each.name in held else None,
        )
        for each in result.variables
    )


def thread_reasons(
    result: LoaderResult, present: Mapping[str, VariableValue]
) -> list[SettingReason]:
    """One for each variable, also for those that are not to be set; ``result.variables`` are as
    :func:`with_present` gives them."""
    advised = {each.name: each for each in result.variables}
    loaded = [name for name, pools in GOVERNS.items() if _has(result, pools)]
    odd = misread({name: each.value for name, each in present.items()})
    found = []
    for name in dict.fromkeys((*_ALWAYS, *advised, *loaded)):
        now = present.get(name)
        if name in advised:
            value: str | None = advised[name].value
            reason, evidence = _of_advice(result, advised[name])
        else:
            value = None if now is None or name in odd else now.value
            reason, evidence = _of_none(result, name)
            if name in odd and now is not None:
                reason, evidence = f"{now.value!r} {odd[name]}; {reason}", "assumed"
            elif now is not None:
                reason = f"kept: {reason}"
        text = now.value if now is not None else None
        by: SetBy = now.set_by if now is not None else ""
        found.append(SettingReason(name, value, text, reason, evidence, by, "environment"))
    return found


def _of_advice(result: LoaderResult, advice: VariableAdvice) -> tuple[str, Evidence]:
    rates = _both(result)
    if rates is None or advice.name not in _held_names(result):
        return f"{advice.reason}: {advice.evidence}", "assumed"
    free, held, how = rates
    now = f" ({advice.present} now)" if advice.present is not None else ""
    return (
        f"one thread per library of a worker{now}: {rate(free)} → {rate(held)} batches/s",
        how,
    )


def _of_none(result: LoaderResult, name: str) -> tuple[str, Evidence]:
    """Why a variable is left as it is."""
    probe = result.probe
    if result.was_busy:
        return "it cannot be measured alongside other processes", ""
    if not result.recommended.num_workers:
        return "no workers whose threads could outnumber the cores", "measured"
    if probe.started_threads is None:
        return "the threads that libraries start in a worker were not measured", ""
    seen = f"{count(probe.started_threads, 'thread')} started in addition to its own"
    if probe.threads is not None:
        seen += f", a batch keeps {probe.threads:.1f} threads busy"
    if not probe.started_threads and (probe.threads or 0.0) < SEVERAL:
        return f"no library of a worker starts threads ({seen})", "measured"
    pools = ", ".join(f"{key} {number}" for key, number in sorted(probe.thread_pools.items()))
    own = GOVERNS.get(name, ())
    if name != _COMMON and not _has(result, own):
        return (
            f"no library of a worker reads its thread count from it (pools: {pools or 'none'})",
            "measured",
        )
    if name in GOVERNS and starts_threads(probe, name) is False:
        return f"batches start no threads of its library ({seen})", "measured"
    if result.recommended.library_threads is not None:
        return "the other variables limit the libraries that have threads", "measured"
    rates = _both(result)
    if rates is None:
        return f"the threads of a worker belong to no library that it controls ({seen})", "measured"
    free, held, how = rates
    gains = "no gain" if held <= free * _SAME else "the gain is too small"
    return (
        f"threads limited to 1: {rate(held)} batches/s, now {rate(free)}: {gains}",
        how,
    )


def _both(result: LoaderResult) -> tuple[float, float, Evidence] | None:
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
