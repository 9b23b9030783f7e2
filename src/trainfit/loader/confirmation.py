"""Confirms chosen settings by real runs, until measurement and model agree."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from trainfit.loader.measure.fitting import Fitted, fit_contention, same_rate
from trainfit.loader.measure.loop import is_disturbed, stays_busy
from trainfit.loader.measure.probe_runs import RUN_NOISE
from trainfit.loader.measure.records import Run
from trainfit.loader.search import WITHIN, Choice, estimated_rates, search
from trainfit.results.dataloader import LoaderSettings, Probe
from trainfit.results.findings import Evidence, Finding, Severity
from trainfit.results.loader import BUSY, Limit
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import core_count, count, percent, times

#: By how much a real run may differ from its prediction before the model is fitted to it.
SURPRISE: Final = 0.08
#: How often a run is made that other processes disturb, at most.
TRIES: Final = 2
#: Runs until the current settings have theirs.
_FIRST: Final = 2
#: By how much settings may be faster than the model says.
_UNSURE: Final = 0.05
#: Of the best rate, what smaller settings that were run must have: single runs of the same settings
#: differ by some percent, and the next plan is to come to the same line.
_MEASURED_WITHIN: Final = 0.96
Runner = Callable[[LoaderSettings, Consumer], Run]
"""Runs the loader for real."""


@dataclass(frozen=True)
class ConfirmingRun:
    """A real run of settings, with the model's prediction."""

    settings: LoaderSettings
    predicted: float
    run: Run
    why: str
    tries: int = 1

    @property
    def measured(self) -> float | None:
        """Batches a second, at the cores' full speed where that is known."""
        if self.run.failure is not None:
            return None
        full = self.run.full_speed_batches_per_s
        return full if full is not None else self.run.batches_per_s

    @property
    def is_disturbed(self) -> bool:
        """Were other processes active meanwhile? The rate is not to be used then."""
        return is_disturbed(self.run.others_cores)

    @property
    def reliable(self) -> float | None:
        """Batches a second, of these settings and nothing else."""
        return None if self.is_disturbed else self.measured


def measured_rates(trials: Sequence[ConfirmingRun]) -> dict[LoaderSettings, float]:
    """Batches a second of the settings whose runs nothing disturbed."""
    return {trial.settings: trial.reliable for trial in trials if trial.reliable}


def measured_rate(trials: Sequence[ConfirmingRun], settings: LoaderSettings) -> float | None:
    """Batches a second of these settings; ``None`` where they were not run, or failed, or were run
    alongside other processes."""
    return next((trial.reliable for trial in trials if trial.settings == settings), None)


