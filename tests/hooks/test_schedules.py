"""Schedules of learning rates that are over before their training are found by stepping ahead."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from trainfit.findings.training.learning import of_learning
from trainfit.hooks.schedules import (
    Schedule,
    schedule_end,
    schedule_fades,
    schedule_unused,
    stepped_first,
)
from trainfit.results.runs.learning import LearningFacts, ScheduleEnd, ScheduleFades

Make = Callable[[torch.optim.Optimizer], Any]


def _stepped(make: Make, each: int, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer after so many steps, and its schedule, with a step for ``each`` of them."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    scheduler = make(optimizer)
    for step in range(steps):
        optimizer.step()
        if step % each == 0:
            scheduler.step()
    return optimizer, scheduler


def end_of(make: Make, ahead: int, *, each: int = 1, steps: int = 4) -> ScheduleEnd | None:
    """Of a training of ``ahead`` steps, after 4, with a step of the schedule for ``each`` of them;
    neither schedule nor optimizer is changed."""
    optimizer, scheduler = _stepped(make, each, steps)
    before = scheduler.last_epoch, optimizer.param_groups[0]["lr"]
    made = [Schedule(weakref.ref(scheduler), "train.py:7")]
    found = schedule_end(made, steps, ahead, [optimizer])
    assert before == (scheduler.last_epoch, optimizer.param_groups[0]["lr"])
    return found


def fades(make: Make, *, each: int = 1, steps: int = 32) -> ScheduleFades | None:
    """After so many steps of the optimizer, the last of which the schedule has not followed yet."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    scheduler = make(optimizer)
    for step in range(1, steps):
        optimizer.step()
        if step % each == 0:
            scheduler.step()
    made = [Schedule(weakref.ref(scheduler), "train.py:7")]
    return schedule_fades(made, steps, [optimizer])


def test_what_multiplies_a_rate_with_each_step_is_told_from_what_does_with_each_epoch() -> None:
    found = fades(lambda it: schedules.StepLR(it, 30))
    assert found == ScheduleFades("StepLR", 30, 0.1, 240, "train.py:7")
    quick = fades(lambda it: schedules.ExponentialLR(it, 0.95))
    assert quick is not None and (quick.every_steps, quick.step) == (1, 360)
    assert fades(lambda it: schedules.StepLR(it, 30), each=8) is None
    assert fades(lambda it: schedules.StepLR(it, 30), steps=4) is None
    assert fades(lambda it: schedules.CosineAnnealingLR(it, 300)) is None
    assert fades(lambda it: schedules.StepLR(it, 30, gamma=1.0)) is None


@pytest.mark.parametrize(
    ("make", "step", "error"),
    [
        (lambda it: schedules.OneCycleLR(it, 1e-3, total_steps=100), 101, "ValueError: Tried to"),
        (lambda it: schedules.LambdaLR(it, lambda n: 1 - n / 100), 101, ""),
        (lambda it: schedules.LambdaLR(it, lambda n: max(0, 1 - n / 100)), 100, ""),
        (lambda it: schedules.StepLR(it, 50), 450, ""),
        (
            lambda it: schedules.SequentialLR(
                it, [schedules.LinearLR(it, 0.1, 1, 10), schedules.PolynomialLR(it, 90)], [10]
            ),
            100,
            "",
        ),
    ],
)
def test_a_schedule_that_is_over_too_soon(make: Make, step: int, error: str) -> None:
    found = end_of(make, 1000)
    assert found is not None and (found.step, found.of_steps) == (step, 1000)
    assert found.error.startswith(error) and bool(found.error) == bool(error)
    assert end_of(make, step - 1) is None and end_of(make, 0) is None
    (said,) = of_learning(LearningFacts(steps=4, schedule=found))
    assert said.kind == ("schedule_ends" if error or found.rate < 0 else "rate_vanishes")
    assert str(said.place) == "train.py:7" and said.subject == f"after {step} steps" * bool(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda it: schedules.CosineAnnealingLR(it, 500),  # once up again
        lambda it: schedules.CosineAnnealingWarmRestarts(it, 50),
        lambda it: schedules.ExponentialLR(it, 0.999),
        lambda it: schedules.LambdaLR(it, lambda n: max(0, 1 - n / 980)),  # its last steps
    ],
)
def test_a_schedule_that_lasts(make: Make) -> None:
    assert end_of(make, 1000) is None


def test_the_rate_after_the_last_step_is_used_by_none() -> None:
    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return schedules.OneCycleLR(optimizer, 5e-4, total_steps=100, anneal_strategy="linear")

    assert end_of(linear, 100) is None  # PyTorch leaves a rate below 0 there
    found = end_of(lambda it: schedules.LambdaLR(it, lambda n: 1 - n / 99), 101)
    assert found is not None and found.rate < 0 and found.step == 100


