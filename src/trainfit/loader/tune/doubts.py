"""Disturbances of measurements: other processes, and cores slowed from outside.

Beside another process on the same cores a rate tells of both, and the settings that are fastest
then are those that take the most from it. From such runs only the CPU time of batches counts, by
which the model predicts the rates without the other process.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from trainfit.loader.tune.confirmation import ConfirmingRun
from trainfit.results.format import core_count, count, percent
from trainfit.results.loader.candidates import Doubt
from trainfit.results.loader.probe import Probe
from trainfit.results.loader.settings import LoaderSettings

#: Above this the cores' speed is not worth a word; speeds that differ by less are one.
_NEARLY_FULL: Final = 0.95
_STEADY: Final = 0.03
#: Names of runs that a note gives.
_NAMED: Final = 3


def is_disturbed(probe: Probe, held: Probe | None) -> bool:
    """Was a kind of run that the model is fitted to only made alongside other processes?"""
    return bool(probe.disturbed or (held is not None and held.disturbed))


def doubts(
    probe: Probe, held: Probe | None, trials: Sequence[ConfirmingRun], *, is_predicted: bool
) -> tuple[Doubt, ...]:
    """What is to be doubted of these measurements; ``is_predicted``: the verdict is by the model
    alone."""
    return (*_others(probe, held, trials, is_predicted), *_slowed(probe, held, trials))


def _others(
    probe: Probe, held: Probe | None, trials: Sequence[ConfirmingRun], is_predicted: bool
) -> list[Doubt]:
    seen = dict(probe.disturbed)
    if held is not None:
        more = held.disturbed.items()
        seen |= {f"{name}, one thread per library": cores for name, cores in more}
    probed = bool(seen)
    for trial in trials:
        if trial.is_disturbed:
            seen[f"real run: {_settings(trial.settings)}"] = trial.run.others_cores or 0.0
    if not seen:
        return []
    if is_predicted:
        meaning = (
            "rates and settings are predicted from the CPU time of batches, not measured; re-run "
            "when they have finished"
        )
    elif probed:
        meaning = "without them the verdict holds even more; predicted rates are less certain"
    else:
        meaning = "the rates of these runs were not used; the verdict relies on the model instead"
    cores = statistics.fmean(seen.values())
    summary = f"other processes competed for {core_count(cores)} in {_named(list(seen))}"
    return [Doubt("others", tuple(seen), summary, meaning, cores=cores, decides=is_predicted)]


def _slowed(probe: Probe, held: Probe | None, trials: Sequence[ConfirmingRun]) -> list[Doubt]:
    speeds = {
        f"real run: {_settings(trial.settings)}": trial.run.core_speed.speed
        for trial in trials
        if trial.run.core_speed is not None
    }
    for name, each in (("probe", probe), ("probe, one thread per library", held)):
        if each is not None and each.core_speed is not None:
            speeds[name] = each.core_speed
    slow = {name: speed for name, speed in speeds.items() if speed < _NEARLY_FULL}
    if not slow:
        return []
    meaning = (
        "rates, including measured ones, are given for full speed and are lower by about "
        "that factor meanwhile"
    )
    low, high = min(speeds.values()), max(speeds.values())
    between = f"{percent(low)}" + (f" to {percent(high)}" if high - low >= _STEADY else "")
    summary = (
        f"the cores ran at {between} of their full speed for a reason outside this "
        "system (other virtual machines on the same processor, or heat)"
    )
    return [Doubt("slowed", tuple(slow), summary, meaning, speed=(low, high))]


def _named(runs: Sequence[str]) -> str:
    """Their number, and the names of some."""
    more = [f"and {len(runs) - _NAMED} more"] if len(runs) > _NAMED else []
    return f"{count(len(runs), 'run')} ({'; '.join([*runs[:_NAMED], *more])})"


def _settings(settings: LoaderSettings) -> str:
    if not settings.num_workers:
        return "no workers" + (", pinned" if settings.pin_memory else "")
    words = [count(settings.num_workers, "worker"), f"prefetch {settings.prefetch_factor}"]
    words += ["pinned"] if settings.pin_memory else []
    words += ["one thread per library"] if settings.library_threads is not None else []
    return ", ".join(words)
