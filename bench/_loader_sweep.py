"""Measures DataLoaders for loader_accuracy.py: every setting of a grid, and what tools choose."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from _loader_figures import OURS, Reading, SettingPrediction, Study, ToolChoice, top
from _loader_workloads import SEED, LoaderCase

from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.loader.measure.loop import is_disturbed
from trainfit.loader.measure.noise_correction import (
    Slowing,
    sensitivity,
    with_speeds,
    working_share,
)
from trainfit.loader.measure.records import Run
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings, steady
from trainfit.results.runs.measurement import Consumer

WORKERS, PREFETCH = (0, 1, 2, 3, 4, 6, 8), (1, 2, 4, 8)
QUICK_WORKERS, QUICK_PREFETCH = (0, 1, 2, 4), (2,)
#: What a run is for.
SWEEP, FINALS, ANCHORS = "sweep", "finals", "anchors"
#: Settings that are measured right before and after the probe, as far as the grid has them: how
#: fast the machine is then next to the sweep.
ANCHORED = (
    *(LoaderSettings(0), LoaderSettings(1, 4), LoaderSettings(2, 4), LoaderSettings(4, 2)),
    LoaderSettings(2, 4, pin_memory=True),
)
#: What a loader has of which nothing is said.
DEFAULT = ToolChoice("PyTorch's default", LoaderSettings(0), 0.0)
#: Of the sweep's best, so many are measured again next to the choices.
FINALISTS = 3
#: A reading taken while the cores ran below this share of their full speed, or next to other
#: processes, is taken again.
QUIET = 0.9
#: A probe whose runs met less than this on average is made again.
SLOWED = 0.85

Say = Callable[[str], None]
#: Which reading: of which stage, of which setting, in which round.
_Key = tuple[str, LoaderSettings, int]


class Probed(Protocol):
    """What a tool knows of a workload after its probe."""

    seconds: float
    about: Any

    def batches_per_s(self, settings: LoaderSettings, consumer: Consumer) -> float:
        """What it predicts."""


class Tool(Protocol):
    """The tool under test: predictions after a probe, and a choice with all that it takes.

    It is given the study's own watch of the cores' speed: what their full speed is must be the
    same for what is predicted and what is measured.
    """

    def probe(self, workload: Workload, watch: CoreSpeeds) -> Probed: ...

    def choose(
        self, workload: Workload, consumer: Consumer, watch: CoreSpeeds
    ) -> tuple[ToolChoice, Any]: ...


@dataclass(frozen=True)
class SweepPlan:
    """How much is measured: settings, rounds of the sweep, seconds of counted batches a run.

    Readings (and probes) on slowed cores are taken again ``repeats`` times at most, the others of
    the round first: a neighbour's work lasts for seconds.
    """

    grid: tuple[LoaderSettings, ...]
    seconds: float
    rounds: int
    final_rounds: int
    repeats: int = 0


def grid(workers: Iterable[int], prefetch: Iterable[int]) -> tuple[LoaderSettings, ...]:
    """Workers × prefetch × pin × order; without workers only pinning is a choice."""
    prefetch = tuple(prefetch)
    settings: list[LoaderSettings] = []
    for count, pin in itertools.product(workers, (False, True)):
        if count == 0:
            settings.append(LoaderSettings(0, pin_memory=pin))
            continue
        settings += [
            LoaderSettings(count, factor, pin_memory=pin, in_order=in_order)
            for factor, in_order in itertools.product(prefetch, (True, False))
        ]
    return tuple(settings)


FULL_GRID = grid(WORKERS, PREFETCH)


class LoaderStudy:
    """Studies one workload; ``run`` is replaced in tests."""

    def __init__(
        self,
        case: LoaderCase,
        data: Path,
        plan: SweepPlan,
        tool: Tool,
        say: Say,
        run: Callable[..., Run] = run_loader,
    ) -> None:
        self.case, self.data, self.plan = case, data, plan
        self.tool, self.say, self.run = tool, say, run
        self._taken: dict[_Key, list[tuple[Reading, Run]]] = {}
        self._watch = CoreSpeeds()

    def study(self) -> Study:
        """The tool's turn is amid the sweep's rounds: the machine's speed drifts."""
        consumer = Consumer(0.0)
        found = Study(self.case.name, len(FULL_GRID), run_s=self.plan.seconds)
        before = (self.plan.rounds + 1) // 2
        with self._watch:
            self._sweep(found, consumer, range(before))
            self._predict(found, consumer)
            found.choices = [self._choose(found, consumer), DEFAULT]
            self._sweep(found, consumer, range(before, self.plan.rounds))
            self._finals(found, consumer)
        return found

    def _predict(self, study: Study, consumer: Consumer) -> None:
        """Predict every setting of the grid, by a probe between two rounds of the anchors."""
        anchors = [each for each in self.plan.grid if each in ANCHORED]
        self._round(study, ANCHORS, anchors, consumer, 0)
        probed = self._probe(study)
        self._round(study, ANCHORS, anchors, consumer, 1)
        if probed is not None:
            study.probe_s, study.probe = probed.seconds, probed.about
            study.predictions = [
                SettingPrediction(settings, probed.batches_per_s(settings, consumer))
                for settings in self.plan.grid
            ]

    def _sweep(self, study: Study, consumer: Consumer, rounds: range) -> None:
        """Each setting once a round, in another order each time."""
        for number in rounds:
            order = list(self.plan.grid)
            random.Random(f"{study.workload} {number}").shuffle(order)
            self._round(study, SWEEP, order, consumer, number)
            self.say(f"{study.workload}: round {number + 1} of the sweep")

    def _finals(self, study: Study, consumer: Consumer) -> None:
        chosen = [
            steady(choice.settings) for choice in study.choices if choice.settings is not None
        ]
        finalists = list(dict.fromkeys([*chosen, *top(study, FINALISTS)]))
        for number in range(self.plan.final_rounds):
            turn = finalists[number % len(finalists) :] + finalists[: number % len(finalists)]
            self._round(study, FINALS, turn, consumer, number)
        self.say(f"{study.workload}: finals of {len(finalists)} settings")

    def _round(
        self,
        study: Study,
        stage: str,
        order: Sequence[LoaderSettings],
        consumer: Consumer,
        number: int,
    ) -> None:
        """Read each setting; those that were disturbed from outside again, after the others."""
        left = list(order)
        for _ in range(1 + self.plan.repeats):
            for settings in left:
                key = (stage, settings, number)
                self._taken.setdefault(key, []).append(self._read(settings, consumer, number))
            self._keep_the_quietest(study)
            readings = {SWEEP: study.sweep, FINALS: study.finals, ANCHORS: study.anchors}[stage]
            disturbed = {
                reading.settings
                for reading in readings
                if reading.round == number and quietness(reading) < (True, QUIET)
            }
            left = [settings for settings in order if settings in disturbed]

    def _read(
        self, settings: LoaderSettings, consumer: Consumer, number: int
    ) -> tuple[Reading, Run]:
        torch.manual_seed(SEED + number)  # the same order of samples for each setting
        workload = self._workload()
        began = time.monotonic()
        run = self.run(workload, settings, consumer=consumer, seconds=self.plan.seconds)
        return reading_of(run, number, time.monotonic() - began), run

    def _keep_the_quietest(self, study: Study) -> None:
        """Of each setting's readings in a round, the one at the highest speed of the cores.

        All get the rates that they would have had at full speed; what full speed is, is known
        the better the more was seen, so earlier readings change, too.
        """
        of_all = [run for pairs in self._taken.values() for _, run in pairs]
        runs = iter(with_speeds(of_all, self._watch))
        seen = {
            key: [(reading, next(runs)) for reading, _ in pairs]
            for key, pairs in self._taken.items()
        }
        of_setting: dict[LoaderSettings, list[Run]] = {}
        for (_, settings, _), pairs in seen.items():
            of_setting.setdefault(settings, []).extend(run for _, run in pairs)
        slowed = slowing(list(of_setting.values()), self._watch)
        found: dict[str, list[Reading]] = {SWEEP: [], FINALS: [], ANCHORS: []}
        for (stage, _, _), pairs in seen.items():
            readings = [at_full_speed(reading, run, slowed) for reading, run in pairs]
            found[stage].append(max(readings, key=quietness))
        study.sweep, study.finals, study.anchors = found[SWEEP], found[FINALS], found[ANCHORS]

    def _workload(self) -> Workload:
        return Workload(self.case.loader(self.data))

    def _probe(self, study: Study) -> Probed | None:
        """As readings are: again where it only met slowed cores; the quietest counts."""
        found = [self._probed(study)]
        while _slowed(found[-1]) and len(found) <= self.plan.repeats:
            self.say(f"{study.workload}: the probe met slowed cores, again")
            found.append(self._probed(study))
        return max(found, key=_core_speed)

    def _probed(self, study: Study) -> Probed | None:
        # Predicted are the batches that are measured: how well the first of a shuffled epoch
        # stand for all of it is another question, which a probe answers with its variation.
        torch.manual_seed(SEED)
        try:
            return self.tool.probe(self._workload(), self._watch)
        except Exception as error:  # the other workloads go on; the figures count what is missing
            self.say(f"{study.workload}: the probe failed: {_last_line(error)}")
            study.probe = traceback.format_exc()
            return None

    def _choose(self, study: Study, consumer: Consumer) -> ToolChoice:
        torch.manual_seed(SEED)
        began = time.monotonic()
        try:
            choice, study.ours = self.tool.choose(self._workload(), consumer, self._watch)
        except Exception as error:
            self.say(f"{study.workload}: tuning failed: {_last_line(error)}")
            study.ours = traceback.format_exc()
            return ToolChoice(OURS, None, time.monotonic() - began, f"failed: {_last_line(error)}")
        return choice


