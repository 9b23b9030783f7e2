"""Chosen twice, the same DataLoader settings? Model and runs weighed together, against runs alone.

Loaders of a queue model (2 cores, batches of 5 or 20 ms, slow or fast transfer, present settings of
0, 1 and 4 workers) stand for the truth, but for what a model does not know: each number of workers
and each setting is faster or slower by chance. A plan's model is off by a common factor and by one
for each number of workers; its real runs differ by chance. Two plans of each are compared.

    same      both plans recommend the same workers, prefetching and pinning
    regret    1 - rate of the recommended / rate of the best
    slower    plans whose settings are slower than the current ones by more than 3%

    python bench/launch_choice.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _bench import Figure, finish

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from helpers_costs import lognormal_costs  # noqa: E402
from trainfit.loader.confirmation import Confirmation  # noqa: E402
from trainfit.loader.measure.events import Cores  # noqa: E402
from trainfit.loader.measure.fitting import Fitted  # noqa: E402
from trainfit.loader.measure.model import Transfer  # noqa: E402
from trainfit.loader.measure.probe_runs import RUN_NOISE  # noqa: E402
from trainfit.loader.measure.records import Run, warm_up  # noqa: E402
from trainfit.loader.search import Choice, Goal, search  # noqa: E402
from trainfit.loader.verdicts import decide  # noqa: E402
from trainfit.results.dataloader import Candidate, LoaderSettings  # noqa: E402
from trainfit.results.runs.measurement import Consumer  # noqa: E402

#: Mean and coefficient of variation of a batch's cost (s), contention, transfer of a batch (s).
LOADERS = ((0.02, 0.1, 0.05, 5e-4), (0.02, 0.1, 0.3, 3e-3), (0.02, 0.5, 0.15, 1e-3))
STEPS = (0.0, 0.4)
PRESENT = (LoaderSettings(0), LoaderSettings(1), LoaderSettings(4))
#: Standard deviations of logarithms: two runs; what the model does not know of a number of workers,
#: and of a setting; what a plan's model is off by in common, and for a number of workers.
SCENARIOS = ((0.03, 0.03, 0.02), (0.06, 0.03, 0.02), (0.03, 0.015, 0.005), (0.06, 0.015, 0.005))
COMMON, FITTED = 0.04, 0.015
#: Deviations of a probe's repeated runs, from which a plan knows how much runs differ.
SEEN, KNOWN = 6, 4
MOST_WORKERS = 129
RULES = ("runs alone", "weighed")


@dataclass(frozen=True)
class Predicted:
    """What a search asks of a model's outcome."""

    batches_per_s: float
    waiting_share: float
    busy_cores: float


class Model:
    """The truth's rates, times an error for each setting."""

    def __init__(self, loader: Loader, error: Callable[[LoaderSettings], float]) -> None:
        self._loader, self._error = loader, error

    def predict(self, settings: LoaderSettings, consumer: Consumer) -> Predicted:
        found = self._loader.outcome(settings)
        rate = found.batches_per_s * math.exp(self._error(settings))
        return Predicted(rate, found.waiting_share, found.busy_cores)


class Steady(Confirmation):
    """Without fitting the model to a slow run: there is nothing here to fit."""

    def _refit(self, trial: object) -> None:
        pass


def name_of(settings: LoaderSettings) -> tuple[int, int, bool]:
    workers = settings.num_workers
    return workers, settings.prefetch_factor if workers else 2, settings.pin_memory


def gaussian(*key: int) -> float:
    """The same for the same key."""
    return float(np.random.default_rng(key).standard_normal())


def real(settings: LoaderSettings, rate: float) -> Run:
    handed = np.arange(warm_up(settings) + 12) / rate
    return Run(settings, 0.0, handed=handed, waited=np.full(len(handed), 0.1 / rate))