@dataclass
class Confirmation:
    """Real runs of what was chosen, until measurement and model agree or runs run out.

    ``after`` is called after each of them; ``in_time`` says whether there is time for one that is
    not needed, to look for something faster. ``noise`` is by how much runs of the same settings
    differ (:func:`~trainfit.loader.search.estimated_rates`). ``within`` is what the
    smallest settings must have of the best predicted rate where no run counts.
    """

    choice: Choice
    runner: Runner
    most: int
    after: Callable[[Confirmation], None] = lambda confirmation: None
    in_time: Callable[[], bool] = lambda: True
    noise: float = RUN_NOISE
    within: float = WITHIN
    trials: list[ConfirmingRun] = field(default_factory=list)
    refitted: bool = False
    _others: list[float | None] = field(default_factory=list)

    def run(self) -> LoaderSettings:
        """Confirm; returns the settings to recommend."""
        present = self.choice.goal.present
        self._confirm(_FIRST)
        if self._trial(present) is None and self._can(present):
            self._try(present, "present")
        self._confirm(self.most)
        self._explore()
        self._other_threads(self._chosen())
        chosen = self._chosen()
        self._beyond(chosen)
        return chosen

    def _confirm(self, limit: int) -> None:
        """Run what is best by what is known, as long as that was not run."""
        while len(self.trials) < min(limit, self.most):
            best = self.choice.smallest(self._rates())
            if self._trial(best) is not None or not self._can(best):
                return
            trial = self._try(best, "recommended")
            if trial.measured is None:
                self._bar(best)
            elif self._is_surprise(trial):
                self._refit(trial)

    def _explore(self) -> None:
        """Run what may be faster than what was chosen, as sure as the model is of it, but for the
        last run: other numbers of workers first, for these differ by more than by their luck."""
        while len(self.trials) < self.most - 1 and self.in_time():
            rates, ran = self._rates(), {trial.settings for trial in self.trials}
            least = rates.get(self._chosen(), 0.0)
            fresh = {s: rate for s, rate in rates.items() if s not in ran and self._can(s)}
            counts = {settings.num_workers for settings in ran}
            hopeful = {
                settings: rate
                for settings, rate in fresh.items()
                if settings.num_workers not in counts and rate * (1 + _UNSURE) > least
            } or {s: rate for s, rate in fresh.items() if rate * _MEASURED_WITHIN > least}
            if not hopeful:
                return
            fastest = self._simplest_alike(hopeful)
            if self._try(fastest, "fastest").measured is None:
                self._bar(fastest)

    def _simplest_alike(self, rates: Mapping[LoaderSettings, float]) -> LoaderSettings:
        """The smallest settings with the fastest number of workers whose rate cannot be told from
        the fastest: prefetching and pinning that gain nothing are not tried for luck."""
        workers = self.choice.smallest(rates, 1.0).num_workers
        alike = {s: rate for s, rate in rates.items() if s.num_workers == workers}
        return self.choice.smallest(alike, _MEASURED_WITHIN)

    def _rates(self) -> dict[LoaderSettings, float]:
        """What is known of the settings that can be."""
        return estimated_rates(self.choice, measured_rates(self.trials), self.noise)

    def _bar(self, failed: LoaderSettings) -> None:
        """Rule out what failed, and what its fault leaves no more."""
        candidates = self.choice.candidates
        for settings, candidate in candidates.items():
            reason = candidate.infeasible or self.choice.goal.infeasible(settings)
            if settings == failed:
                reason = "the loader failed with it in a real run"
            candidates[settings] = dataclasses.replace(candidate, infeasible=reason)

    def _other_threads(self, chosen: LoaderSettings) -> None:
        """Measure the chosen settings with the opposite setting of the libraries' threads, if a run
        is left: what they gain or lose is measured then."""
        for threads in (None, *self.choice.held):
            other = dataclasses.replace(chosen, library_threads=threads)
            if chosen.num_workers and self._trial(other) is None and self._can(other):
                self.choice.see(other)
                if self._try(other, "other threads").measured is None:
                    self._bar(other)

    def _beyond(self, chosen: LoaderSettings) -> None:
        """What twice as many workers do, if a run is left; they are not to be chosen."""
        twice = dataclasses.replace(chosen, num_workers=2 * chosen.num_workers)
        if (
            chosen.num_workers
            and len(self.trials) < self.most
            and not stays_busy(self._others)
            and self._trial(twice) is None
            and not self.choice.goal.impossible(twice)
        ):
            self._try(twice, "beyond the saturation point")

    def _can(self, settings: LoaderSettings) -> bool:
        is_over = len(self.trials) >= self.most or stays_busy(self._others)
        return not is_over and not self.choice.look(settings).infeasible

    def _try(self, settings: LoaderSettings, why: str) -> ConfirmingRun:
        """A real run; repeated while other processes are active and there is time, unless they
        seem to stay."""
        predicted = self.choice.look(settings).batches_per_s
        trial = ConfirmingRun(settings, predicted, self._ran(settings), why)
        while trial.is_disturbed and self._is_repeated(trial):
            run = self._ran(settings)
            least = min((trial.run, run), key=lambda each: each.others_cores or 0.0)
            kept = trial.run if run.failure is not None else least
            trial = dataclasses.replace(trial, run=kept, tries=trial.tries + 1)
        self.trials.append(trial)
        self.after(self)
        return trial

    def _is_repeated(self, trial: ConfirmingRun) -> bool:
        return trial.tries < TRIES and self.in_time() and not stays_busy(self._others)

    def _ran(self, settings: LoaderSettings) -> Run:
        run = self.runner(settings, self.choice.goal.consumer)
        self._others.append(run.others_cores)
        return run

    def _trial(self, settings: LoaderSettings) -> ConfirmingRun | None:
        return next((trial for trial in self.trials if trial.settings == settings), None)

    def _is_surprise(self, trial: ConfirmingRun) -> bool:
        if trial.reliable is None or not math.isfinite(trial.predicted):
            return False
        return abs(trial.reliable / trial.predicted - 1) > SURPRISE

    def _refit(self, trial: ConfirmingRun) -> None:
        """Fit what more busy cores cost to a run that was slower than predicted, and search
        again. A run that was faster leaves the choice: it was within reach."""
        assert trial.measured is not None
        if self.refitted or trial.measured > trial.predicted:
            return
        choice, threads = self.choice, trial.settings.library_threads
        fitted, consumer = choice.model(trial.settings), choice.goal.consumer

        def predicted(model: Fitted) -> float:
            return same_rate(model, trial.run, consumer)

        contention = fit_contention(fitted, predicted, trial.measured, 1.0)
        if contention > fitted.cores.contention:
            self.refitted = True
            barred = {s: c for s, c in choice.candidates.items() if c.infeasible}
            slower = fitted.with_contention(contention)
            if threads is None or not trial.settings.num_workers:
                self.choice = search(slower, choice.goal, choice.held)
            else:
                held = {**choice.held, threads: slower}
                self.choice = search(choice.fitted, choice.goal, held)
            for confirming_run in self.trials:  # what was run stays among what is chosen from
                self.choice.see(confirming_run.settings)
            self.choice.candidates |= barred

    def _chosen(self) -> LoaderSettings:
        """The smallest of the best that was run; of all where nothing was."""
        rates = self._rates()
        ran = {settings: rate for settings, rate in rates.items() if self._trial(settings)}
        if ran:
            return self.choice.smallest(ran, _MEASURED_WITHIN)
        return self.choice.smallest(rates, self.within)