def test_how_often_it_will_be_stepped_has_to_be_known() -> None:
    assert end_of(lambda it: schedules.StepLR(it, 5), 1000, each=2) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda it: schedules.OneCycleLR(it, 1e-3, epochs=10, steps_per_epoch=100), "OneCycleLR"),
        (lambda it: schedules.CosineAnnealingLR(it, 1000), "CosineAnnealingLR"),
        (lambda it: schedules.LambdaLR(it, lambda n: max(0, 1 - n / 1000)), "LambdaLR"),
    ],
)
def test_a_schedule_as_long_as_the_run_is_stepped_with_it(make: Make, name: str) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    scheduler = make(optimizer)
    made = [Schedule(weakref.ref(scheduler), "train.py:7")]
    found = schedule_unused(made, 3, 1000, [optimizer])
    assert found is not None and (found.name, found.made_for_steps) == (name, 1000)
    (said,) = of_learning(LearningFacts(steps=3, schedule_unused=found))
    assert said.kind == "schedule_unused" and str(said.place) == "train.py:7"
    assert schedule_unused(made, 3, 10_000, [optimizer]) is None  # as many as it has epochs
    assert schedule_unused(made, 2, 1000, [optimizer]) is None
    assert schedule_unused(made, 3, 1000, []) is None
    optimizer.step()
    scheduler.step()
    assert schedule_unused(made, 3, 1000, [optimizer]) is None


def test_a_schedule_without_a_length_is_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    for made in (
        schedules.ReduceLROnPlateau(optimizer),
        schedules.StepLR(optimizer, 30),
        schedules.ExponentialLR(optimizer, 0.9),
    ):
        assert schedule_unused([Schedule(weakref.ref(made), None)], 3, 1000, [optimizer]) is None


def test_a_schedule_that_only_gets_smaller_is_made_for_no_length() -> None:
    """After 360 epochs the rate is next to nothing; that the run has 360 steps is chance."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    made = schedules.ExponentialLR(optimizer, 0.95)
    assert schedule_unused([Schedule(weakref.ref(made), None)], 3, 360, [optimizer]) is None


def test_a_schedule_that_waits_for_a_warm_up_by_hand() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    made = schedules.CosineAnnealingLR(optimizer, 970)
    known = [Schedule(weakref.ref(made), None)]
    assert schedule_unused(known, 3, 1000, [optimizer]) is not None
    optimizer.param_groups[0]["lr"] = 1e-4
    assert schedule_unused(known, 3, 1000, [optimizer]) is None


def test_a_cosine_that_goes_up_again() -> None:
    def make(it: torch.optim.Optimizer) -> Any:
        return schedules.CosineAnnealingLR(it, 50)

    found = end_of(make, 1000)
    assert found is not None and (found.step, found.of_steps, found.rises) == (50, 1000, True)
    (said,) = of_learning(LearningFacts(steps=4, schedule=found))
    assert (said.kind, said.severity) == ("rate_rises", "warning")
    assert "50 steps of 1000" in said.title
    assert end_of(make, 60) is None
    assert end_of(lambda it: schedules.CosineAnnealingWarmRestarts(it, 50), 1000) is None


def _made_for_more(make: Make, ahead: int, *, each: int = 1, steps: int = 4) -> Any:
    """Of a training of ``ahead`` steps, with a step of the schedule for ``each`` of them."""
    optimizer, scheduler = _stepped(make, each, steps)
    return schedule_unused(
        [Schedule(weakref.ref(scheduler), "train.py:7")], steps, ahead, [optimizer]
    )


def test_a_schedule_that_is_made_for_batches_and_stepped_with_steps() -> None:
    found = _made_for_more(lambda it: schedules.OneCycleLR(it, 0.1, total_steps=4000), 500)
    assert (found.name, found.made_for_steps, found.of_steps) == ("OneCycleLR", 4000, 500)
    facts = LearningFacts(steps=4, optimized=1, schedule_unused=found)
    (told,) = of_learning(facts)
    assert told.severity == "warning" and "does not come down" in told.title
    for total in (500, 600, 900):
        whole = _made_for_more(
            lambda it, n=total: schedules.OneCycleLR(it, 0.1, total_steps=n), 500
        )
        assert whole is None
    cosine = _made_for_more(lambda it: schedules.CosineAnnealingLR(it, 4000), 500)
    assert cosine is not None
    by_epoch = _made_for_more(lambda it: schedules.CosineAnnealingLR(it, 4000), 500, each=3)
    assert by_epoch is None


def test_restarts_that_are_meant_to_come_with_epochs() -> None:
    often = end_of(lambda it: schedules.CosineAnnealingWarmRestarts(it, 10), 5000)
    assert often is not None and often.rises and often.step == 10
    assert end_of(lambda it: schedules.CosineAnnealingWarmRestarts(it, 500), 5000) is None
    assert end_of(lambda it: schedules.CosineAnnealingWarmRestarts(it, 10, T_mult=2), 5000) is None
    assert end_of(lambda it: schedules.CosineAnnealingWarmRestarts(it, 10), 5000, each=9) is None


@pytest.mark.parametrize(("calls", "steps", "length"), [(3, 640, 2400), (2, 40, 1000)])
def test_a_schedule_of_steps_that_is_stepped_with_epochs(
    calls: int, steps: int, length: int
) -> None:
    """Of a run whose length is not known; OneCycleLR counts batches."""
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    made = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length)
    optimizer.step()
    for _ in range(calls):
        made.step()
    told = [Schedule(weakref.ref(made), "train.py:7")]
    found = schedule_unused(told, steps, 0, [optimizer])
    (said,) = of_learning(LearningFacts(steps=3, schedule_unused=found))
    assert said.kind == "schedule_unused" and str(said.place) == "train.py:7"
    assert f"once in {steps // calls} of the optimizer's" in said.title
    assert "after each optimizer.step()" in said.fix.action
    assert schedule_unused(told, calls, 0, [optimizer]) is None  # with each step
    assert schedule_unused(told, 8 * calls, 0, [optimizer]) is None  # gradients are accumulated


def test_a_schedule_of_epochs_is_stepped_with_them() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    for made in (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=90),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1600),
    ):
        optimizer.step()
        made.step()
        made.step()
        assert schedule_unused([Schedule(weakref.ref(made), None)], 640, 0, [optimizer]) is None


@pytest.mark.parametrize(
    ("make", "reached"),
    [
        (lambda it: schedules.LambdaLR(it, lambda step: min(1.0, step / 10_000)), 0.006),
        (lambda it: schedules.LinearLR(it, 0.01, total_iters=1000), 0.069),
        (lambda it: schedules.LambdaLR(it, lambda step: min(1.0, step / 50)), None),
        (lambda it: schedules.LinearLR(it, 0.1, total_iters=5), None),
        (lambda it: schedules.LambdaLR(it, lambda step: 0.1), None),
        (lambda it: schedules.OneCycleLR(it, 1.0, total_steps=60), None),
        (lambda it: schedules.ExponentialLR(it, 0.5), None),
    ],
)
def test_a_warm_up_is_part_of_its_training(make: Make, reached: float | None) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
    scheduler = make(optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    made = [Schedule(weakref.ref(scheduler), "train.py:7")]
    found = schedule_unused(made, 4, 60, [optimizer])

    assert (found is not None) == (reached is not None)
    if found is not None:
        assert reached is not None and found.reached == pytest.approx(reached, rel=0.01)
        (told,) = of_learning(LearningFacts(steps=4, schedule_unused=found))
        assert told.kind == "schedule_unused" and "warm-up is longer" in told.title


@pytest.mark.parametrize("each", [1, 8])
def test_a_schedule_that_goes_on_where_another_run_ended(each: int) -> None:
    """20 epochs were brought up before the first step: those are no 20 calls of its steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    scheduler = schedules.CosineAnnealingLR(optimizer, 50)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 20})
    known = Schedule(weakref.ref(scheduler), "train.py:7")
    known.begins(optimizer)
    for step in range(1, 4):
        optimizer.step()
        if step % each == 0:
            scheduler.step()
    found = schedule_end([known], 3, 240, [optimizer])
    assert (found is not None) is (each == 1)
    assert found is None or (found.rises and found.step == 30)


