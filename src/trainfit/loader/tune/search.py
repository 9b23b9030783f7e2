"""Chooses a DataLoader's settings: predict many, run few.

The smallest settings within 2% of the best predicted end-to-end rate are recommended, once
real runs of the loader against the consumer have confirmed them: fewer workers leave cores and
memory to the main process, and what the model cannot tell apart is not worth a worker.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainfit.loader.calibration.fitting import Fitted
from trainfit.results.loader.candidates import Candidate
from trainfit.results.loader.settings import LoaderSettings
from trainfit.results.runs.loading import Consumer

#: Of the best rate, what the recommended settings have at least.
WITHIN: Final = 0.98
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

    def _size(self, settings: LoaderSettings) -> tuple[int | bool, ...]:
        """Workers first (each costs RAM and a core), then what changes nothing, then what needs no
        variable, then the order of batches, then memory.

        Going from some workers to none is the last choice: each batch then adds to the step, and
        what that loses is within what two runs differ by."""
        present, factor = self.goal.present, settings.prefetch_factor
        gives_up = settings.num_workers == 0 < present.num_workers
        reordered = settings.in_order != present.in_order
        differs = settings.pin_memory != present.pin_memory
        # A factor of 1 leaves a worker idle until its batch is fetched: only if it must be.
        memory = (factor == 1, reordered, factor > 2, differs or factor > 2)
        held = settings.library_threads is not None
        return gives_up, settings.num_workers, settings != present, held, *memory


def search(fitted: Fitted, goal: Goal, held: Mapping[int, Fitted] | None = None) -> Choice:
    """All candidates needed to find the saturation point; ``held`` as in :class:`Choice`."""
    choice = Choice(goal, fitted, held or {})
    choice.search()
    return choice


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