def _core_speed(probed: Probed | None) -> float:
    """Of its runs on average; -1 where there was none."""
    about = probed.about if probed is not None else None
    speed = about.get("core_speed") if isinstance(about, Mapping) else None
    return -1.0 if speed is None else float(speed)


def _slowed(probed: Probed | None) -> bool:
    return 0 <= _core_speed(probed) < SLOWED


def quietness(reading: Reading) -> tuple[bool, float]:
    """Was the loader alone, and at which share of their full speed were the cores (1: not told)?"""
    alone = not is_disturbed(reading.others_cores)
    return alone, 1.0 if reading.core_speed is None else reading.core_speed


def slowing(groups: Sequence[Sequence[Run]], watch: CoreSpeeds) -> Slowing:
    """How slowed cores slow this workload: batches at several speeds tell. The runs of a group are
    of the same settings."""
    few = [run for runs in groups for run in runs if run.settings.num_workers < 2]
    cores = len(os.sched_getaffinity(0))
    return Slowing(working_share(few), cores, sensitivity(groups, watch.pieces()))


def at_full_speed(reading: Reading, run: Run, slowed: Slowing) -> Reading:
    """The same with its rate at the cores' full speed, where that is known."""
    if reading.as_run is None or run.core_speed is None:
        return reading
    full = slowed.with_full_speed_rate(run)
    return dataclasses.replace(
        reading,
        batches_per_s=full.full_speed_batches_per_s,
        core_speed=run.core_speed.speed,
    )


def reading_of(run: Run, number: int, seconds: float) -> Reading:
    """What a run of round ``number`` says, that took so many seconds with all around it."""
    rate = run.batches_per_s if run.failure is None else None
    return Reading(
        run.settings,
        number,
        rate,
        run.waiting_share,
        seconds,
        failure_text(run),
        rate,
        others_cores=run.others_cores,
    )


def failure_text(run: Run) -> str:
    """One line, empty for a run that went well."""
    failure = run.failure
    if failure is None:
        return ""
    if failure.hung:
        return "hung"
    if failure.error_type:
        return f"{failure.error_type}: {failure.message.splitlines()[0][:160]}"
    return f"exit status {failure.exit_code}"


def studied(benches: Iterable[LoaderStudy], keep: Callable[[Sequence[Study]], None]) -> list[Study]:
    """All studies; ``keep`` is given all that there are after each workload."""
    studies: list[Study] = []
    for bench in benches:
        studies.append(bench.study())
        keep(studies)
    return studies


def _last_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1][:160]}" if text else type(error).__name__
