"""Confirms chosen settings by real runs, until measurement and model agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainfit.loader.measure.fitting import Fitted, fit_contention, same_rate
from trainfit.loader.measure.loop import is_disturbed, stays_busy
from trainfit.loader.measure.probe_runs import RUN_NOISE
from trainfit.loader.measure.records import Run
from trainfit.loader.search import WITHIN, Choice, estimated_rates, search
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

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
    return {each.settings: each.reliable for each in trials if each.reliable}


def measured_rate(trials: Sequence[ConfirmingRun], settings: LoaderSettings) -> float | None:
    """Batches a second of these settings; ``None`` where they were not run, or failed, or were run
    alongside other processes."""
    return next((each.reliable for each in trials if each.settings == settings), None)


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

    def _confirm(self, most: int) -> None:
        """Run what is best by what is known, as long as that was not run."""
        while len(self.trials) < min(most, self.most):
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
        """Not what failed, nor what its fault leaves no more."""
        candidates = self.choice.candidates
        for settings, each in candidates.items():
            reason = each.infeasible or self.choice.goal.infeasible(settings)
            if settings == failed:
                reason = "the loader failed with it in a real run"
            candidates[settings] = dataclasses.replace(each, infeasible=reason)

    def _other_threads(self, chosen: LoaderSettings) -> None:
        """The same with the libraries' threads the other way, if a run is left: what they gain or
        lose is measured then."""
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
        return next((each for each in self.trials if each.settings == settings), None)

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
            for each in self.trials:  # what was run stays among what is chosen from
                self.choice.see(each.settings)
            self.choice.candidates |= barred

    def _chosen(self) -> LoaderSettings:
        """The smallest of the best that was run; of all where nothing was."""
        rates = self._rates()
        ran = {settings: rate for settings, rate in rates.items() if self._trial(settings)}
        if ran:
            return self.choice.smallest(ran, _MEASURED_WITHIN)
        return self.choice.smallest(rates, self.within)