def test_a_schedule_that_another_has_replaced() -> None:
    """The first one is gone: it says nothing of the run, and is no error at its end."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    made = [Schedule(weakref.ref(schedules.StepLR(optimizer, 5)), "train.py:7")]
    scheduler = schedules.StepLR(optimizer, 5)
    known = [*made, Schedule(weakref.ref(scheduler), "train.py:8")]
    gc.collect()
    assert known[0].alive is None
    assert schedule_unused(known, 3, 240, [optimizer]) is None
    assert schedule_end(known, 3, 240, [optimizer]) is None
    assert schedule_fades(known, 32, [optimizer]) is None


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (lambda it: schedules.StepLR(it, 2), True),
        (lambda it: schedules.SequentialLR(
            it, [schedules.ConstantLR(it, 0.1, 2), schedules.ExponentialLR(it, 0.9)], [2]), True),
        (lambda it: schedules.ReduceLROnPlateau(it), False),  # of a loss before the training
    ],
)  # fmt: skip
def test_a_schedule_that_is_stepped_before_its_optimizer(make: Make, is_told: bool) -> None:
    def first(calls: int, restored: bool = False) -> Schedule | None:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))], 1e-3)
        if restored:
            optimizer.state[torch.zeros(3)] = {"step": 1}
        made = Schedule(weakref.ref(scheduler := make(optimizer)), "train.py:7")
        loss = (1.0,) if isinstance(scheduler, schedules.ReduceLROnPlateau) else ()
        for _ in range(calls):
            scheduler.step(*loss)
        made.begins(optimizer)
        scheduler.step(*loss)
        return stepped_first([made], [optimizer])

    assert (first(1) is not None) == is_told
    assert first(0) is None
    assert first(2) is None  # brought to where an earlier run was
    assert first(1, restored=True) is None
