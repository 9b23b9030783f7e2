"""Chooses a DataLoader's settings: predict many, run few.

The smallest settings within 2% of the best predicted end-to-end rate are recommended, once
real runs of the loader against the consumer have confirmed them: fewer workers leave cores and
memory to the main process, and what the model cannot tell apart is not worth a worker.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainfit.loader.measure.other_processes import is_disturbed
from trainfit.loader.measure.run import Run
from trainfit.loader.model.dataloader import Consumer
from trainfit.loader.model.fitting import Fitted, fit_contention, same_rate
from trainfit.results.loader import Candidate, LoaderSettings

#: Of the best rate, what the recommended settings have at least.
WITHIN: Final = 0.98
#: By how much a real run may differ from its prediction before the model is fitted to it.
SURPRISE: Final = 0.08
#: How often a run is made that other processes disturb, at most.
TRIES: Final = 2
#: Runs until the present settings have theirs.
_FIRST: Final = 2
#: By how much settings may be faster than the model says, and what they must promise beyond the
#: chosen to be worth a run where they hardly differ from others that were run.
_UNSURE: Final = 0.05
_GAIN: Final = 0.003
#: Of the best measured rate, what smaller settings that were run must have: single runs of the same
#: settings differ by some percent, and the next plan is to come to the same line.
_MEASURED_WITHIN: Final = 0.96
#: What one thread for each library must gain, other settings alike, to ask for it: two runs of the
#: same settings differ by that much.
_HELD_GAIN: Final = 1.05
PREFETCH: Final = (1, 2, 4, 8)
#: Workers that are tried: all up to eight, then some; around the knee all again.
_WORKERS: Final = (*range(9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
#: Of an epoch's time, what restarting the workers may cost before they are kept.
BUBBLE: Final = 0.01

Infeasible = Callable[[LoaderSettings], str]
"""Why settings cannot start, or nothing."""
Oversubscribed = Callable[[LoaderSettings, float], str]
"""Why settings that keep so many cores busy are slower than their workers promise, or nothing."""
Runner = Callable[[LoaderSettings, Consumer], Run]
"""Runs the loader for real."""


@dataclass(frozen=True)
class Goal:
    """What settings are chosen for.

    ``present`` are the user's settings: start method and threads are kept, and so is the order
    unless ``any_order`` will do.
    ``infeasible`` says what cannot be chosen, ``impossible`` what cannot even be tried;
    ``oversubscribed`` what is not to be chosen unless it is the present.
    """

    consumer: Consumer
    present: LoaderSettings
    most_workers: int
    least_workers: int = 0
    any_order: bool = False
    infeasible: Infeasible = lambda settings: ""
    impossible: Infeasible = lambda settings: ""
    oversubscribed: Oversubscribed = lambda settings, busy_cores: ""


@dataclass
class Choice:
    """Candidates with what the model says of them, and which of them is chosen.

    ``fitted`` is the loader as it is, ``held`` the same with libraries in workers held to so many
    threads, where that was measured.
    """

    goal: Goal
    fitted: Fitted
    held: Mapping[int, Fitted] = field(default_factory=dict)
    candidates: dict[LoaderSettings, Candidate] = field(default_factory=dict)

    def model(self, settings: LoaderSettings) -> Fitted:
        """What predicts these settings."""
        threads = settings.library_threads
        return self.fitted if threads is None or not settings.num_workers else self.held[threads]

    def see(self, settings: LoaderSettings) -> Candidate:
        """The candidate of these settings, from now on one to choose from."""
        if settings not in self.candidates:
            self.candidates[settings] = self.look(settings)
        return self.candidates[settings]

    def look(self, settings: LoaderSettings) -> Candidate:
        """What the model says of these settings, without making them a candidate."""
        known = self.candidates.get(settings)
        if known is not None:
            return known
        outcome = self.model(settings).predict(settings, self.goal.consumer)
        return Candidate(
            settings,
            outcome.batches_per_s,
            outcome.waiting_share,
            outcome.busy_cores,
            infeasible=self.goal.infeasible(settings),
            oversubscribed=self.goal.oversubscribed(settings, outcome.busy_cores),
        )

    def search(self) -> None:
        """Simulate settings until the knee is known.

        The present settings of prefetching and the most of it bracket what lies between; all of
        it is tried around the knee.
        """
        goal = self.goal
        counts = [n for n in _WORKERS if goal.least_workers <= n <= goal.most_workers]
        if goal.most_workers not in counts:
            counts.append(goal.most_workers)
        for count in counts:
            self._see(count, (2, max(PREFETCH)))
        self.see(goal.present)
        while True:
            knee = self.best().num_workers
            # All numbers between those that were tried could be smaller and as good.
            below = max((n for n in counts if n < knee), default=goal.least_workers)
            for count in range(below, knee + 1):
                self._see(count, PREFETCH)
            if self.best().num_workers in range(below, knee + 1):
                return

    def _see(self, count: int, factors: Sequence[int]) -> None:
        either = self.goal.any_order and count > 1
        orders = (True, False) if either else (self.goal.present.in_order,)
        threads = (None, *self.held) if count else (None,)
        for factor, pinned, in_order, held in itertools.product(
            factors if count else [2], (False, True), orders, threads
        ):
            self.see(
                dataclasses.replace(
                    self.goal.present,
                    num_workers=count,
                    prefetch_factor=factor,
                    pin_memory=pinned,
                    in_order=in_order,
                    library_threads=held,
                )
            )

    def rates(self) -> dict[LoaderSettings, float]:
        """The model's rate of the feasible settings; oversubscribed settings are not credited
        with more."""
        return {
            settings: each.batches_per_s
            for settings, each in self.candidates.items()
            if not each.infeasible and (settings == self.goal.present or not each.oversubscribed)
        }

    def best_rate(self) -> float:
        """Of the settings that can be."""
        return max(self.rates().values(), default=0.0)

    def best(self) -> LoaderSettings:
        """The smallest settings within 2% of the best rate; the present where nothing can be."""
        return self.smallest(self.rates())

    def smallest(
        self, rates: Mapping[LoaderSettings, float], share: float = WITHIN
    ) -> LoaderSettings:
        """The smallest of those that have at least this share of the best of these rates; the
        present settings where there are none."""
        least = share * max(rates.values(), default=0.0)
        good = [settings for settings, rate in rates.items() if rate >= least]
        best = min(good, key=self._size, default=self.goal.present)
        free = dataclasses.replace(best, library_threads=None)
        return free if rates.get(free, 0.0) * _HELD_GAIN > rates.get(best, 0.0) else best

    def _size(self, settings: LoaderSettings) -> tuple[int, bool, bool, bool, bool, bool, bool]:
        """Workers first (each costs RAM and a core), then what changes nothing, then what needs no
        variable, then the order of batches, then memory."""
        present, factor = self.goal.present, settings.prefetch_factor
        reordered = settings.in_order != present.in_order
        differs = settings.pin_memory != present.pin_memory
        # A factor of 1 leaves a worker idle until its batch is fetched: only if it must be.
        memory = (factor == 1, reordered, factor > 2, differs or factor > 2)
        held = settings.library_threads is not None
        return settings.num_workers, settings != present, held, *memory


def search(fitted: Fitted, goal: Goal, held: Mapping[int, Fitted] | None = None) -> Choice:
    """All candidates needed to find the saturation point; ``held`` as in :class:`Choice`."""
    choice = Choice(goal, fitted, held or {})
    choice.search()
    return choice


@dataclass(frozen=True)
class Trial:
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


def measured_rate(trials: Sequence[Trial], settings: LoaderSettings) -> float | None:
    """Batches a second of these settings; ``None`` where they were not run, or failed, or were run
    alongside other processes."""
    return next((each.reliable for each in trials if each.settings == settings), None)


@dataclass
class Confirmation:
    """Real runs of what was chosen, until measurement and model agree or runs run out.

    ``after`` is called after each of them; ``in_time`` says whether there is time for one that is
    not needed, to look for something faster.
    """

    choice: Choice
    runner: Runner
    most: int
    after: Callable[[Confirmation], None] = lambda confirmation: None
    in_time: Callable[[], bool] = lambda: True
    trials: list[Trial] = field(default_factory=list)
    refitted: bool = False

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
            } or {s: rate for s, rate in fresh.items() if rate > least * (1 + _GAIN)}
            if not hopeful:
                return
            fastest = self.choice.smallest(hopeful, 1.0)
            if self._try(fastest, "fastest").measured is None:
                self._bar(fastest)

    def _rates(self) -> dict[LoaderSettings, float]:
        """What is known of the settings that can be: as measured, else what the model says, with
        what it said too much or too little of those that were run (of one of them by half: the
        other half of its errors is each one's own)."""
        found = self.choice.rates()
        ran = {each.settings: each.reliable for each in self.trials if each.reliable}
        missed = [
            math.log(rate / self.choice.look(settings).batches_per_s)
            for settings, rate in ran.items()
            if math.isfinite(self.choice.look(settings).batches_per_s)
        ]
        common = math.exp(sum(missed) / (len(missed) + 1))
        return {settings: ran.get(settings, common * rate) for settings, rate in found.items()}

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
            and self._trial(twice) is None
            and not self.choice.goal.impossible(twice)
        ):
            self._try(twice, "beyond the saturation point")

    def _can(self, settings: LoaderSettings) -> bool:
        return len(self.trials) < self.most and not self.choice.look(settings).infeasible

    def _try(self, settings: LoaderSettings, why: str) -> Trial:
        """A real run; repeated while other processes are active and there is time."""
        predicted = self.choice.look(settings).batches_per_s
        trial = Trial(settings, predicted, self.runner(settings, self.choice.goal.consumer), why)
        while trial.is_disturbed and trial.tries < TRIES and self.in_time():
            run = self.runner(settings, self.choice.goal.consumer)
            least = min((trial.run, run), key=lambda each: each.others_cores or 0.0)
            kept = trial.run if run.failure is not None else least
            trial = dataclasses.replace(trial, run=kept, tries=trial.tries + 1)
        self.trials.append(trial)
        self.after(self)
        return trial

    def _trial(self, settings: LoaderSettings) -> Trial | None:
        return next((each for each in self.trials if each.settings == settings), None)

    def _is_surprise(self, trial: Trial) -> bool:
        if trial.reliable is None or not math.isfinite(trial.predicted):
            return False
        return abs(trial.reliable / trial.predicted - 1) > SURPRISE

    def _refit(self, trial: Trial) -> None:
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
        """The smallest of the best that was run; by the model where nothing was."""
        rates = self._rates()
        ran = {settings: rate for settings, rate in rates.items() if self._trial(settings)}
        return self.choice.smallest(ran, _MEASURED_WITHIN) if ran else self.choice.smallest(rates)


def keep_workers(
    present: LoaderSettings, settings: LoaderSettings, start_s: float, epoch_s: float | None
) -> bool:
    """Should ``persistent_workers`` be set? Yes where restarting them costs over 1% of an epoch."""
    if settings.num_workers == 0:
        return False
    if epoch_s is None or epoch_s <= 0:
        return present.persistent_workers
    return settings.num_workers * start_s > BUBBLE * epoch_s or present.persistent_workers


def beyond_knee(
    choice: Choice, chosen: LoaderSettings, factors: Sequence[int] = (2, 4)
) -> tuple[Candidate, ...]:
    """The same settings with so many times the workers."""
    counts = [factor * chosen.num_workers for factor in factors if chosen.num_workers]
    return tuple(choice.look(dataclasses.replace(chosen, num_workers=n)) for n in counts)