class Loader:
    """A simulated loader with a goal, and what the model says of its settings."""

    def __init__(self, costs: Sequence[float], step: float, present: LoaderSettings) -> None:
        mean_s, variation, contention, receive_s = costs
        batches = lognormal_costs(mean_s, variation, 60, seed=5, work=True)
        transfer = Transfer(receive_s=receive_s, pin_s=2e-4, next_s=3e-4, latency_s=5e-4)
        cores = Cores((1.0, 1.0), contention=contention)
        self.base = Fitted(batches, batches, transfer, transfer, cores, 0.03)
        self.goal = Goal(Consumer(step * mean_s), present, 4)
        self.candidates = search(self.base, self.goal).candidates

        self._others: dict[LoaderSettings, Candidate] = {}

    def outcome(self, settings: LoaderSettings) -> Candidate:
        """Simulated once."""
        known = self.candidates.get(settings) or self._others.get(settings)
        if known is None:
            found = self.base.predict(settings, self.goal.consumer)
            known = self._others[settings] = Candidate(
                settings, found.batches_per_s, found.waiting_share, found.busy_cores
            )
        return known

    def planned(
        self, truth: Callable[[LoaderSettings], float], noise: float, rule: str, seed: int
    ) -> LoaderSettings:
        """What one plan recommends."""
        rng = np.random.default_rng([seed, 99])
        common, own = COMMON * rng.standard_normal(), FITTED * rng.standard_normal(MOST_WORKERS)
        seen = noise * rng.standard_normal(SEEN)
        told = math.sqrt((KNOWN * RUN_NOISE**2 + float((seen**2).sum())) / (KNOWN + SEEN))
        told = told if rule == "weighed" else 1e-9

        def error(settings: LoaderSettings) -> float:
            return float(common + own[settings.num_workers])

        candidates = {
            settings: Candidate(
                settings,
                each.batches_per_s * math.exp(error(settings)),
                each.waiting_share,
                each.busy_cores,
            )
            for settings, each in self.candidates.items()
        }
        choice = Choice(self.goal, Model(self, error), {}, candidates)  # type: ignore[arg-type]

        def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
            return real(settings, truth(settings) * math.exp(noise * rng.standard_normal()))

        confirmation = Steady(choice, runner, 4, noise=told)
        chosen = confirmation.run()
        decision = decide(choice, confirmation.trials, chosen, "cores", noise=told)
        return self.goal.present if decision.keeps else chosen


def study(
    loaders: Sequence[Loader], scenario: tuple[float, float, float], rule: str, draws: int
) -> tuple[float, float, float]:
    """Shares of the same settings and of slower ones, and the mean regret."""
    noise, of_workers, of_setting = scenario
    same, regrets, slower = [], [], []
    for (number, loader), draw in itertools.product(enumerate(loaders), range(draws)):

        def truth(
            settings: LoaderSettings, loader: Loader = loader, key: tuple[int, int] = (number, draw)
        ) -> float:
            workers, prefetch, pinned = name_of(settings)
            off = of_workers * gaussian(*key, workers)
            off += of_setting * gaussian(*key, workers, prefetch, int(pinned))
            return loader.outcome(settings).batches_per_s * math.exp(off)

        plans = [loader.planned(truth, noise, rule, 2 * draw + plan) for plan in range(2)]
        same.append(name_of(plans[0]) == name_of(plans[1]))
        best = max(map(truth, loader.candidates))
        regrets += [1 - truth(plan) / best for plan in plans]
        slower += [truth(plan) < 0.97 * truth(loader.goal.present) for plan in plans]
    return statistics.fmean(same), statistics.fmean(slower), statistics.fmean(regrets)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the draws")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    draws = 2 if options.quick else 20
    loaders = [Loader(*each) for each in itertools.product(LOADERS, STEPS, PRESENT)]
    found = {
        (scenario, rule): study(loaders, scenario, rule, draws)
        for scenario, rule in itertools.product(SCENARIOS, RULES)
    }
    if not options.json:
        for (scenario, rule), (same, slower, regret) in found.items():
            noise, of_workers, of_setting = scenario
            print(
                f"runs differ by {noise:.1%}, unknown {of_workers:.1%} and {of_setting:.1%}, "
                f"{rule}: same {same:.0%}, slower {slower:.1%}, regret {regret:.2%}"
            )
    gained = [found[each, RULES[1]][0] - found[each, RULES[0]][0] for each in SCENARIOS]
    lost = [found[each, RULES[1]][2] - found[each, RULES[0]][2] for each in SCENARIOS]
    figures = [
        Figure("launch_choice_same_gained", 100 * statistics.fmean(gained), 0, False, " points"),
        Figure("launch_choice_regret_lost", 100 * statistics.fmean(lost), 0.5, True, " points"),
    ]
    return finish(figures, options.json, {})


if __name__ == "__main__":
    sys.exit(main())
