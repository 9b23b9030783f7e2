"""The steps of ``trainfit plan``, each of which stands in for a process or two here."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers_loader import result
from tests.report.plan.test_text import PLAN
from trainfit.hardware import find_gpu
from trainfit.plan import planner
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.dataloader import section
from trainfit.plan.dataloader.measurement import Tuned
from trainfit.plan.dataloader.section import plan_tuning
from trainfit.plan.first_run import Settings
from trainfit.plan.planner import Planned, RealRuns, Simulated, plan
from trainfit.plan.runs.options import CommandOptions
from trainfit.results.plan import PlanResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import RunSpec

LINE = "python train.py --batch_size={batch_size:8} --j={num_workers:1} --pin={pin_memory:0}"
SIMULATED = dataclasses.replace(PLAN, launch="", launch_parts=(), loader_at="train.py:1")
WITH_BATCH = "python train.py --batch_size=24 --j=1 --pin=0"
WITH_LOADER = "python train.py --batch_size=24 --j=4 --pin=1"


class Steps:
    """What each step gives; raises where it is an exception. ``made`` has those that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **gives: Any) -> None:
        self.made: list[str] = []
        self.kept: list[PlanResult] = []
        self._gives = gives
        steps = (planner, "simulated"), (planner, "with_cpu"), (section, "tune_command")
        for module, name in steps:
            monkeypatch.setattr(module, name, self._step(name))

    def _step(self, name: str) -> Any:
        def step(first: Any, *_: Any) -> Any:
            self.made.append(name)
            given = self._gives.get(name, first)
            if isinstance(given, BaseException):
                raise given
            return given

        return step

    def plan(self, command: Command, real: RealRuns) -> Planned:
        gpu = find_gpu("RTX 4090")
        return plan(command, gpu, Settings(), real, keep=self.kept.append)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return parse_command(shlex.split(LINE))


def of(command: Command, interrupt: KeyboardInterrupt | None = None) -> Simulated:
    return Simulated(SIMULATED, CommandOptions(command, command), interrupt)


def test_the_launch_line_has_what_all_steps_found(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, simulated=of(command), tune_command=Tuned(result(), None))
    planned = steps.plan(command, RealRuns(versus_cpu=True))
    assert steps.made == ["simulated", "with_cpu", "tune_command"]
    assert (planned.result.launch, planned.interrupt) == (WITH_LOADER, None)
    assert planned.result.launch_parts
    # What simulated runs found is kept before anything is run for real.
    assert [each.launch for each in steps.kept] == [WITH_BATCH]


@pytest.mark.parametrize("broken", ["with_cpu", "tune_command"])
def test_an_interrupt_leaves_a_whole_plan(
    broken: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = KeyboardInterrupt()
    gives = {"tune_command": Tuned(result(), None), broken: interrupt}
    steps = Steps(monkeypatch, simulated=of(command), **gives)
    planned = steps.plan(command, RealRuns(versus_cpu=True))
    assert planned.interrupt is interrupt
    assert steps.made[-1] == broken
    assert planned.result.launch == WITH_BATCH and planned.result.loading is None


def test_an_interrupt_keeps_what_the_loaders_runs_showed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = KeyboardInterrupt()
    steps = Steps(monkeypatch, simulated=of(command), tune_command=Tuned(result(), interrupt))
    planned = steps.plan(command, RealRuns())
    assert planned.interrupt is interrupt and planned.result.interrupted
    assert planned.result.launch == WITH_LOADER and planned.result.loading is not None


@pytest.mark.parametrize(("thorough", "asked"), [(False, (12.0, 2)), (True, (20.0, 4))])
def test_a_thorough_plan_measures_more(
    thorough: bool,
    asked: tuple[float, int],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def tune(filled: Command, spec: RunSpec, progress: Any) -> Tuned:
        assert spec.loading is not None
        tuning = spec.loading.tuning
        seen.append((tuning.seconds, tuning.confirm, tuning.thorough))
        return Tuned(result(), None)

    Steps(monkeypatch, simulated=of(command))
    monkeypatch.setattr(section, "tune_command", tune)
    real = RealRuns(plan_tuning(thorough=thorough))
    plan(command, find_gpu("RTX 4090"), Settings(thorough=thorough), real)
    assert seen == [(*asked, thorough)]


def test_after_an_interrupt_of_the_simulated_runs_nothing_is_run_for_real(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = KeyboardInterrupt()
    steps = Steps(monkeypatch, simulated=of(command, interrupt))
    planned = steps.plan(command, RealRuns(versus_cpu=True))
    assert planned.interrupt is interrupt and steps.made == ["simulated"]
    assert planned.result.launch == WITH_BATCH


def test_without_real_runs_the_plan_is_that_of_the_simulated_ones(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, simulated=of(command))
    planned = steps.plan(command, RealRuns(loader=None))
    assert steps.made == ["simulated"] and not steps.kept
    assert planned.result.launch == WITH_BATCH


def test_the_given_step_is_what_the_loader_is_tuned_for(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def tune(filled: Command, spec: RunSpec, progress: Any) -> Tuned:
        seen.append(spec)
        return Tuned(result(), None)

    Steps(monkeypatch, simulated=of(command))
    monkeypatch.setattr(section, "tune_command", tune)
    step = Consumer(0.25, source="given")
    gpu, real = find_gpu("RTX 4090"), RealRuns(plan_tuning(thorough=False, step=step, seconds=3.0))
    plan(command, gpu, Settings(time_limit_s=60.0), real)
    (spec,) = seen
    assert spec.loading is not None
    tuning = spec.loading.tuning
    assert (tuning.step, tuning.step_is_bound, spec.gpu) == (step, False, gpu)
    assert (spec.loading.script_limit_s, spec.time_limit_s) == (60.0, 90.0)
