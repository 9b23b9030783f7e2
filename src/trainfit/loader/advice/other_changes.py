"""Changes beyond the settings that would help: with the simulated rate where measured costs give
it, else with the measured share of the time that they concern.

What gains less than 3%, or concerns less than 10%, is left out, and so is everything where the GPU
is the limit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from trainfit.loader.advice.case import Case, LoaderChange
from trainfit.loader.advice.changed_costs import CHANGES
from trainfit.loader.model.bottleneck import batches, limit, rate
from trainfit.loader.model.dataloader import simulate
from trainfit.loader.model.load import Load
from trainfit.results.format import count, duration
from trainfit.results.format import rate as rate_text
from trainfit.results.loader.advice import LoaderAdvice, most_helpful_first
from trainfit.results.loader.candidates import LoaderMachine
from trainfit.results.loader.probe import Probe
from trainfit.results.loader.settings import LoaderSettings, StartMethod
from trainfit.results.runs.loading import Consumer

#: The least predicted gain that is worth a change of code or data.
_LEAST_GAIN: Final = 1.03
#: The least share of the time that a change concerns whose gain is not predicted.
_LEAST_SHARE: Final = 0.1
#: Batches of an epoch that are simulated; the rest goes on at the steady rate.
_EPOCH_BATCHES: Final = 400


def beyond(
    load: Load,
    probe: Probe,
    settings: LoaderSettings,
    consumer: Consumer,
    machine: LoaderMachine,
    epoch_batches: int | None = None,
) -> tuple[LoaderAdvice, ...]:
    """What would help at these settings: what is predicted first, each the most first.

    Nothing is advised where the consumer is the limit: the rate cannot rise by 3% then.

    Args:
        epoch_batches: batches of an epoch, if it has an end; what it takes to start workers
            each time is weighed against it.
    """
    load = dataclasses.replace(load, consumer=consumer)
    number = batches(settings)
    base = rate(load, settings, number)
    if math.isinf(base):
        return ()
    case = Case(
        load, probe, settings, machine, epoch_batches, base, number, limit(load, settings, probe)
    )
    found = [*_epochs(case)]
    if consumer.step_s * base * _LEAST_GAIN <= 1:  # the GPU has room for more
        found += [_advice(case, remedy) for make in CHANGES if (remedy := make(case))]
    return tuple(most_helpful_first(filter(_is_worth_it, found)))


def _is_worth_it(advice: LoaderAdvice) -> bool:
    if advice.gain is not None:
        return advice.gain >= _LEAST_GAIN
    return (advice.share or 0.0) >= _LEAST_SHARE


def _advice(case: Case, remedy: LoaderChange) -> LoaderAdvice:
    told = (remedy.kind, remedy.summary, remedy.how)
    if remedy.load is None:
        return LoaderAdvice(*told, None, None, remedy.evidence, remedy.share)
    found = rate(remedy.load, remedy.settings or case.settings, case.count)
    how = f"simulated with the same settings, {rate_text(case.base)} batches/s before"
    return LoaderAdvice(*told, found, found / case.base, f"{remedy.evidence}; {how}")


# --- Epochs -----------------------------------------------------------------------------------
def _epochs(case: Case) -> list[LoaderAdvice]:
    """What restarting workers for each epoch costs; the rates are for whole epochs."""
    settings, starts = case.settings, case.probe.start_s
    if case.epoch_batches is None or settings.num_workers == 0 or settings.persistent_workers:
        return []
    now = _epoch_s(case, case.load, settings)
    kept = _epoch_s(case, case.load, dataclasses.replace(settings, persistent_workers=True))
    number = count(settings.num_workers, "worker")
    seen = (
        f"starting {number} costs {duration(case.load.start_s)} each, in every epoch of "
        f"{case.epoch_batches} batches; rates are for whole epochs"
    )
    found = [
        _of_epochs(
            case, "persistent_workers", "keep the workers between epochs",
            "DataLoader(..., persistent_workers=True)", now, kept, seen,
        )
    ]  # fmt: skip
    fork: StartMethod = "fork"
    if settings.start_method != fork and fork in starts:
        forked = dataclasses.replace(case.load, start_s=starts[fork])
        then = _epoch_s(case, forked, settings)
        found.append(
            _of_epochs(
                case, "start_method", "start workers with fork",
                'DataLoader(..., multiprocessing_context="fork"), if no library used '
                "before is fork-unsafe (CUDA in workers, OpenCV's or gRPC's threads)",
                now, then, f"{seen}; forked ones need {duration(starts[fork])}",
            )
        )  # fmt: skip
    return found


def _of_epochs(
    case: Case, kind: str, summary: str, how: str, now: float, then: float, seen: str
) -> LoaderAdvice:
    assert case.epoch_batches is not None
    return LoaderAdvice(kind, summary, how, case.epoch_batches / then, now / then, seen)


def _epoch_s(case: Case, load: Load, settings: LoaderSettings) -> float:
    """Seconds of an epoch that is not the first."""
    assert case.epoch_batches is not None
    simulated = min(case.epoch_batches, _EPOCH_BATCHES)
    one = simulate(load, settings, simulated).finished_s
    two = simulate(load, settings, simulated, epochs=2).finished_s
    return two - one + (case.epoch_batches - simulated) / case.base