# ---
# The verdict on a choice of settings, and what casts doubt on its measurements.


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
    text = "every run of the loader failed"
    return f"{text}: {faults[-1].title}" if faults else text


def _fewer(present: LoaderSettings, chosen: LoaderSettings) -> str:
    if chosen.num_workers >= present.num_workers:
        return ""
    return f"; {count(chosen.num_workers, 'worker')} would be enough"


def _rates(
    choice: Choice, trials: Sequence[ConfirmingRun], chosen: LoaderSettings, present: LoaderSettings
) -> tuple[float, float]:
    """The chosen and the current settings' rates, both measured or both predicted: one of each
    compares the model with the machine."""
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
    """The likely ratio of the chosen settings' rate to the current ones', by runs and model
    together; ``None`` where one of them cannot be."""
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


def probe_is_disturbed(probe: Probe, held: Probe | None) -> bool:
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
        meaning = "rates are predicted from the CPU time of batches; re-run when they have finished"
    elif probed:
        meaning = "without them the verdict holds even more; predicted rates are less certain"
    else:
        meaning = "the rates of these runs were not used; the verdict relies on the model instead"
    cores = statistics.fmean(seen.values())
    runs = count(len(seen), "run") if is_predicted else _named(list(seen))
    summary = f"other processes competed for {core_count(cores)} in {runs}"
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
    """The number of runs, and the names of some."""
    more = [f"and {len(runs) - _NAMED} more"] if len(runs) > _NAMED else []
    return f"{count(len(runs), 'run')} ({'; '.join([*runs[:_NAMED], *more])})"


def _settings(settings: LoaderSettings) -> str:
    if not settings.num_workers:
        return "no workers" + (", pinned" if settings.pin_memory else "")
    words = [count(settings.num_workers, "worker"), f"prefetch {settings.prefetch_factor}"]
    words += ["pinned"] if settings.pin_memory else []
    words += ["one thread per library"] if settings.library_threads is not None else []
    return ", ".join(words)
