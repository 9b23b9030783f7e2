"""The time of a step where some steps do more than others, or the model is evaluated among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

import trainfit
from helpers_cases import some_of
from trainfit.hardware.gpu_topology import find_gpus
from trainfit.plan.sizing.costing import machine_of, memory_law
from trainfit.plan.sizing.speed import speed
from trainfit.results.runs.recording import Recording
from trainfit.speed.step import step_time
from trainfit.speed.work import Work, period_of

_GPU = "RTX 3060 12GB"


def _recorded(
    steps: int, extra: Callable[[int], bool], evaluates: Callable[[int], bool]
) -> Recording:
    """Of a training that does as much again in some steps, and evaluates its model after some."""
    with trainfit.simulate(_GPU) as simulation:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spans = []
        for step in range(steps):
            x = torch.randn(64, 512).cuda()
            loss = model(x).sum()
            if extra(step):
                loss = loss + model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if evaluates(step):
                before = simulation.operators
                with torch.no_grad():
                    for _ in range(20):
                        model(torch.randn(256, 512).cuda())
                spans.append([before, simulation.operators])
        recording = simulation.recording
    return dataclasses.replace(recording, header={**recording.header, "evaluations": spans})


def _seconds(recording: Recording) -> float:
    return step_time(Work.of_steady_step(recording), machine_of(find_gpus(_GPU))).seconds


def _never(step: int) -> bool:
    return False


@pytest.mark.parametrize("period", some_of([2, 3], 1))
def test_the_mean_of_a_period(period: int) -> None:
    """Whichever step comes last."""
    plain, double = (_seconds(_recorded(3, each, _never)) for each in (_never, lambda _: True))
    mean = plain + (double - plain) / period
    for steps in (2 * period + 1, 2 * period + 2):
        found = _recorded(steps, lambda step: step % period == 0, _never)
        assert period_of(found) == period
        assert _seconds(found) == pytest.approx(mean, rel=0.03)
    told = speed(found, 64, machine_of(find_gpus(_GPU)))
    assert told is not None and any(f"mean of {period} steps" in note for note in told.notes)
    assert told.now.samples_per_s == pytest.approx(64 / mean, rel=0.03)
    assert told.mfu is not None and told.mfu < 1


def test_steps_that_are_alike_have_no_period() -> None:
    assert period_of(_recorded(7, _never, _never)) == 1
    assert period_of(_recorded(4, lambda step: step == 2, _never)) == 1  # seen once


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_among_the_steps_is_no_part_of_them(every: int) -> None:
    plain = _seconds(_recorded(4, _never, _never))
    found = _recorded(4, _never, lambda step: step % every == 0)
    assert found.evaluated_steps() == ({1, 2, 3, 4} if every == 1 else {1, 3})
    assert _seconds(found) == pytest.approx(plain, rel=0.01)
    assert _seconds(dataclasses.replace(found, header={**found.header, "evaluations": None})) > (
        1.5 * plain if every == 1 else 0.99 * plain
    )


def test_memory_is_compared_up_to_an_evaluation_that_the_other_lacks() -> None:
    one = _recorded(4, _never, lambda step: step == 1)
    other = _recorded(4, _never, _never)
    assert memory_law([(64, one), (64 + 1, other)]).recorded.steps == 2


def test_a_span_that_is_none_is_refused() -> None:
    found = _recorded(1, _never, _never)
    for odd in ([[3]], [[5, 2]], [["a", 2]]):
        broken = dataclasses.replace(found, header={**found.header, "evaluations": odd})
        with pytest.raises(ValueError, match="an evaluation is"):
            broken.check()
