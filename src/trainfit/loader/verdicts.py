"""The verdict on a choice of settings, and what casts doubt on its measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainfit.loader.confirmation import ConfirmingRun, measured_rate, measured_rates
from trainfit.loader.measure.probe_runs import RUN_NOISE
from trainfit.loader.search import WITHIN, Choice, estimated_rates
from trainfit.results.dataloader import LoaderSettings, Probe
from trainfit.results.findings import Evidence, Finding, Severity
from trainfit.results.loader import BUSY, Limit
from trainfit.results.text import core_count, count, percent, times

Verdict = Literal["change", "keep", "nothing_to_gain", "no_setting_helps", "cannot_tell"]

#: Of the consumer's time, what waiting for batches may take where nothing is to be gained.
_WAITS: Final = 0.05
#: Of the current settings' measured rate, what fewer workers have at least that are as fast by runs
#: and model together.
_AS_FAST: Final = 0.96

#: What other settings must be predicted to gain where other processes disturbed all runs: the model
#: is from these.
PREDICTED_GAIN: Final = 1.1

#: What is said of a limit that no setting of the DataLoader moves.
_LIMITS: Final = {
    "cores": "the CPU cores are the limit",
    "disk": "the storage is the limit",
    "transfer": "transferring batches from the workers is the limit",
    "lock": "the workers wait for each other (a lock in the data set or a library)",
    "sampler": "the sampler is the limit",
    "main_process": "batches can be produced in the main process only",
    "workers": "the time per batch is the limit",
    "unknown": "the limit could not be determined",
    "gpu": "the GPU is the limit",
}


@dataclass(frozen=True)
class Decision:
    """The verdict on settings, and why."""

    verdict: Verdict
    reason: str
    keeps: bool = False
    """Are the current settings the ones to recommend?"""
    is_predicted: bool = False
    """Is it by the model alone, because of other processes?"""

    @property
    def gains_nothing(self) -> bool:
        """Are the current settings as good as any?"""
        return self.verdict in ("keep", "nothing_to_gain", "no_setting_helps")


def decide(
    choice: Choice,
    trials: Sequence[ConfirmingRun],
    chosen: LoaderSettings,
    limit: Limit,
    *,
    disturbed: bool = False,
    noise: float = RUN_NOISE,
) -> Decision:
    """Compare the chosen settings with the current ones, by runs and model together; no slower run
    is called a change.

    ``limit`` is what bounds the loop with the chosen settings. ``disturbed``: the model is
    from runs that other processes disturbed; a gain that it predicts must be larger then.
    ``noise`` is by how much runs of the same settings differ.
    """
    present = choice.goal.present
    if choice.look(chosen).infeasible:
        return Decision("cannot_tell", choice.look(chosen).infeasible)
    ours, theirs = _rates(choice, trials, chosen, present)
    ran = ours / theirs if theirs > 0 else math.inf
    gain = _likely_gain(choice, trials, chosen, present, noise) or ran
    both = (measured_rate(trials, each) for each in (chosen, present))
    sure = not disturbed or None not in both
    infeasible = choice.look(present).infeasible
    if infeasible:
        return Decision("change", f"the current settings are infeasible: {infeasible}")
    if sure and gain > 1 / WITHIN and ran > 1:
        rest = "" if limit in ("gpu", "unknown") else f"; then {_LIMITS[limit]}"
        shown = ran > 1 / WITHIN
        how = "" if shown else " by the real runs and the model together"
        return Decision("change", f"{times(ran if shown else gain)} as many batches{how}{rest}")
    waits = _waiting(choice, trials, present)
    if choice.goal.consumer.step_s > 0 and waits <= _WAITS:
        return Decision(
            "nothing_to_gain",
            f"the GPU is the limit: it waits {percent(waits)} of its time for batches"
            + (_fewer(present, chosen) if sure and gain >= WITHIN else ""),
            keeps=chosen.num_workers >= present.num_workers or gain < WITHIN or not sure,
        )
    if disturbed and ran >= PREDICTED_GAIN:
        return Decision("change", f"{times(ran)} as many batches ({BUSY})", is_predicted=True)
    if disturbed:
        reason = f"no other settings give {percent(PREDICTED_GAIN - 1)} more ({BUSY})"
        return Decision("keep", reason, keeps=True, is_predicted=True)
    if chosen.num_workers < present.num_workers and gain >= WITHIN and ran >= _AS_FAST:
        return Decision(
            "change",
            f"the same rate with {count(chosen.num_workers, 'worker')} instead of "
            f"{present.num_workers}: fewer cores and less memory; {_LIMITS[limit]}",
        )
    if limit in ("gpu", "unknown"):
        return Decision("keep", "the current settings are optimal", keeps=True)
    return Decision("no_setting_helps", _LIMITS[limit], keeps=True)


def nothing_ran(faults: Sequence[Finding]) -> str:
    """Why no settings could be rated: the last fault, which was met with the least demanding
    settings."""
    said = "every run of the loader failed"
    return f"{said}: {faults[-1].title}" if faults else said


def _fewer(present: LoaderSettings, chosen: LoaderSettings) -> str:
    if chosen.num_workers >= present.num_workers:
        return ""
    return f"; {count(chosen.num_workers, 'worker')} would be enough"


def _rates(
    choice: Choice, trials: Sequence[ConfirmingRun], chosen: LoaderSettings, present: LoaderSettings
) -> tuple[float, float]:
    """Both measured, or both predicted: one of each compares the model with the machine."""
    ours, theirs = measured_rate(trials, chosen), measured_rate(trials, present)
    if ours is not None and theirs is not None:
        return ours, theirs
    return choice.look(chosen).batches_per_s, choice.look(present).batches_per_s


def _likely_gain(
    choice: Choice,
    trials: Sequence[ConfirmingRun],
    chosen: LoaderSettings,
    present: LoaderSettings,
    noise: float,
) -> float | None:
    """By runs and model together; ``None`` where one of them cannot be."""
    likely = estimated_rates(choice, measured_rates(trials), noise)
    ours, theirs = likely.get(chosen), likely.get(present)
    return ours / theirs if ours and theirs and math.isfinite(theirs) else None


def _waiting(choice: Choice, trials: Sequence[ConfirmingRun], settings: LoaderSettings) -> float:
    for trial in trials:
        if trial.settings == settings and trial.measured is not None:
            share = trial.run.waiting_share
            if share is not None:
                return share
    return choice.look(settings).waiting_share


# ---
# Disturbances of measurements: other processes, and cores slowed from outside.
#
# Beside another process on the same cores a rate tells of both, and the settings that are fastest
# then are those that take the most from it. From such runs only the CPU time of batches counts, by
# which the model predicts the rates without the other process.


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
) -> tuple[Finding, ...]:
    """What is to be doubted of these measurements; ``is_predicted``: the verdict is by the model
    alone."""
    return (*_others(probe, held, trials, is_predicted), *_slowed(probe, held, trials))


def _others(
    probe: Probe, held: Probe | None, trials: Sequence[ConfirmingRun], is_predicted: bool
) -> list[Finding]:
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
    busy = tuple(Evidence(name, kept, "cores") for name, kept in seen.items())
    severity: Severity = "critical" if is_predicted else "warning"
    return [Finding("busy_machine", severity, summary, busy, meaning)]


def _slowed(probe: Probe, held: Probe | None, trials: Sequence[ConfirmingRun]) -> list[Finding]:
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
    speeds_of = tuple(Evidence(name, speed, "of full speed") for name, speed in slow.items())
    return [Finding("slowed_cores", "warning", summary, speeds_of, meaning)]


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
